"""Actors that do not let the event loop run."""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta

from taskqd import JobContext, RetryPolicy, actor
from tests.apps.basic import Work, note, slow_plain, succeed

ONCE = RetryPolicy(max_attempts=1)


@actor(name="waits", retry=ONCE)
async def waits(payload: Work, ctx: JobContext[Work]) -> str:
    """Wait in a call that gives the interpreter lock away."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)
    return "waited"


@actor(name="computes", retry=ONCE)
async def computes(payload: Work, ctx: JobContext[Work]) -> str:
    """Compute in Python."""
    note("start", ctx, payload.key)
    deadline = time.monotonic() + payload.seconds
    rounds = 0
    while time.monotonic() < deadline:
        rounds += 1
    return "computed"


@actor(name="holds", retry=ONCE)
async def holds(payload: Work, ctx: JobContext[Work]) -> str:
    """Wait in C and keep the interpreter lock."""
    note("start", ctx, payload.key)
    ctypes.PyDLL(None).usleep(int(payload.seconds * 1e6))
    return "held"


@actor(name="endless", retry=ONCE, start_to_close=timedelta(seconds=1))
def endless(payload: Work, ctx: JobContext[Work]) -> None:
    """Hang in a thread."""
    note("start", ctx, payload.key)
    time.sleep(payload.seconds)


actors = [waits, computes, holds, endless, succeed, slow_plain]
