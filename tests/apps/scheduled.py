"""Actors of tests that are scheduled, and whose payloads are made when they run."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from typing import Any

from pydantic import BaseModel

from taskqd import JobContext, RetryPolicy, actor, cron, every
from tests.apps.basic import note


class Report(BaseModel):
    """What a report is about."""

    key: str = ""
    slot: str = ""


def for_slot(slot: datetime) -> Report:
    """Name the slot."""
    return Report(key="made", slot=slot.isoformat())


async def later() -> dict[str, str]:
    """Take a moment."""
    await asyncio.sleep(0)
    return {"key": "later"}


def raises() -> Report:
    """Fail."""
    raise RuntimeError("no such tenant")


def hangs() -> Report:
    """Never end."""
    time.sleep(3600)
    raise AssertionError


def nonsense() -> Any:
    """Return what is no payload."""
    return 42


@every(timedelta(hours=1), name="made", payload_factory=for_slot)
@every(timedelta(hours=1), name="later", payload_factory=later)
@every(timedelta(hours=1), name="raises", payload_factory=raises)
@every(timedelta(hours=1), name="hangs", payload_factory=hangs)
@every(timedelta(hours=1), name="nonsense", payload_factory=nonsense)
@cron("0 3 * * *", name="nightly", timezone="Europe/Berlin", payload=Report(key="nightly"))
@actor(name="report", retry=RetryPolicy(base=timedelta(0), max_attempts=3))
async def report(payload: Report, ctx: JobContext[Report]) -> str:
    """Say what it was given; fail once where it is told to by its attempt."""
    note("start", ctx, payload.key)
    return payload.slot


actors = [report]
