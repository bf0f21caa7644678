"""What is left after the SIGKILL of a supervisor, and for how long, whatever its processes do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from benchmarks.group import SCHEMA, Group, children_of, is_gone, running, until
from benchmarks.states import Payload, hold, linger, spin
from taskqd import TaskQ

_FILE = """\
actors = "benchmarks.states:actors"
workers = [
    { name = "idle" },
    { name = "spin", queues = "spin" },
    { name = "hold", queues = "hold" },
    { name = "drain", queues = "linger" },
    { name = "boot", preload = "off" },
]
"""


async def measure_orphans(dsn: str) -> float:
    """Return the seconds from the SIGKILL of a supervisor until its last process is gone.

    One idles, one spins, one sleeps in C with the interpreter lock held, one drains, one boots.
    """
    with running(dsn, _FILE, supervisor="max_booting = 5") as group:
        async with TaskQ(dsn=dsn, schema=SCHEMA) as queue:
            for ref in (spin, hold, linger):
                await queue.enqueue(ref, Payload())
        group.wait_ready(5)  # but for the one that boots; and there is the scheduler
        group.wait(lambda: len(noted(group)) == 4)
        drains = next(event["pid"] for event in group.events("ready") if event["child"] == "drain.0")
        os.kill(drains, signal.SIGTERM)
        time.sleep(0.5)
        group.give_up_unless(not is_gone(drains))
        return kill_and_wait(group.process.pid, children_of(group.process.pid), within=10.0)


def kill_and_wait(pid: int, processes: Sequence[int], within: float) -> float:
    """Kill ``pid``; return the seconds until all ``processes`` are gone, or ``within``."""
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    left = list(processes)

    def all_gone() -> bool:
        left[:] = [each for each in left if not is_gone(each)]
        return not left

    return time.monotonic() - began if until(all_gone, lambda: False, within, pause=0.0005) else within


def noted(group: Group) -> list[tuple[str, int, float]]:
    """Return the name, the process and the time of each state that was entered."""
    file = group.directory / "states"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(name, int(pid), float(when)) for name, pid, when in map(str.split, lines)]
