"""What the tests of the migration runner share: files that they write themselves, and other sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from taskqd.storage import connect as storage
from taskqd.storage import migrate

SECRET = "s3cr3t-word"
HOLD_MIGRATION_LOCK = "select pg_advisory_lock(hashtextextended('taskq:migrate:' || $1::text, 0))"
RELEASE_MIGRATION_LOCK = "select pg_advisory_unlock(hashtextextended('taskq:migrate:' || $1::text, 0))"

CREATE_THINGS = "create table {schema}.things (id int primary key);"
ADD_NAME = "alter table {schema}.things add column name text;"
DROP_NAME = "alter table {schema}.things drop column name;"


class Migrations:
    """A directory of migration files that a test writes itself."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, filename: str, sql: str, head: str = "-- min_code: 1") -> None:
        (self.path / filename).write_text(f"{head}\n\n{sql}\n")


@asynccontextmanager
async def session(dsn: str, role: str = "other", **options: str) -> AsyncIterator[asyncpg.Connection]:
    """Another session, named after its role."""
    conn = await asyncpg.connect(dsn, timeout=30, server_settings={"application_name": role}, **options)
    try:
        yield conn
    finally:
        await storage.close(conn)


async def tables(conn: asyncpg.Connection, schema: str) -> set[str]:
    rows = await conn.fetch(
        "select relname from pg_class where relkind = 'r' and relnamespace = $1::regnamespace", schema
    )
    return {row["relname"] for row in rows}


async def columns(conn: asyncpg.Connection, schema: str) -> list[str]:
    sql = "select column_name from information_schema.columns where table_schema = $1 and table_name = 'things'"
    return [row["column_name"] for row in await conn.fetch(sql, schema)]


async def waits_for_a_lock(conn: asyncpg.Connection, pid: int) -> bool:
    return bool(await conn.fetchval("select cardinality(pg_blocking_pids($1)) > 0", pid))


def names(applied: list[migrate.Applied]) -> list[str]:
    return [each.file.filename for each in applied]
