"""The fixtures of tests that work on a migrated schema."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.maintenance.firing import Firing
from tests.queue_fixtures import fleet, jobs, pool, tq
from tests.scheduler.schedules import ScheduleTable

__all__ = ["firing", "fleet", "jobs", "pool", "schedules", "tq"]


@pytest.fixture
def schedules(conn: asyncpg.Connection, schema: str) -> ScheduleTable:
    """The schedules of this test's schema."""
    return ScheduleTable(conn, schema)


@pytest.fixture
def firing(pool: Any, schema: str) -> Firing:
    """What fires them."""
    return Firing(pool, schema, new_uuid(), statement_timeout=10)
