"""An actor that takes its process with it."""

from __future__ import annotations

import os
from datetime import timedelta

from taskqd import JobContext, RetryPolicy, actor
from tests.apps.basic import Work, big, note, succeed


@actor(name="vanishes", retry=RetryPolicy(base=timedelta(0), max_attempts=2))
async def vanishes(payload: Work, ctx: JobContext[Work]) -> None:
    """Exit with code 7, in the middle of everything."""
    note("start", ctx, payload.key)
    os._exit(7)


actors = [vanishes, succeed, big]
