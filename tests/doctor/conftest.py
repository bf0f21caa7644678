"""The fixtures of tests that examine a migrated schema."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from taskqd.settings import Settings, load_settings
from taskqd.storage.doctor import Check, Finding, examine
from tests.queue_fixtures import fleet, jobs, other, tq

__all__ = ["fleet", "jobs", "other", "tq"]

Look = Callable[[Check], Awaitable[list[Finding]]]


@pytest.fixture
def settings(dsn: str, schema: str) -> Settings:
    """The settings of whoever examines this test's schema."""
    return load_settings(environ={"TASKQ_PG_DSN": dsn, "TASKQ_SCHEMA_NAME": schema})


@pytest.fixture
def look(dsn: str, settings: Settings) -> Look:
    """Run one check in a session of its own and return what it finds."""

    async def run(check: Check) -> list[Finding]:
        conn = await asyncpg.connect(dsn, timeout=30)
        try:
            return await examine(conn, settings, [(check.__name__, check)])
        finally:
            await conn.close(timeout=10)

    return run
