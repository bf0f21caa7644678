"""Settles what dead workers held, at once instead of when their leases end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.storage.connect import SESSION_LOST
from taskqd.storage.statements import load

BATCH = 500
"""Rows that one statement takes back."""
PAUSES = (0.05, 0.2, 0.8)
"""Seconds before each further attempt after a failure."""


async def release_workers(database: Any, schema: str, workers: Sequence[UUID], *, timeout: float) -> int:
    """Declare ``workers`` dead and take back their rows; return how many it was. Their processes must be gone.

    ``database`` is a pool or a connection; each statement may take ``timeout`` seconds. Harmless to repeat: rows are
    fenced by their epochs. A lost session, a timeout or a conflict is tried again three times, then raised.
    """
    sql = load("release", schema).release
    pauses = iter(PAUSES)
    taken = 0
    while True:
        try:
            batch: int = await database.fetchval(sql, list(workers), BATCH, timeout=timeout)
        except (*SESSION_LOST, asyncpg.PostgresError):
            pause = next(pauses, None)
            if pause is None:
                raise
            await asyncio.sleep(pause)
            continue
        taken += batch
        if batch < BATCH:
            return taken
