"""A running ``taskqd run``, and what is read of it and of other processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
PATIENCE = 120.0


class Group:
    """A supervisor of the workgroup file ``text``, with its processes."""

    def __init__(self, directory: Path, dsn: str, text: str, env: Mapping[str, str]) -> None:
        self.directory = directory
        self.socket = directory / "bench.sock"
        (directory / "bench.toml").write_text(text)
        self._log = directory / "log"
        self._told: list[dict[str, Any]] = []
        self._position = 0
        own = {"PYTHONPATH": str(ROOT), "TASKQ_PG_DSN": dsn, "TASKQ_SCHEMA_NAME": SCHEMA}
        self.began = time.time()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "taskqd", "run", "bench.toml"],
                stderr=log,
                cwd=directory,
                env={**os.environ, **own, **env},
                start_new_session=True,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what the supervisor has told under this name."""
        # On from where it was read to: a look must not slow down what is measured.
        with self._log.open() as log:
            log.seek(self._position)
            text, newline, _ = log.read().rpartition("\n")
        self._position += len((text + newline).encode())
        self._told += [json.loads(line) for line in text.split("\n") if line.startswith('{"group"')]
        return [event for event in self._told if event["event"] == name]

    def wait(self, done: Callable[[], object]) -> None:
        """Return when ``done``; end the benchmark when that never comes."""
        self.give_up_unless(until(done, lambda: self.process.poll() is not None))

    def wait_ready(self, count: int) -> list[dict[str, Any]]:
        """Return the first ``count`` events of processes that are ready, when there are so many."""
        self.wait(lambda: len(self.events("ready")) >= count)
        return self.events("ready")[:count]

    def give_up_unless(self, good: bool) -> None:
        """End the benchmark with what the group has printed, unless all is well."""
        if not good:
            raise SystemExit(f"the group does not do what it should:\n{self._log.read_text()[-5000:]}")

    def stop(self) -> float:
        """Ask the group to end; return the seconds that this took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)
        return time.monotonic() - began


@contextmanager
def running(
    dsn: str,
    text: str,
    *,
    supervisor: str = "",
    env: Mapping[str, str] | None = None,
) -> Iterator[Group]:
    """Run a group of the workgroup file ``text``, with ``supervisor`` in that table; stop it unless it has ended."""
    own = f'[supervisor]\nname = "bench"\nruntime_dir = "."\n{supervisor}'
    own += '\n[budget]\nenforce = "warn"'  # those that were killed are neighbours still, for a minute or two
    with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
        group = Group(Path(directory), dsn, f"{text}\n{own}", env or {})
        try:
            yield group
            if group.process.poll() is None:
                group.stop()
        finally:
            if group.process.poll() is None:
                group.process.kill()
                group.process.wait(PATIENCE)


def until(done: Callable[[], object], over: Callable[[], bool], within: float = PATIENCE, pause: float = 0.005) -> bool:
    """Wait until ``done``; False when it is ``over`` before, or not done ``within`` seconds."""
    deadline = time.monotonic() + within
    while not done():
        if over() or time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def at(event: Mapping[str, Any]) -> float:
    """Return the time of an event, in seconds of the epoch."""
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


def is_gone(pid: int) -> bool:
    """True when the process has ended, whether or not somebody has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory(pid: int, kind: str) -> float:
    """Return the MiB of a process: ``Private_`` is what it shares with no other, ``Pss`` its share of all it uses."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(kind) and "Pss_" not in line) / 1024


def cpu(pid: int) -> float:
    """Return the seconds of CPU that the threads of a process have had."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
