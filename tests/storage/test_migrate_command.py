"""`taskqd migrate` as a process: its output, its exit codes, its one message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from taskqd.domain.exit_codes import ExitCode
from tests.storage.migrations import (
    HOLD_MIGRATION_LOCK,
    RELEASE_MIGRATION_LOCK,
    SECRET,
)
from tests.support import Command, child_environment

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
    bounds = ["--phase", "pre", "--target", "0001", "--max-steps", "1", "--ddl-lock-timeout", "5"]
    assert outcome(start("migrate", "up", *bounds, "--schema", schema, env=env))[0] == 0
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
