"""How soon a blocked event loop is noticed, with the line that blocks it."""

from __future__ import annotations

import os
import signal
from typing import Any

from benchmarks.group import SCHEMA, Group, at, running
from benchmarks.orphans import noted
from benchmarks.states import Payload, block
from taskqd import TaskQ

_FILE = """\
actors = "benchmarks.states:actors"
workers = [{ name = "block", queues = "block", max_concurrency = 1 }]
scheduler = { enabled = false }
"""


async def measure_silence(dsn: str, rounds: int) -> list[float]:
    """Return the seconds from when an actor blocks its event loop until the supervisor tells the guilty line."""
    found = []
    with running(dsn, _FILE, supervisor="stable_after = 0\nburst_limit = 0") as group:
        group.wait_ready(1)
        async with TaskQ(dsn=dsn, schema=SCHEMA) as queue:
            for number in range(rounds):
                await queue.enqueue(block, Payload())
                group.wait(lambda number=number: len(_told(group)) > number)
                _, pid, blocked = noted(group)[-1]
                found.append(at(_told(group)[-1]) - blocked)
                os.kill(pid, signal.SIGKILL)
                group.wait_ready(number + 2)
    return found


def _told(group: Group) -> list[dict[str, Any]]:
    return [
        event for event in group.events("stacks") if "states.py" in event["stacks"] and "in block" in event["stacks"]
    ]
