"""A group of workers with a heavy application, forked and exec'ed in the same run: ``scripts/bench spawn``.

Measured for each way: from the first worker until all are ready, the same with the import that forking needs before
(it runs beside the check before the start), the whole start of ``taskqd run`` until then, the private memory of an
idle worker, and the time from the SIGKILL of a worker until its replacement is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import asyncpg

from taskqd.storage.migrate import migrate_up
from tests.postgres import embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
PATIENCE = 120.0
KILLS = 5
IDLE = 3.0
FILE = """\
actors = "benchmarks.heavy:registry"
[supervisor]
name = "bench"
runtime_dir = "."
preload = "{preload}"
stable_after = 0
burst_limit = 0
[[workers]]
name = "io"
replicas = {workers}
[scheduler]
enabled = false
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one start of the group. Seconds, and MiB."""

    spawn: float
    with_import: float
    whole: float
    memory: float
    heal: float


class Group:
    """A running ``taskqd run``."""

    def __init__(self, directory: Path, dsn: str, preload: str, workers: int) -> None:
        (directory / "bench.toml").write_text(FILE.format(preload=preload, workers=workers))
        self._log = directory / "log"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TASKQ_PG_DSN": dsn,
            "TASKQ_SCHEMA_NAME": SCHEMA,
            "TASKQ_QUEUES": "bench",
            "TASKQ_MAX_CONCURRENCY": "4",
            "TASKQ_LOG_LEVEL": "WARNING",
        }
        self.began = time.time()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "taskqd", "run", "bench.toml"],
                stderr=log,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what the supervisor has told under this name."""
        lines = [line for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready``; end the benchmark when that never comes."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the group did not come up:\n{self._log.read_text()}")
            time.sleep(0.01)


def at(event: dict[str, Any]) -> float:
    """Return the time of an event, in seconds of the epoch."""
    return datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()


def private_mib(pid: int) -> float:
    """Return the memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


@contextmanager
def running(dsn: str, preload: str, workers: int) -> Iterator[Group]:
    """Run a group, and stop it."""
    with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
        group = Group(Path(directory), dsn, preload, workers)
        try:
            yield group
            group.process.send_signal(signal.SIGTERM)
            group.process.wait(timeout=PATIENCE)
        finally:
            if group.process.poll() is None:
                group.process.kill()
                group.process.wait(timeout=PATIENCE)


def measure(dsn: str, preload: str, workers: int) -> Figures:
    """Start the group once and return its figures."""
    with running(dsn, preload, workers) as group:
        group.wait(lambda: len(group.events("ready")) == workers)
        all_ready = max(map(at, group.events("ready")))
        spawn = all_ready - min(map(at, group.events("spawn")))
        with_import = spawn + sum(event["import_s"] for event in group.events("preload-ready"))
        time.sleep(IDLE)
        pids = [event["pid"] for event in group.events("ready")]
        memory = statistics.median(map(private_mib, pids))
        heals = []
        for number in range(KILLS):
            victim, count = pids[number], workers + number + 1
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            group.wait(lambda count=count: len(group.events("ready")) == count)
            heals.append(at(group.events("ready")[-1]) - killed)
        return Figures(spawn, with_import, all_ready - group.began, memory, statistics.median(heals))


async def prepare(dsn: str) -> None:
    """Make the schema."""
    connection = await asyncpg.connect(dsn)
    await migrate_up(connection, SCHEMA)
    await connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench spawn", description=__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = embedded(18)
    found: dict[str, list[Figures]] = {"require": [], "off": []}
    try:
        asyncio.run(prepare(server.dsn()))
        for number in range(options.rounds):
            for preload, figures in found.items():
                figures.append(measure(server.dsn(), preload, options.workers))
                print(f"round {number + 1}, preload = {preload}: {figures[-1]}", flush=True)
    finally:
        server.remove()
    print(f"medians of {options.rounds} rounds, {options.workers} workers on {os.cpu_count()} CPUs")
    print(f"{'':<36}{'forked':>10}{'exec':>10}{'ratio':>8}")
    rows = {
        "first spawn to all ready (ms)": ("spawn", 1000),
        "import and spawn to all ready (ms)": ("with_import", 1000),
        "taskqd run to all ready (ms)": ("whole", 1000),
        "private memory of a worker (MiB)": ("memory", 1),
        "SIGKILL to replacement ready (ms)": ("heal", 1000),
    }
    for text, (name, scale) in rows.items():
        forked, execed = (statistics.median(getattr(each, name) for each in found[way]) for way in found)
        print(f"{text:<36}{forked * scale:>10.1f}{execed * scale:>10.1f}{forked / execed:>8.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
