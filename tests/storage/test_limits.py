"""What a group may connect: the tightest of the server's, the role's and the database's limit."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest

from taskqd.storage.connect import connect
from taskqd.storage.limits import read_connection_limits
from tests.postgres import Server


@pytest.fixture
async def role(conn: asyncpg.Connection) -> AsyncIterator[str]:
    """An ordinary role without a limit."""
    name = f"limited_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {name} login")
    yield name
    await conn.execute(f"drop role {name}")


async def look(server: Server, role: str, database: str = "postgres") -> tuple[str | None, int, int]:
    dsn = server.dsn(user=role, database=database)
    own = await connect(dsn, role="preflight", schema="s", group="g")
    other = await connect(dsn, role="client", schema="s")
    try:
        found = await read_connection_limits(own, "s", "g")
    finally:
        await own.close(timeout=10)
        await other.close(timeout=10)
    return found.limited_by, found.max_connections, found.others


async def test_the_servers_limit_holds_where_there_is_no_other(server: Server, role: str) -> None:
    limited_by, granted, others = await look(server, role)
    assert limited_by is None
    assert granted >= 20
    assert others >= 1


async def test_a_role_with_a_limit_of_its_own(server: Server, role: str, conn: asyncpg.Connection) -> None:
    await conn.execute(f"alter role {role} connection limit 5")
    assert await look(server, role) == (f"role {role}", 5, 1)


async def test_a_database_with_a_limit_of_its_own(server: Server, role: str, conn: asyncpg.Connection) -> None:
    await conn.execute(f"create database {role}")
    try:
        await conn.execute(f"alter database {role} connection limit 4")
        assert await look(server, role, role) == (f"database {role}", 4, 1)
    finally:
        await conn.execute(f"drop database {role} with (force)")
