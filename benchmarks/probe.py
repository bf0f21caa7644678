"""What one probe of a living group costs, and how long a person waits for its status."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.group import running

CALLS = 50
ASKED = 15
_FILE = """\
actors = "benchmarks.sleeper:actors"
workers = [{ name = "io" }]
"""


def measure_probe(dsn: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of CPU of one ``taskqd health live``, and of one ``python3 -c pass`` beside it."""
    with running(dsn, _FILE) as group:
        group.wait_ready(2)
        ask = [str(Path(sys.executable).with_name("taskqd")), "health", "live", "--socket", str(group.socket)]
        nothing = [sys.executable, "-c", "pass"]
        cost_of(ask, 5), cost_of(nothing, 5)  # from then on the files are in memory
        return [(cost_of(ask, CALLS), cost_of(nothing, CALLS)) for _ in range(rounds)]


def measure_status(dsn: str, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds that ``taskqd status`` of a group of eight takes, and ``python3 -c pass`` beside it."""
    with running(dsn, _FILE.replace('"io"', '"io", replicas = 8')) as group:
        group.wait_ready(9)
        ask = [str(Path(sys.executable).with_name("taskqd")), "status", "--socket", str(group.socket)]
        nothing = [sys.executable, "-c", "pass"]
        time_of(ask, 5), time_of(nothing, 5)
        return [(time_of(ask, ASKED), time_of(nothing, ASKED)) for _ in range(rounds)]


def time_of(command: Sequence[str], calls: int) -> float:
    """Return the median of the seconds that runs of ``command`` take."""
    return statistics.median(_time_of(command) for _ in range(calls))


def _time_of(command: Sequence[str]) -> float:
    began = time.monotonic()
    _run(command)
    return time.monotonic() - began


def cost_of(command: Sequence[str], calls: int) -> float:
    """Return the seconds of CPU of one run of ``command``, of many."""
    before = _children()
    for _ in range(calls):
        _run(command)
    return (_children() - before) / calls


def _run(command: Sequence[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd="/tmp")


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
