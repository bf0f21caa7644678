"""F21: Nobody reads the log, the disk is full, a line never ends, or there are too many of them: nobody waits, and
what is lost is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.matrix.conftest import Trial
from tests.matrix.oracle import needs, works
from tests.supervisor.asking import taskqd
from tests.supervisor.conftest import ACTORS, Group
from tests.support import Command, wait_until

CAPTURE = {"supervisor": 'logs = "capture"\nstall_after = 60'}
FULL = [
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=4k none "${RUN:-/tmp}" && { cat /dev/zero > "${RUN:-/tmp}/full"; exec "$@"; }',
    "sh",
]
"""Runs a command with nothing but a full disk in ``RUN``."""


def test_f21_a_reader_that_stops_holds_neither_supervisor_nor_processes(trial: Trial) -> None:
    with trial(tables=CAPTURE, modes={"io": "talkative,second-life"}) as g:
        assert g.stop() == 0
        with stuck_pipe() as (reader, writer):
            g.command = g.run_again(stderr=writer)
            said = talked(g)
            assert said["slowest_s"] < 5
            wait_until(lambda: g.ask("/ready")[0] == 200, 30)
            assert "xxxx" in taskqd(g, "logs").stdout, "what was not passed on is kept"
            lost = dropped(g)
            assert lost > said["lines"] / 2
            os.set_blocking(reader, False)
            seen = b""
            with contextlib.suppress(BlockingIOError):
                while True:
                    seen += os.read(reader, 65536)
            assert g.stop() == 0
            with contextlib.suppress(BlockingIOError):
                while data := os.read(reader, 65536):
                    seen += data
        lines = seen.partition(b"\n")[2].splitlines()
        told = [json.loads(line) for line in lines if line.startswith(b'{"group"')]
        assert told[0]["event"] == "log-lines-dropped"
        assert told[0]["count"] >= lost
        assert told[-1]["event"] == "shutdown-complete"


def test_f21_many_lines_and_a_very_long_one(trial: Trial) -> None:
    with trial(tables=CAPTURE, modes={"io": "talkative"}) as g:
        said = talked(g)
        assert said["slowest_s"] < 5
        assert dropped(g) == 0
        assert g.ask("/status")[1]["children"][0]["state"] == "ready"
        assert g.stop() == 0
        lines = [line.partition(" | ")[2] for line in g.command.stderr.splitlines() if line.startswith("io.0")]
        numbers = [line for line in lines if line.startswith("line ")]
        assert numbers == [f"line {number} {'-' * 40}" for number in range(said["lines"])]
        pieces = [line for line in lines if line.startswith("xx")]
        assert sum(map(len, pieces)) == said["long_line"]
        assert max(map(len, pieces)) <= 64 * 1024
        assert not g.events("stalled")


def test_f21_a_full_disk(trial: Trial) -> None:
    needs(works(*FULL, "true"), "the right to mount a file system")
    with trial(actors=ACTORS, ready=0) as g:
        g.wait_for("ready")
        assert g.stop() == 0
        with open("/dev/full", "wb") as full:
            env = {**g._env, "RUN": str(g.runtime)}
            g.command = Command([*FULL, *g.command.argv], g.directory, env, stderr=full.fileno())
        real, g.runtime = g.runtime, Path(f"/proc/{g.command.pid}/root{g.runtime}")
        wait_until(lambda: is_ready(g), 60)
        wait_until(lambda: g.ask("/status")[1]["children"][0]["beat"].get("worker_id"), 30)
        assert {path.name for path in g.runtime.iterdir()} == {"full", "group", "group.lock", "group.sock"}
        assert g.stop() == 0
        g.runtime = real


def is_ready(g: Group) -> bool:
    """True when it says so; for a moment its socket is there and nobody listens yet."""
    with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
        return g.ask("/ready")[0] == 200
    return False


def talked(g: Group) -> dict[str, Any]:
    """What the talkative one says of itself once it has said everything."""
    file = g.directory / "talked"
    wait_until(file.exists, 60, "it has said everything")
    said: dict[str, Any] = json.loads(file.read_text())
    return said


def dropped(g: Group) -> int:
    """How many lines the supervisor says it lost."""
    text = g.ask("/metrics")[1]["text"]
    (line,) = [line for line in text.splitlines() if line.startswith("taskqd_log_dropped_total ")]
    return int(line.split()[1])


@contextlib.contextmanager
def stuck_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that is full to the last page, and its two ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"-" * 4095 + b"\n")
    os.set_blocking(writer, True)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)
