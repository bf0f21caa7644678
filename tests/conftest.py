"""Fixtures for all tests: one real Postgres per session, a fresh migrated schema per test, real processes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import hypothesis
import pytest

from tests.postgres import Server, debian_15, embedded, missing_debian_15
from tests.support import Command, child_environment, taskqd_argv

# How long one example takes is the machine's affair.
hypothesis.settings.register_profile("taskqd", deadline=None)
hypothesis.settings.load_profile("taskqd")

# As an interactive shell starts its commands, whatever started the tests: what they start would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)

for _name in [name for name in os.environ if name.startswith(("TASKQ_", "TASKQD_"))]:
    del os.environ[_name]


def _serve(server: Server) -> Iterator[Server]:
    try:
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The session's Postgres 18. A test that stops it starts it again."""
    yield from _serve(embedded(18))


@pytest.fixture(scope="session")
def pg16() -> Iterator[Server]:
    """Postgres 16 of the embedded wheel, started for the tests that ask."""
    yield from _serve(embedded(16))


@pytest.fixture(scope="session")
def pg15() -> Iterator[Server]:
    """Debian's Postgres 15; the test is skipped, and says why, on a machine without it."""
    missing = missing_debian_15()
    if missing:
        pytest.skip(missing)
    yield from _serve(debian_15())


@pytest.fixture
def dsn(server: Server) -> str:
    """The DSN of the session's server."""
    return server.dsn()


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A plain connection to the session's server."""
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        yield connection
    finally:
        await connection.close(timeout=10)


@pytest.fixture
async def schema(dsn: str) -> AsyncIterator[str]:
    """The name of a fresh, migrated schema, dropped after the test."""
    from taskqd.storage.migrate import migrate_up

    name = f"t_{uuid.uuid4().hex[:12]}"
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        await migrate_up(connection, name)
        yield name
    finally:
        await connection.close(timeout=10)
        await _drop(dsn, name)


_END_SESSIONS = """
select pg_terminate_backend(l.pid)
  from pg_locks l join pg_class c on c.oid = l.relation
 where c.relnamespace = to_regnamespace(quote_ident($1)) and l.pid <> pg_backend_pid()
"""


async def _drop(dsn: str, name: str) -> None:
    """Drop a schema even when the test left a session in it: such sessions are ended."""
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        await connection.execute("set lock_timeout = '2s'")
        drop = f'drop schema if exists "{name}" cascade'
        try:
            await connection.execute(drop)
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            await connection.execute(_END_SESSIONS, name)
            await connection.execute(drop)
    finally:
        await connection.close(timeout=10)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path is short enough for unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="tq", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def child_env(dsn: str, schema: str) -> dict[str, str]:
    """The environment of a child process that works on this test's schema."""
    return child_environment(TASKQ_PG_DSN=dsn, TASKQ_SCHEMA_NAME=schema)


@pytest.fixture
def start(short_dir: Path) -> Iterator[Callable[..., Command]]:
    """Start ``taskqd`` with arguments in an empty directory; whatever still runs after the test is killed."""
    commands: list[Command] = []

    def run(*args: str, env: dict[str, str] | None = None) -> Command:
        command = Command(taskqd_argv(*args), short_dir, child_environment() if env is None else env)
        commands.append(command)
        return command

    try:
        yield run
    finally:
        for command in commands:
            command.end()
