"""Fixtures of tests that work on a migrated schema: its jobs, a pool, a client, processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd import TaskQ
from taskqd.storage.connect import create_pool
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.postgres import Server
from tests.proxy import Proxy
from tests.support import Command


@pytest.fixture
def jobs(conn: asyncpg.Connection, schema: str) -> JobTable:
    """The jobs of this test's schema."""
    return JobTable(conn, schema)


@pytest.fixture
async def pool(dsn: str, schema: str) -> AsyncIterator[Any]:
    """A pool like the one that a worker claims and settles through."""
    pool = await create_pool(
        dsn, role="test", schema=schema, group="", min_size=1, max_size=4, command_timeout=10, pinned=True
    )
    try:
        yield pool
    finally:
        pool.terminate()


@pytest.fixture
async def tq(dsn: str, schema: str) -> AsyncIterator[TaskQ]:
    """A client of this test's schema."""
    async with TaskQ(dsn=dsn, schema=schema) as client:
        yield client


@pytest.fixture
def fleet(start: Callable[..., Command], child_env: dict[str, str], short_dir: Path) -> Fleet:
    """Processes of this test's schema."""
    return Fleet(start, child_env, short_dir)


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A session whose transactions others wait for, or pass."""
    conn = await asyncpg.connect(dsn, timeout=30)
    try:
        yield conn
    finally:
        await conn.close(timeout=10)


@pytest.fixture
def proxy(server: Server, short_dir: Path) -> Iterator[Proxy]:
    """A network between this test's processes and its server."""
    path = short_dir / "net"
    path.mkdir()
    proxy = Proxy(server, path)
    proxy.start()
    yield proxy
    proxy.stop()
