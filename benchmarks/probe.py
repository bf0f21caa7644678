"""What one probe of a living group costs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.group import running

CALLS = 50
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


def cost_of(command: Sequence[str], calls: int) -> float:
    """Return the seconds of CPU of one run of ``command``, of many."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    before = _children()
    for _ in range(calls):
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, cwd="/tmp")
    return (_children() - before) / calls


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
