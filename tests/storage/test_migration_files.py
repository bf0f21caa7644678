"""Migration files: which are refused, before any of them runs, and which count as changed."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from taskqd.domain.errors import (
    ConfigError,
    MigrationChecksumError,
)
from taskqd.storage import migrate
from taskqd.storage.migrate import migrate_status, migrate_up
from tests.storage.migrations import (
    ADD_NAME,
    CREATE_THINGS,
    Migrations,
    columns,
)


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
