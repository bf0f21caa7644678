"""A client on the test's own schema, and what its tests look at behind its back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd import TaskQ
from taskqd.storage.schema_name import wake_channel

Finish = Callable[..., Awaitable[None]]


@pytest.fixture
async def tq(dsn: str, schema: str) -> AsyncIterator[TaskQ]:
    """An open client."""
    async with TaskQ(dsn=dsn, schema=schema) as client:
        yield client


@pytest.fixture
def count(conn: asyncpg.Connection, schema: str) -> Callable[[], Awaitable[int]]:
    """Count the jobs that others can see."""

    async def jobs() -> int:
        return int(await conn.fetchval(f'select count(*) from "{schema}".jobs'))

    return jobs


@pytest.fixture
def finish(conn: asyncpg.Connection, schema: str) -> Finish:
    """End a job as a worker's settlement would have."""

    async def end(job_id: UUID, status: str = "succeeded", *, result: Any = None, error: str | None = None) -> None:
        await conn.execute(
            f"""
            update "{schema}".jobs set status = $2::text::"{schema}".job_status, finished_at = clock_timestamp(),
                result = $3::text::jsonb, error_class = $4::text, error_message = $4::text,
                idempotency_freed = unique_while_active
            where id = $1
            """,
            job_id,
            status,
            None if result is None else json.dumps(result),
            error,
        )

    return end


class Wakes:
    """The notifications that sleeping workers of a schema would get, by the time of their arrival."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, *_: object) -> None:
        self.times.append(asyncio.get_running_loop().time())

    @property
    def seen(self) -> int:
        """How many have arrived."""
        return len(self.times)


@pytest.fixture
async def wakes(dsn: str, schema: str) -> AsyncIterator[Wakes]:
    """What a listener of the schema's wake channel receives."""
    listener = await asyncpg.connect(dsn, timeout=30)
    received = Wakes()
    await listener.add_listener(wake_channel(schema), received)
    try:
        yield received
    finally:
        await listener.close(timeout=10)
