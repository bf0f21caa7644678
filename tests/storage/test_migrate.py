"""The migration runner on a real server: order, ledger, locks, and what it says when it cannot go on."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from taskqd.domain.errors import (
    ConfigError,
    DatabaseAuthError,
    MigrationChecksumError,
    MigrationLockTimeoutError,
    SchemaNotMigratedError,
    SchemaOutOfRangeError,
    TaskQError,
)
from taskqd.domain.exit_codes import ExitCode
from taskqd.storage import connect as storage
from taskqd.storage import migrate
from taskqd.storage.migrate import MigrationFailedError, check_schema, migrate_status, migrate_up
from tests.postgres import Server
from tests.support import Command, child_environment, eventually

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


@pytest.fixture
def files(tmp_path: Path) -> Migrations:
    """An empty directory for migrations."""
    return Migrations(tmp_path)


@pytest.fixture
def three(files: Migrations) -> Migrations:
    """Three migrations: create a table, add a column, and, after the roll-out, drop it again."""
    files.write("0001_things.pre.sql", CREATE_THINGS)
    files.write("0002_name.pre.sql", ADD_NAME)
    files.write("0002_name.post.sql", DROP_NAME)
    return files


@pytest.fixture
async def fresh(conn: asyncpg.Connection) -> AsyncIterator[Callable[[], str]]:
    """Names for schemas that do not exist yet; what became of them is dropped after the test."""
    names: list[str] = []

    def name() -> str:
        names.append(f"m_{uuid.uuid4().hex[:12]}")
        return names[-1]

    yield name
    for each in names:
        await conn.execute(f"drop schema if exists {each} cascade")


@pytest.fixture
def name(fresh: Callable[[], str]) -> str:
    """The name of one schema that does not exist yet."""
    return fresh()


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


# -- applying -------------------------------------------------------------------------------------


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


# -- refused files --------------------------------------------------------------------------------


async def test_an_edited_file_is_drift(conn: asyncpg.Connection, name: str, three: Migrations) -> None:
    await migrate_up(conn, name, directory=three.path, target=1)
    three.write("0001_things.pre.sql", CREATE_THINGS + " -- edited")
    with pytest.raises(MigrationChecksumError) as caught:
        await migrate_up(conn, name, directory=three.path)
    assert "0001_things.pre.sql changed after it was applied" in str(caught.value)
    assert name in str(caught.value)
    status = await migrate_status(conn, name, three.path)
    assert [row.filename for row in status.drift] == ["0001_things.pre.sql"]
    assert status.version == 1


async def test_line_ends_are_no_drift(conn: asyncpg.Connection, name: str, three: Migrations) -> None:
    await migrate_up(conn, name, directory=three.path)
    file = three.path / "0001_things.pre.sql"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert (await migrate_status(conn, name, three.path)).drift == []


@pytest.mark.parametrize(
    ("filenames", "message"),
    [
        (["0002_b.pre.sql"], "migration 0001 is missing: the next file is 0002_b.pre.sql"),
        (["0001_a.pre.sql", "0003_c.pre.sql"], "migration 0002 is missing: the next file is 0003_c.pre.sql"),
        (
            ["0001_a.pre.sql", "0001_b.pre.sql"],
            "migration 0001 exists twice: 0001_a.pre.sql and 0001_b.pre.sql",
        ),
        (
            ["0001_a.pre.sql", "0001_b.post.sql"],
            "migration 0001 exists twice: 0001_a.pre.sql and 0001_b.post.sql",
        ),
        (["0001_a.sql"], "migration file '0001_a.sql' is misnamed"),
        (["1_a.pre.sql"], "migration file '1_a.pre.sql' is misnamed"),
        (["0000_a.pre.sql"], "migration file '0000_a.pre.sql' is misnamed"),
        (["0001_A.pre.sql"], "migration file '0001_A.pre.sql' is misnamed"),
    ],
)
async def test_gaps_duplicates_and_misnamed_files_are_refused(
    conn: asyncpg.Connection, name: str, files: Migrations, filenames: list[str], message: str
) -> None:
    for filename in filenames:
        files.write(filename, "select 1;")
    with pytest.raises(ConfigError) as caught:
        await migrate_up(conn, name, directory=files.path)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("head", "sql", "message"),
    [
        ("-- a comment", "select 1;", "migration 0001_a.pre.sql does not declare '-- min_code: N' in its head"),
        ("select 0;\n-- min_code: 1", "select 1;", "does not declare '-- min_code: N' in its head"),
        ("-- min_code: two", "select 1;", "min_code 'two' is not a whole number from 1"),
        ("-- min_code: 0", "select 1;", "min_code '0' is not a whole number from 1"),
        ("-- min_code: 1\n-- taskqd: fast", "select 1;", "unknown option 'fast'; the only one is 'no-transaction'"),
        ("-- min_code: 1", "-- nothing; here", "migration 0001_a.pre.sql holds no SQL"),
        ("-- min_code: 1", "select 1; Commit;", "must not contain COMMIT: the runner opens and ends"),
        ("-- min_code: 1", "/* x */ start transaction; select 1;", "must not contain START TRANSACTION"),
    ],
)
async def test_a_malformed_file_is_refused(
    conn: asyncpg.Connection, name: str, files: Migrations, head: str, sql: str, message: str
) -> None:
    files.write("0001_a.pre.sql", sql, head=head)
    with pytest.raises(ConfigError) as caught:
        await migrate_up(conn, name, directory=files.path)
    assert message in str(caught.value)


async def test_a_missing_directory_is_named(conn: asyncpg.Connection, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"migration directory '.*nowhere' does not exist"):
        await migrate_up(conn, name, directory=tmp_path / "nowhere")


async def test_a_file_for_later_code_is_refused_before_it_runs(
    conn: asyncpg.Connection, name: str, files: Migrations
) -> None:
    files.write("0001_things.pre.sql", CREATE_THINGS)
    files.write("0002_name.post.sql", ADD_NAME, head=f"-- min_code: {migrate.CODE_LEVEL + 1}")
    with pytest.raises(ConfigError, match=r"0002_name\.post\.sql needs code level"):
        await migrate_up(conn, name, directory=files.path)
    assert await columns(conn, name) == ["id"]


# -- locks ----------------------------------------------------------------------------------------


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


# -- the command ----------------------------------------------------------------------------------

Start = Callable[..., Command]


def outcome(command: Command) -> tuple[int, str, str]:
    """Wait for the command and return its exit code, standard output and standard error."""
    return command.wait(60), command.stdout, command.stderr


@pytest.fixture
def env(dsn: str, name: str) -> dict[str, str]:
    """The environment of a command that works on this test's schema."""
    return child_environment(TASKQ_PG_DSN=dsn, TASKQ_SCHEMA_NAME=name)


async def test_the_command_applies_reports_and_repeats(start: Start, env: dict[str, str], name: str) -> None:
    code, out, err = outcome(start("migrate", "status", env=env))
    assert code == ExitCode.ERROR
    assert re.search(r"^0001_\w+\.pre\.sql +pending$", out, re.MULTILINE)
    assert err == ""

    code, out, err = outcome(start("migrate", "up", env=env))
    assert (code, err) == (0, "")
    assert re.search(r"^0001_\w+\.pre\.sql applied in \d+\.\d\d s$", out, re.MULTILINE)
    assert re.search(rf"^\d+ applied; schema {name} is at migration \d+$", out, re.MULTILINE)

    code, out, err = outcome(start("migrate", "up", env=env))
    assert (code, err) == (0, "")
    assert out.startswith(f"nothing to do; schema {name} is at migration ")

    code, out, err = outcome(start("migrate", "status", env=env))
    assert (code, err) == (0, "")
    assert re.search(r"^0001_\w+\.pre\.sql +applied +\d{4}-\d\d-\d\d .* by postgres$", out, re.MULTILINE)


async def test_the_schema_flag_wins_and_status_speaks_json(
    start: Start, env: dict[str, str], fresh: Callable[[], str]
) -> None:
    schema = fresh()
    assert outcome(start("migrate", "up", "--phase", "pre", "--schema", schema, env=env))[0] == 0
    code, out, _ = outcome(start("migrate", "status", "--json", "--schema", schema, env=env))
    status = json.loads(out)
    assert code == 0
    assert status["schema"] == schema
    assert status["version"] >= status["min_schema"]
    assert status["applied"][0]["file"].startswith("0001_")
    assert status["drift"] == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["up", "--schema", "a-b"], ExitCode.REFUSED, "error: .*a-b"),
        (["up", "--target", "9999"], ExitCode.REFUSED, "error: target 9999 is not a migration: allowed are 1 to"),
        (["up", "--phase", "mid"], ExitCode.USAGE, "'mid' is not one of 'pre', 'post'"),
        (["up", "--ddl-lock-timeout", "0"], ExitCode.USAGE, "0.0 is not in the range"),
    ],
)
async def test_bad_arguments_end_in_one_message(
    start: Start, env: dict[str, str], arguments: list[str], code: ExitCode, message: str
) -> None:
    ended, _, err = outcome(start("migrate", *arguments, env=env))
    assert ended == code
    assert re.search(message, err)
    assert "Traceback" not in err


async def test_the_command_says_who_is_in_the_way_and_exits_75(
    start: Start, env: dict[str, str], conn: asyncpg.Connection, name: str
) -> None:
    await conn.execute(HOLD_MIGRATION_LOCK, name)
    try:
        code, out, err = outcome(start("migrate", "up", "--ddl-lock-timeout", "0.2", env=env))
    finally:
        await conn.execute(RELEASE_MIGRATION_LOCK, name)
    assert (code, out) == (ExitCode.TRY_AGAIN, "")
    assert err.startswith("error: another migration of schema")
    assert f"pid {conn.get_server_pid()} " in err
    assert err.count("\n") == 1


async def test_the_command_exits_69_without_the_password_when_the_database_is_down(
    start: Start, short_dir: Path
) -> None:
    env = child_environment(
        TASKQ_PG_DSN=f"postgresql://app:{SECRET}@/jobs?host={short_dir}", TASKQ_DATABASE_BOOT_TIMEOUT="1"
    )
    code, out, err = outcome(start("migrate", "up", env=env))
    assert (code, out) == (ExitCode.UNAVAILABLE, "")
    waiting, error = err.splitlines()
    assert waiting.startswith("waiting: database app@")
    assert error.startswith(f"error: database app@{short_dir}:5432/jobs is not reachable")
    assert SECRET not in err


def test_every_error_of_the_runner_is_one_of_ours() -> None:
    assert issubclass(MigrationFailedError, TaskQError)
    assert MigrationFailedError.exit_code is ExitCode.ERROR
