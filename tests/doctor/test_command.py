"""`taskqd doctor` as a process: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import asyncpg

from taskqd.cli.doctor import CHECKS
from taskqd.domain.exit_codes import ExitCode
from tests.fleet import Fleet
from tests.support import Command, child_environment, wait_until

Start = Callable[..., Command]


def doctor(start: Start, env: dict[str, str], *flags: str) -> tuple[int, str]:
    """Run it to its end."""
    command = start("doctor", *flags, env=env)
    return command.wait(120), command.stdout


async def test_an_installation_at_work_is_healthy(start: Start, fleet: Fleet) -> None:
    fleet.scheduler()
    fleet.worker()

    def healthy() -> dict[str, Any] | None:
        code, out = doctor(start, fleet.env, "--json")
        told: dict[str, Any] = json.loads(out)
        assert told["healthy"] == (code == ExitCode.DONE)
        assert code in (ExitCode.DONE, ExitCode.DEGRADED)
        return told if told["healthy"] else None

    told = wait_until(healthy, 120)  # the first tick may be yet to come
    assert told is not None
    assert {each["check"] for each in told["findings"]} == set(CHECKS)
    assert any(each["where"] == "scheduler" and "1 alive" in each["what"] for each in told["findings"])


async def test_what_is_wrong_is_told_with_why_and_what_to_do(
    start: Start, child_env: dict[str, str], conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(f'alter table "{schema}".jobs set (autovacuum_enabled = off)')
    code, out = doctor(start, child_env)
    assert code == ExitCode.DEGRADED
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("warn"))
    assert lines[at] == f"warn  vacuum         {schema}.jobs: autovacuum_enabled is off"
    assert lines[at + 1].strip().startswith("why: ")
    assert lines[at + 2].strip().startswith("do:  run alter table")
    assert lines[-1] == f"schema {schema}: 1 finding"

    code, out = doctor(start, child_env, "--fix-sql")
    assert code == ExitCode.DEGRADED
    await conn.execute(out)
    assert doctor(start, child_env, "--fix-sql") == (ExitCode.DONE, "")


async def test_an_unmigrated_schema_is_one_finding(start: Start, dsn: str) -> None:
    env = child_environment(TASKQ_PG_DSN=dsn, TASKQ_SCHEMA_NAME="nothing_here")
    code, out = doctor(start, env)
    assert code == ExitCode.DEGRADED
    assert out.splitlines()[0] == "fail  migrations     nothing_here: is not migrated"
    assert out.splitlines()[-1] == "schema nothing_here: 1 finding"


async def test_a_database_that_is_away_ends_it_with_69(start: Start) -> None:
    env = child_environment(TASKQ_PG_DSN="postgresql://u@127.0.0.1:1/db", TASKQ_DATABASE_BOOT_TIMEOUT="0")
    command = start("doctor", env=env)
    assert command.wait(60) == ExitCode.UNAVAILABLE
    assert command.stderr.startswith("error: database ")
