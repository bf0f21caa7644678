"""The waits of a migration: bounded, naming who is in the way, and leaving nothing behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import asyncpg
import pytest

from taskqd.domain.errors import (
    MigrationLockTimeoutError,
)
from taskqd.domain.exit_codes import ExitCode
from taskqd.storage.migrate import MigrationFailedError, migrate_status, migrate_up
from tests.storage.migrations import (
    CREATE_THINGS,
    HOLD_MIGRATION_LOCK,
    RELEASE_MIGRATION_LOCK,
    SECRET,
    Migrations,
    columns,
    names,
    session,
    waits_for_a_lock,
)
from tests.support import eventually


async def test_the_holder_of_the_migration_lock_is_named(
    dsn: str, conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    async with session(dsn, "taskqd/x//migrate") as holder:
        await holder.execute(HOLD_MIGRATION_LOCK, name)
        with pytest.raises(MigrationLockTimeoutError) as caught:
            await migrate_up(conn, name, directory=three.path, lock_timeout=0.2)
        message = str(caught.value)
        assert f"another migration of schema '{name}' is running, waited 0.2 s for it" in message
        assert re.search(rf"pid {holder.get_server_pid()} \(taskqd/x//migrate, idle, query began \d+ s ago\)", message)
        assert caught.value.exit_code is ExitCode.TRY_AGAIN
        await holder.execute(RELEASE_MIGRATION_LOCK, name)
    assert len(await migrate_up(conn, name, directory=three.path)) == 3


async def test_the_holder_of_a_table_lock_is_named_the_file_rolled_back_and_then_run_again(
    dsn: str, conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    await migrate_up(conn, name, directory=three.path, target=1)
    async with session(dsn, "nightly-report") as holder, session(dsn, "bystander") as bystander:
        await holder.execute(f"begin; select '{SECRET}' from {name}.things")
        await bystander.execute("begin; select from pg_class limit 1")
        with pytest.raises(MigrationLockTimeoutError) as caught:
            await migrate_up(conn, name, directory=three.path, lock_timeout=0.3)
        message = str(caught.value)
        assert message.startswith("migration 0002_name.pre.sql waited 0.3 s for a lock held by pid ")
        assert re.search(
            rf"pid {holder.get_server_pid()} \(nightly-report, idle in transaction, query began \d+ s ago\)", message
        )
        assert message.endswith("it was rolled back and can be run again")
        assert "bystander" not in message
        assert SECRET not in message
        assert "\n" not in message
        assert (await migrate_status(conn, name, three.path)).version == 1
        assert await columns(conn, name) == ["id"]
        await holder.execute("commit")
    assert len(await migrate_up(conn, name, directory=three.path)) == 2


async def test_the_migration_lock_is_given_back_after_a_failure(
    dsn: str, conn: asyncpg.Connection, name: str, files: Migrations
) -> None:
    files.write("0001_bad.pre.sql", "select 1 / 0;")
    for _ in range(2):
        with pytest.raises(MigrationFailedError, match="division by zero"):
            await migrate_up(conn, name, directory=files.path)
    async with session(dsn) as other:
        with pytest.raises(MigrationFailedError, match="division by zero"):
            await migrate_up(other, name, directory=files.path, lock_timeout=0.2)


async def test_of_concurrent_runs_one_applies_each_file_and_the_others_find_nothing_to_do(
    dsn: str, conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    async def run() -> list[str]:
        async with session(dsn) as own:
            return names(await migrate_up(own, name, directory=three.path))

    results = await asyncio.gather(*(run() for _ in range(4)))
    assert sorted(map(len, results)) == [0, 0, 0, 3]
    assert len((await migrate_status(conn, name, three.path)).applied) == 3


async def test_a_run_waits_for_the_one_before_it(
    dsn: str, conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    await migrate_up(conn, name, directory=three.path, target=1)
    async with session(dsn) as holder, session(dsn) as first, session(dsn) as second:
        await holder.execute(f"begin; select from {name}.things")
        running = asyncio.create_task(migrate_up(first, name, directory=three.path))
        await eventually(lambda: waits_for_a_lock(conn, first.get_server_pid()))
        waiting = asyncio.create_task(migrate_up(second, name, directory=three.path))
        polls = "select query ~ 'pg_try_advisory_lock' from pg_stat_activity where pid = $1"
        await eventually(lambda: conn.fetchval(polls, second.get_server_pid()))
        await holder.execute("rollback")
        assert len(await running) == 2
        assert await waiting == []


async def test_two_schemas_of_a_database_do_not_touch(
    dsn: str, conn: asyncpg.Connection, fresh: Callable[[], str], three: Migrations
) -> None:
    one, other = fresh(), fresh()
    await migrate_up(conn, one, directory=three.path, target=1)
    async with session(dsn) as holder:
        await holder.execute(HOLD_MIGRATION_LOCK, one)
        await holder.execute(f"begin; lock table {one}.things")
        assert len(await migrate_up(conn, other, directory=three.path, lock_timeout=0.5)) == 3
    assert (await migrate_status(conn, one, three.path)).version == 1
    assert (await migrate_status(conn, other, three.path)).version == 2


# -- files that refuse a transaction --------------------------------------------------------------

CONCURRENT_INDEX = """
-- The semicolon in this comment; and the one in 'that; string' below end no statement.
drop index concurrently if exists {schema}.things_id2;
create index concurrently things_id2 on {schema}.things (id) where id::text <> 'a;b';
"""
NO_TRANSACTION = "-- min_code: 1\n-- taskqd: no-transaction"


async def test_a_file_may_opt_out_of_the_transaction(conn: asyncpg.Connection, name: str, files: Migrations) -> None:
    files.write("0001_things.pre.sql", CREATE_THINGS)
    files.write("0002_index.pre.sql", CONCURRENT_INDEX, head=NO_TRANSACTION)
    settings = "select current_setting('lock_timeout'), current_setting('search_path')"
    before = await conn.fetchrow(settings)
    assert len(await migrate_up(conn, name, directory=files.path)) == 2
    assert await conn.fetchrow(settings) == before
    valid = "select indisvalid from pg_index where indexrelid = $1::text::regclass"
    assert await conn.fetchval(valid, f"{name}.things_id2") is True


async def test_a_concurrent_build_that_waits_for_a_snapshot_names_its_holder_and_can_be_run_again(
    dsn: str, conn: asyncpg.Connection, name: str, files: Migrations
) -> None:
    files.write("0001_things.pre.sql", CREATE_THINGS)
    await migrate_up(conn, name, directory=files.path)
    files.write("0002_index.pre.sql", CONCURRENT_INDEX, head=NO_TRANSACTION)
    async with session(dsn, "reporting") as reader:
        await reader.execute("begin isolation level repeatable read; select from pg_class limit 1")
        with pytest.raises(MigrationLockTimeoutError) as caught:
            await migrate_up(conn, name, directory=files.path, lock_timeout=0.3)
        assert f"pid {reader.get_server_pid()} (reporting, idle in transaction" in str(caught.value)
        assert "run it again" in str(caught.value)
        await reader.execute("rollback")
    assert await conn.fetchval("show lock_timeout") == "0"
    assert names(await migrate_up(conn, name, directory=files.path)) == ["0002_index.pre.sql"]
