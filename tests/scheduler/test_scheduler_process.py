"""The scheduler as a process: maintains, proves it, stops between transactions."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd.scheduler import main as scheduler_main
from taskqd.settings import load_settings
from tests.fleet import Fleet, events, wait_for_event
from tests.jobs import JobTable
from tests.scheduler.schedules import ScheduleTable
from tests.support import Command, child_environment, eventually, taskqd_argv

EXPIRED = "clock_timestamp() - interval '1 second'"


async def heartbeat(jobs: JobTable) -> list[asyncpg.Record]:
    return await jobs.conn.fetch(f'select *, clock_timestamp() as now from "{jobs.schema}".maintenance_hosts')


def once(env: dict[str, str], directory: Path) -> tuple[int, dict[str, Any]]:
    """Run ``taskqd scheduler run --once`` and return its exit code and what it printed."""
    command = Command(taskqd_argv("scheduler", "run", "--once"), directory, env)
    code = command.wait(60)
    (line,) = command.stdout.splitlines()
    return code, json.loads(line)


# -- continuous -------------------------------------------------------------------------------------


async def test_jobs_become_claimable_when_they_are_due_and_not_before(fleet: Fleet, jobs: JobTable) -> None:
    fleet.scheduler()
    (job,) = await jobs.plant(status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 second'")

    async def promoted() -> asyncpg.Record | None:
        row = await jobs.row(job)
        assert row["status"] == "scheduled" or row["now"] >= row["scheduled_at"]
        return row if row["status"] == "pending" else None

    row = await eventually(promoted, 15)
    assert (row["now"] - row["scheduled_at"]).total_seconds() < 11


async def test_expired_leases_and_deadlines_are_seen_to(fleet: Fleet, jobs: JobTable) -> None:
    (dead,) = await jobs.running(await jobs.register())
    (late,) = await jobs.plant(status="'scheduled'", scheduled_at="now() + interval '1 day'", schedule_to_close=EXPIRED)
    await jobs.update([dead], lock_expires_at=EXPIRED)
    fleet.scheduler()

    async def done() -> bool:
        return ((await jobs.row(dead))["status"], (await jobs.row(late))["status"]) == ("pending", "failed")

    await eventually(done, 15)


async def test_its_heartbeat_row_tells_that_it_advances_and_goes_when_it_stops(fleet: Fleet, jobs: JobTable) -> None:
    scheduler = fleet.scheduler()

    async def fresh() -> asyncpg.Record | None:
        (row,) = await heartbeat(jobs)
        return row if row["tick_at"] is not None and row["promoted_at"] is not None else None

    first = await eventually(fresh, 15)
    assert first["pid"] == scheduler.pid

    async def later() -> bool:
        (row,) = await heartbeat(jobs)
        return bool(row["tick_at"] > first["tick_at"] and row["promoted_at"] > first["promoted_at"])

    await eventually(later, 15)
    scheduler.signal(signal.SIGTERM)
    assert scheduler.wait() == 0
    assert await heartbeat(jobs) == []


async def test_a_killed_one_leaves_its_row_to_grow_old(fleet: Fleet, jobs: JobTable) -> None:
    scheduler = fleet.scheduler()
    scheduler.signal(signal.SIGKILL)
    assert scheduler.wait() == -9
    assert len(await heartbeat(jobs)) == 1


async def test_rows_of_those_that_died_a_day_ago_go_when_one_starts(fleet: Fleet, jobs: JobTable) -> None:
    insert = (
        f'insert into "{jobs.schema}".maintenance_hosts (host_id, kind, hostname, pid, beat_at)'
        " values (gen_random_uuid(), 'scheduler', 'gone', $1, clock_timestamp() - $2::text::interval)"
    )
    await jobs.conn.execute(insert, 1, "25 hours")
    await jobs.conn.execute(insert, 2, "23 hours")
    scheduler = fleet.scheduler()
    assert {row["pid"] for row in await heartbeat(jobs)} == {2, scheduler.pid}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_one_is_gone_at_once(fleet: Fleet, number: signal.Signals) -> None:
    scheduler = fleet.scheduler()
    began = time.monotonic()
    scheduler.signal(number)
    assert scheduler.wait() == 0
    assert time.monotonic() - began < 5.0


async def test_a_stop_lets_the_running_transaction_finish(fleet: Fleet, jobs: JobTable) -> None:
    await jobs.conn.execute(
        f"""
        create table "{jobs.schema}".probe (stage text);
        create or replace function "{jobs.schema}".expire_deadlines(max_rows integer) returns integer
        language plpgsql as $$
        begin
            perform pg_sleep(1.5);
            insert into "{jobs.schema}".probe values ('done');
            return 0;
        end $$
        """
    )
    scheduler = fleet.scheduler(ready=False)

    async def in_the_tick() -> bool:
        return bool(
            await jobs.conn.fetchval(
                "select count(*) from pg_stat_activity where application_name like $1 and wait_event = 'PgSleep'",
                f"taskqd/{jobs.schema}/%",
            )
        )

    await eventually(in_the_tick, 20)
    scheduler.signal(signal.SIGTERM)
    assert scheduler.wait() == 0
    assert await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".probe') == 1
    assert "Traceback" not in scheduler.stderr


async def test_one_duty_that_fails_does_not_stop_the_other(fleet: Fleet, jobs: JobTable) -> None:
    await jobs.conn.execute(f'drop function "{jobs.schema}".tick(integer)')
    scheduler = fleet.scheduler()
    (job,) = await jobs.plant(status="'scheduled'", scheduled_at=EXPIRED)

    async def promoted() -> bool:
        return str((await jobs.row(job))["status"]) == "pending"

    await eventually(promoted, 15)
    wait_for_event(scheduler, "loop-failed")
    assert {event["loop"] for event in events(scheduler, "loop-failed")} == {"tick"}


async def test_two_of_them_do_no_harm(fleet: Fleet, jobs: JobTable) -> None:
    fleet.scheduler(), fleet.scheduler()
    ids = await jobs.running(await jobs.register(), 50)
    await jobs.update(ids, lock_expires_at=EXPIRED)
    await jobs.plant(50, status="'scheduled'", scheduled_at=EXPIRED)

    async def done() -> bool:
        return await jobs.counts() == {"pending": 100}

    await eventually(done, 15)
    assert await jobs.conn.fetchval(f'select max(epoch) from "{jobs.schema}".jobs') == 2
    assert len(await heartbeat(jobs)) == 2


def test_it_imports_no_actor_code(tmp_path: Path) -> None:
    code = "import sys, taskqd.scheduler.main; print([m for m in sys.modules if m.startswith('taskqd.actors')])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


# -- once -------------------------------------------------------------------------------------------


async def test_once_with_nothing_due(fleet: Fleet, short_dir: Path) -> None:
    code, printed = await asyncio.to_thread(once, fleet.env, short_dir)
    assert (code, printed["outcome"], printed["promoted"], printed["reaped"]) == (0, "nothing_due", 0, 0)


async def test_once_does_everything_that_is_due_and_ends(fleet: Fleet, jobs: JobTable, short_dir: Path) -> None:
    await jobs.plant(2500, status="'scheduled'", scheduled_at="now() - random() * interval '1 hour'")
    (dead,) = await jobs.running(await jobs.register(), queue="'q'", scheduled_at="now() - interval '1 day'")
    await jobs.update([dead], lock_expires_at=EXPIRED)
    code, printed = await asyncio.to_thread(once, fleet.env, short_dir)
    assert (code, printed["outcome"], printed["promoted"], printed["reaped"]) == (0, "maintained", 2500, 1)
    assert await jobs.counts() == {"pending": 2501}
    assert await heartbeat(jobs) == []


async def test_once_ticks_and_fires_what_is_due(
    fleet: Fleet, jobs: JobTable, schedules: ScheduleTable, short_dir: Path
) -> None:
    await schedules.plant_many(600, "clock_timestamp() - interval '1 second'", kind="every", expression="3600")
    code, printed = await asyncio.to_thread(once, fleet.env, short_dir)
    assert (code, printed["outcome"], printed["schedules"]["fired"], printed["reaped"]) == (0, "fired", 600, 0)
    assert await jobs.counts() == {"pending": 600}


async def test_once_that_runs_out_of_time_says_so(
    fleet: Fleet, jobs: JobTable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await jobs.plant(2500, status="'scheduled'", scheduled_at=EXPIRED)
    monkeypatch.setattr(scheduler_main, "ONCE_BUDGET", 0.0)
    settings = load_settings({"pg_dsn": fleet.env["TASKQ_PG_DSN"], "schema_name": jobs.schema}, environ={})
    try:
        assert await scheduler_main.Scheduler(settings).run_once() == 75
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert json.loads(capsys.readouterr().out)["outcome"] == "budget_exhausted"


# -- what it cannot work with -----------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("run",), ("run", "--once")], ids=["run", "once"])
def test_a_database_that_is_down(fleet: Fleet, short_dir: Path, arguments: tuple[str, ...]) -> None:
    env = fleet.env | {
        "TASKQ_PG_DSN": f"postgresql://postgres:hunter2@/postgres?host={short_dir}",
        "TASKQ_DATABASE_BOOT_TIMEOUT": "1",
    }
    command = Command(taskqd_argv("scheduler", *arguments), short_dir, env)
    assert command.wait() == 69
    (message,) = [line for line in command.stderr.splitlines() if line.startswith("error: ")]
    assert "not reachable" in message
    assert "hunter2" not in command.stderr + command.stdout


@pytest.mark.parametrize("arguments", [("run",), ("run", "--once")], ids=["run", "once"])
def test_a_schema_that_is_not_migrated(fleet: Fleet, short_dir: Path, arguments: tuple[str, ...]) -> None:
    command = Command(
        taskqd_argv("scheduler", *arguments), short_dir, fleet.env | {"TASKQ_SCHEMA_NAME": "nothing_here"}
    )
    assert command.wait() == 75
    assert "taskqd migrate up" in command.stderr


def test_a_stop_while_the_database_is_down_ends_the_boot(fleet: Fleet, short_dir: Path) -> None:
    scheduler = fleet.scheduler(
        ready=False,
        env={"TASKQ_PG_DSN": f"postgresql://postgres@/postgres?host={short_dir}", "TASKQ_DATABASE_BOOT_TIMEOUT": "600"},
    )
    wait_for_event(scheduler, "database-unavailable")
    began = time.monotonic()
    scheduler.signal(signal.SIGTERM)
    assert scheduler.wait() == 0
    assert time.monotonic() - began < 2
