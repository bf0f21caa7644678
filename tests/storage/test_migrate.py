"""The migration runner on a real server: what it applies and records, and which schema is accepted."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable

import asyncpg
import pytest

from taskqd.domain.errors import (
    ConfigError,
    DatabaseAuthError,
    MigrationLockTimeoutError,
    SchemaNotMigratedError,
    SchemaOutOfRangeError,
)
from taskqd.domain.exit_codes import ExitCode
from taskqd.storage import connect as storage
from taskqd.storage import migrate
from taskqd.storage.migrate import MigrationFailedError, check_schema, migrate_status, migrate_up
from tests.postgres import Server
from tests.storage.migrations import (
    CREATE_THINGS,
    Migrations,
    columns,
    names,
    session,
    tables,
    waits_for_a_lock,
)
from tests.support import eventually


async def test_up_applies_everything_in_order_and_a_second_run_nothing(
    conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    seen: list[str] = []
    before = await migrate_status(conn, name, three.path)
    applied = await migrate_up(
        conn, name, directory=three.path, on_applied=lambda each: seen.append(each.file.filename)
    )
    again = await migrate_up(conn, name, directory=three.path)
    after = await migrate_status(conn, name, three.path)

    in_order = ["0001_things.pre.sql", "0002_name.pre.sql", "0002_name.post.sql"]
    assert [file.filename for file in before.pending] == in_order
    assert (before.applied, before.version) == ([], 0)
    assert names(applied) == seen == in_order
    assert again == []
    assert [row.filename for row in after.applied] == in_order
    assert (after.pending, after.drift, after.version) == ([], [], 2)
    assert await columns(conn, name) == ["id"]


async def test_the_ledger_says_what_was_applied_when_and_by_whom(
    conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    await migrate_up(conn, name, directory=three.path, target=1)
    [row] = await conn.fetch(f"select * from {name}.schema_migrations")
    assert (row["version"], row["phase"], row["name"], row["min_code"]) == (1, "pre", "things", 1)
    assert re.fullmatch("[0-9a-f]{64}", row["checksum"])
    assert row["applied_by"] == await conn.fetchval("select session_user")
    assert await conn.fetchval("select clock_timestamp() - $1::timestamptz < interval '1 minute'", row["applied_at"])


async def test_a_run_can_be_bounded(conn: asyncpg.Connection, name: str, three: Migrations) -> None:
    assert names(await migrate_up(conn, name, directory=three.path, max_steps=1)) == ["0001_things.pre.sql"]
    assert names(await migrate_up(conn, name, directory=three.path, target=1)) == []
    with pytest.raises(ConfigError, match=r"0002_name\.post\.sql cannot be applied before 0002_name\.pre\.sql"):
        await migrate_up(conn, name, directory=three.path, phase="post")
    assert names(await migrate_up(conn, name, directory=three.path, phase="pre")) == ["0002_name.pre.sql"]
    assert (await migrate_status(conn, name, three.path)).version == 2
    assert names(await migrate_up(conn, name, directory=three.path, phase="post")) == ["0002_name.post.sql"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 3}, "target 3 is not a migration: allowed are 1 to 2"),
        ({"target": 0}, "target 0 is not a migration: allowed are 1 to 2"),
        ({"max_steps": 0}, "max steps 0 must be at least 1"),
        ({"phase": "mid"}, "phase 'mid' must be 'pre' or 'post'"),
        ({"lock_timeout": 0}, "lock timeout 0 s must be above 0 and at most 3600"),
        ({"lock_timeout": 3601}, "lock timeout 3601 s must be above 0 and at most 3600"),
    ],
)
async def test_a_bound_outside_its_range_is_refused(
    conn: asyncpg.Connection, name: str, three: Migrations, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        await migrate_up(conn, name, directory=three.path, **options)
    assert str(caught.value) == message


async def test_a_schema_name_that_needs_escaping_is_refused(conn: asyncpg.Connection, three: Migrations) -> None:
    for action in (migrate_up(conn, 'a"b', directory=three.path), check_schema(conn, "a-b")):
        with pytest.raises(ConfigError, match=r"schema name .* is invalid.*did you mean 'a_b'"):
            await action


async def test_a_connection_inside_a_transaction_is_refused(
    conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    async with conn.transaction():
        with pytest.raises(ConfigError, match="outside a transaction"):
            await migrate_up(conn, name, directory=three.path)


async def test_a_failing_file_is_rolled_back_and_named_with_its_line(
    conn: asyncpg.Connection, name: str, files: Migrations
) -> None:
    files.write("0001_things.pre.sql", CREATE_THINGS)
    files.write("0002_more.pre.sql", "create table {schema}.more (id int);\nalter table {schema}.no_such add x int;")
    with pytest.raises(MigrationFailedError) as caught:
        await migrate_up(conn, name, directory=files.path)
    assert str(caught.value) == (
        f'migration 0002_more.pre.sql failed: relation "{name}.no_such" does not exist (SQLSTATE 42P01); '
        "it was rolled back and can be run again"
    )
    assert await tables(conn, name) == {"schema_migrations", "things"}

    files.write("0002_more.pre.sql", "create table {schema}.more (id int);\n\nalter tabel {schema}.more add x int;")
    with pytest.raises(MigrationFailedError, match=r'failed at line 5: syntax error at or near "tabel"'):
        await migrate_up(conn, name, directory=files.path)

    files.write("0002_more.pre.sql", "create table {schema}.more (id int);")
    assert names(await migrate_up(conn, name, directory=files.path)) == ["0002_more.pre.sql"]


async def test_a_name_without_its_schema_is_an_error_and_not_a_table_elsewhere(
    conn: asyncpg.Connection, name: str, files: Migrations
) -> None:
    files.write("0001_things.pre.sql", "create table things (id int);")
    with pytest.raises(MigrationFailedError, match="no schema has been selected to create in"):
        await migrate_up(conn, name, directory=files.path)


async def test_both_placeholders_are_filled_and_other_braces_are_kept(
    conn: asyncpg.Connection, name: str, files: Migrations
) -> None:
    files.write("0001_t.pre.sql", "create table {schema}.t as select {schema_literal} as s, '{1,2}'::int[] as a;")
    await migrate_up(conn, name, directory=files.path)
    row = await conn.fetchrow(f"select * from {name}.t")
    assert row is not None
    assert (row["s"], row["a"]) == (name, [1, 2])


async def test_a_long_migration_is_not_cut_by_the_statement_timeout_of_the_role(
    dsn: str, name: str, files: Migrations
) -> None:
    files.write("0001_slow.pre.sql", "do $$ begin perform pg_sleep(0.3); end $$;")
    async with session(dsn) as conn:
        await conn.execute("set statement_timeout = '100ms'")
        assert names(await migrate_up(conn, name, directory=files.path)) == ["0001_slow.pre.sql"]
        assert await conn.fetchval("show statement_timeout") == "100ms"


async def test_a_lost_connection_leaves_nothing_behind_and_the_next_run_completes(
    dsn: str, conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    await migrate_up(conn, name, directory=three.path, target=1)
    async with session(dsn) as blocker, session(dsn) as victim, blocker.transaction():
        await blocker.execute(f"select from {name}.things")
        pid = victim.get_server_pid()
        running = asyncio.create_task(migrate_up(victim, name, directory=three.path))
        await eventually(lambda: waits_for_a_lock(conn, pid))
        await conn.execute("select pg_terminate_backend($1)", pid)
        with pytest.raises(storage.SESSION_LOST) as caught:
            await running
        message = str(storage.explain(caught.value, dsn))
        assert "is not reachable" in message
        assert "terminating connection due to administrator command" in message
    assert len(await migrate_up(conn, name, directory=three.path)) == 2


# -- may this code run here -----------------------------------------------------------------------


async def test_a_migrated_schema_is_accepted(conn: asyncpg.Connection, name: str, three: Migrations) -> None:
    await migrate_up(conn, name, directory=three.path, phase="pre")
    await check_schema(conn, name)


async def test_an_unmigrated_schema_says_what_to_run(conn: asyncpg.Connection, name: str, three: Migrations) -> None:
    message = f"schema '{name}' is not migrated: run `taskqd migrate up --schema {name}`"
    for prepare in ("select 1", f"create schema {name}"):
        await conn.execute(prepare)
        with pytest.raises(SchemaNotMigratedError) as caught:
            await check_schema(conn, name)
        assert str(caught.value) == message
        assert caught.value.exit_code is ExitCode.TRY_AGAIN

    three.write("0001_things.pre.sql", "select 1 / 0;")
    with pytest.raises(MigrationFailedError):
        await migrate_up(conn, name, directory=three.path)
    with pytest.raises(SchemaNotMigratedError):  # the ledger exists and is empty
        await check_schema(conn, name)


async def test_the_default_schema_needs_no_flag(server: Server, conn: asyncpg.Connection) -> None:
    await conn.execute("create database plain")
    try:
        async with session(server.dsn(database="plain")) as plain:
            with pytest.raises(SchemaNotMigratedError, match=r"run `taskqd migrate up`$"):
                await check_schema(plain, "taskq")
    finally:
        await conn.execute("drop database plain with (force)")


async def test_a_ledger_that_demands_later_code_is_too_new(
    conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    await migrate_up(conn, name, directory=three.path)
    later = migrate.CODE_LEVEL + 1
    await conn.execute(
        f"insert into {name}.schema_migrations (version, phase, name, checksum, min_code, applied_by) "
        "values (3, 'post', 'narrow', 'x', $1, 'later')",
        later,
    )
    for action in (check_schema(conn, name), migrate_up(conn, name, directory=three.path)):
        with pytest.raises(SchemaOutOfRangeError) as caught:
            await action
        assert "is too new for this code: 0003_narrow.post.sql needs code level" in str(caught.value)
        assert "upgrade taskqd" in str(caught.value)
        assert caught.value.exit_code is ExitCode.TRY_AGAIN


async def test_a_newer_schema_that_this_code_can_run_on_is_accepted(
    conn: asyncpg.Connection, name: str, three: Migrations
) -> None:
    await migrate_up(conn, name, directory=three.path)
    await conn.execute(
        f"insert into {name}.schema_migrations (version, phase, name, checksum, min_code, applied_by) "
        "values (3, 'pre', 'wider', 'x', 1, 'later')"
    )
    await check_schema(conn, name)
    assert await migrate_up(conn, name, directory=three.path) == []


async def test_a_schema_below_what_this_code_needs_is_too_old(
    conn: asyncpg.Connection, name: str, three: Migrations, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate_up(conn, name, directory=three.path, target=1)
    monkeypatch.setattr(migrate, "MIN_SCHEMA", 2)
    with pytest.raises(SchemaOutOfRangeError) as caught:
        await check_schema(conn, name)
    assert f"is too old for this code: it is at migration 1, 2 is needed: run `taskqd migrate up --schema {name}`" in (
        str(caught.value)
    )
    await migrate_up(conn, name, directory=three.path, phase="pre")
    await check_schema(conn, name)


async def test_a_ledger_of_another_program_is_refused(conn: asyncpg.Connection, name: str, three: Migrations) -> None:
    await conn.execute(f"create schema {name}; create table {name}.schema_migrations (version text, checksum text)")
    for action in (check_schema(conn, name), migrate_up(conn, name, directory=three.path)):
        with pytest.raises(ConfigError, match="a schema_migrations table of another program"):
            await action


async def test_a_role_without_privileges_is_told_which(
    dsn: str, conn: asyncpg.Connection, fresh: Callable[[], str], three: Migrations
) -> None:
    migrated, missing = fresh(), fresh()
    await migrate_up(conn, migrated, directory=three.path, target=1)
    role = f"r_{uuid.uuid4().hex[:12]}"
    await conn.execute(f"create role {role} login")
    try:
        async with session(dsn, user=role) as poor:
            with pytest.raises(DatabaseAuthError, match=f"permission denied for schema {migrated}"):
                await check_schema(poor, migrated)
            with pytest.raises(MigrationFailedError, match="cannot be prepared: permission denied for database"):
                await migrate_up(poor, missing, directory=three.path)

        # One that owns the tables and no more is told who blocks it, though not for how long.
        await conn.execute(f"grant usage, create on schema {migrated} to {role}")
        await conn.execute(f"alter table {migrated}.things owner to {role}")
        await conn.execute(f"alter table {migrated}.schema_migrations owner to {role}")
        async with session(dsn, user=role) as poor, conn.transaction():
            await conn.execute(f"select from {migrated}.things")
            with pytest.raises(MigrationLockTimeoutError, match=f"held by pid {conn.get_server_pid()} ") as caught:
                await migrate_up(poor, migrated, directory=three.path, lock_timeout=0.2)
            assert "not visible to this role" in str(caught.value)
    finally:
        await conn.execute(f"drop owned by {role} cascade; drop role {role}")


# -- the migrations of this release ---------------------------------------------------------------


async def test_the_shipped_migrations_apply_to_two_schemas_and_are_accepted(
    conn: asyncpg.Connection, fresh: Callable[[], str]
) -> None:
    one, other = fresh(), fresh()
    for schema in (one, other):
        assert len(await migrate_up(conn, schema)) >= 1
        assert await migrate_up(conn, schema) == []
        await check_schema(conn, schema)
    assert await tables(conn, one) == await tables(conn, other)
    assert {"jobs", "job_attempts", "workers", "schema_migrations"} <= await tables(conn, one)
    before = await tables(conn, other)
    await conn.execute(f"drop schema {one} cascade")
    assert await tables(conn, other) == before


@pytest.mark.parametrize("version", ["pg15", "pg16"])
async def test_the_shipped_migrations_apply_to_every_supported_postgres(
    request: pytest.FixtureRequest, version: str
) -> None:
    async with session(request.getfixturevalue(version).dsn()) as conn:
        await migrate_up(conn, "taskq")
        await check_schema(conn, "taskq")
