"""What the supervisor itself needs, beside a process that has only imported what every supervisor needs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.group import cpu, memory, running

CHILDREN = 16
_SETTLED = 5.0
"""Seconds after which nothing of the start goes on: the spare is laid in, what the start needed is given back."""
_WINDOW = 5.0
_BARE = "import asyncio, tomllib, json, logging; asyncio.run(asyncio.sleep(1000))"
_FILE = """\
actors = "benchmarks.sleeper:actors"
scheduler = {{ enabled = false }}
defaults = {{ max_concurrency = 1 }}
workers = [{{ name = "io", replicas = {children} }}]
"""


@contextmanager
def bare_process() -> Iterator[int]:
    """Run what the memory of every supervisor is compared with."""
    with subprocess.Popen([sys.executable, "-P", "-c", _BARE], cwd="/tmp") as process:
        time.sleep(1.0)
        try:
            yield process.pid
        finally:
            process.kill()


def measure_footprint(dsn: str, rounds: int) -> tuple[float, float, list[float]]:
    """Return the MiB of an idle supervisor of 16 workers and of the bare process, and its share of a processor."""
    with running(dsn, _FILE.format(children=CHILDREN)) as group, bare_process() as bare:
        group.wait_ready(CHILDREN)
        time.sleep(_SETTLED)
        shares = [share_of_processor(group.process.pid) for _ in range(rounds)]
        return memory(group.process.pid, "Pss"), memory(bare, "Pss"), shares


def share_of_processor(pid: int) -> float:
    """Return the share of one processor that a process has had for some seconds."""
    began, before = time.monotonic(), cpu(pid)
    time.sleep(_WINDOW)
    return (cpu(pid) - before) / (time.monotonic() - began)
