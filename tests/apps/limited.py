"""Actors with limits. Each execution leaves a start and an end in the execution log."""

from __future__ import annotations

import asyncio

from taskqd import ConcurrencyReservation, JobContext, actor
from tests.apps.basic import MANY, Work, note

SHARED = ConcurrencyReservation("shared", slots=2)


async def _run(payload: Work, ctx: JobContext[Work]) -> None:
    note("start", ctx, payload.key)
    await asyncio.sleep(payload.seconds)
    note("end", ctx, payload.key)


@actor(name="free", retry=MANY)
async def free(payload: Work, ctx: JobContext[Work]) -> None:
    """Nothing limits it."""
    await _run(payload, ctx)


@actor(name="one", retry=MANY, max_concurrent=1)
async def one(payload: Work, ctx: JobContext[Work]) -> None:
    """One at a time in the whole fleet."""
    await _run(payload, ctx)


@actor(name="left", retry=MANY, reservations=(SHARED,))
async def left(payload: Work, ctx: JobContext[Work]) -> None:
    """Shares two slots."""
    await _run(payload, ctx)


@actor(name="right", retry=MANY, reservations=(SHARED,))
async def right(payload: Work, ctx: JobContext[Work]) -> None:
    """Shares the same."""
    await _run(payload, ctx)


actors = [free, one, left, right]
