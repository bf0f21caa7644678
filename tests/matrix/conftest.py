"""Groups under the oracle: one for each test, or one for several cases of a module."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import asyncpg
import pytest

from taskqd.storage.migrate import migrate_up
from tests.matrix.oracle import oracle
from tests.postgres import Server
from tests.queue_fixtures import jobs
from tests.supervisor.conftest import Group, StartGroup, group, starter
from tests.support import child_environment

__all__ = ["group", "jobs"]

Trial = Callable[..., AbstractContextManager[Group]]


@pytest.fixture
def trial(group: StartGroup) -> Trial:
    """Start a group under the oracle: ``with trial(modes=…, tables=…, ready=2, ends=3) as g``."""
    return _on_trial(group)


@pytest.fixture(scope="module")
def module_env(server: Server) -> Iterator[dict[str, str]]:
    """The environment of groups that several tests of a module share, with a migrated schema of the module's own."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    asyncio.run(_migrate(server.dsn(), name))
    yield child_environment(TASKQ_PG_DSN=server.dsn(), TASKQ_SCHEMA_NAME=name)
    asyncio.run(_drop(server.dsn(), name))


@pytest.fixture(scope="module")
def module_trial(module_env: dict[str, str]) -> Iterator[Trial]:
    """Like ``trial``, for a fixture that a module's tests share; ``preload`` says how its workers are made."""
    directory = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
    try:
        with starter(directory, module_env, "off") as start:
            yield _on_trial(start)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _on_trial(start: StartGroup) -> Trial:
    @contextlib.contextmanager
    def run(
        modes: dict[str, str] | None = None,
        tables: dict[str, str] | None = None,
        *,
        ready: int = 1,
        ends: int | tuple[int, ...] = 0,
        preload: str | None = None,
        actors: str | None = None,
        first_lines: str = "",
        **env: str,
    ) -> Iterator[Group]:
        started = start(modes, tables, preload=preload, actors=actors, first_lines=first_lines, **env)
        with oracle(started, ready=ready, ends=ends) as running:
            yield running

    return run


@contextlib.asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        yield connection
    finally:
        await connection.close(timeout=10)


async def _migrate(dsn: str, schema: str) -> None:
    async with _connected(dsn) as connection:
        await migrate_up(connection, schema)


async def _drop(dsn: str, schema: str) -> None:
    async with _connected(dsn) as connection:
        await connection.execute(f'drop schema "{schema}" cascade')
