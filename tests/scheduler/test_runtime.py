"""``TaskqRuntime``: the duties inside a service that exists for something else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd import (
    ConfigError,
    DatabaseUnavailableError,
    SchemaNotMigratedError,
    SettingsError,
    TaskqRuntime,
    taskq_lifespan,
)
from taskqd.settings import load_settings
from tests.jobs import JobTable
from tests.package.nonsense import NONSENSE, complaint, parameters
from tests.scheduler.schedules import ScheduleTable
from tests.scheduler.test_firing_faults import AGO, fired, held_up
from tests.support import eventually

Runtime = Callable[..., TaskqRuntime]
HOURLY: dict[str, Any] = {"kind": "every", "expression": "3600"}


@pytest.fixture
async def runtime(dsn: str, schema: str) -> AsyncIterator[Runtime]:
    """Make runtimes of this test's schema, which end with it."""
    made = []

    def make(**options: Any) -> TaskqRuntime:
        made.append(TaskqRuntime(**{"dsn": dsn, "schema": schema, **options}))
        return made[-1]

    yield make
    await asyncio.gather(*(each.stop() for each in made))


async def sessions(conn: asyncpg.Connection, schema: str) -> int:
    name = f"taskqd/{schema}/default/runtime"
    return int(await conn.fetchval("select count(*) from pg_stat_activity where application_name = $1", name))


async def test_it_keeps_house_and_fires_no_schedule_unless_told_to(
    runtime: Runtime, jobs: JobTable, schedules: ScheduleTable
) -> None:
    (job,) = await jobs.plant(status="'scheduled'", scheduled_at=AGO("1 second"))
    await schedules.plant(due=AGO("1 second"), **HOURLY)
    hosts = f'select kind, complete from "{jobs.schema}".maintenance_hosts'
    async with runtime() as one:
        assert (one.state, one.trouble) == ("running", "")

        async def promoted() -> bool:
            return bool((await jobs.row(job))["status"] == "pending")

        await eventually(promoted, 60)
        assert [tuple(row) for row in await jobs.conn.fetch(hosts)] == [("runtime", False)]
        assert await schedules.outcomes() == {}
        async with runtime(schedule_enabled=True, housekeeper_enabled=False):
            await eventually(lambda: _has_fired(schedules), 60)
        assert "taskq_cron_fired_total 0" in one.metrics()
        assert "taskq_maintenance_leader_is_leader 0" in one.metrics()
    assert one.state == "stopped"
    assert one.metrics() == ""
    assert await jobs.conn.fetch(hosts) == []
    assert await sessions(jobs.conn, jobs.schema) == 0


async def _has_fired(schedules: ScheduleTable) -> bool:
    return await schedules.outcomes() == {"fired": 1}


async def test_what_blocks_the_service_does_not_hold_up_the_duties(
    runtime: Runtime, schedules: ScheduleTable, dsn: str
) -> None:
    async def wait_elsewhere() -> None:
        own = await asyncpg.connect(dsn, timeout=30)
        try:
            await fired(ScheduleTable(own, schedules.schema), 100)
        finally:
            await own.close(timeout=10)

    await schedules.plant_many(100, AGO("1 second"), **HOURLY)
    async with runtime(schedule_enabled=True) as one:
        waiting = threading.Thread(target=asyncio.run, args=(wait_elsewhere(),), daemon=True)
        waiting.start()
        waiting.join(90)  # the event loop of the service stands still
        assert not waiting.is_alive()
        await fired(schedules, 100)
        assert 1 <= await sessions(schedules.conn, schedules.schema) <= 2
        assert "taskq_cron_fired_total 100" in one.metrics()
        await eventually(lambda: "taskq_maintenance_leader_is_leader 1" in one.metrics(), 60)


async def test_it_starts_and_stops_again_and_again(runtime: Runtime) -> None:
    one = runtime()
    await one.stop()
    assert one.state == "constructed"
    for _ in range(3):
        await one.start()
        await one.start()
        assert one.state == "running"
        await asyncio.gather(one.stop(), one.stop())
        assert one.state == "stopped"
    assert one.trouble == "the runtime is stopped"


async def test_a_stop_lets_the_running_fire_commit(runtime: Runtime, schedules: ScheduleTable, dsn: str) -> None:
    await schedules.plant_many(10, AGO("1 second"), **HOURLY)
    async with held_up(schedules, dsn) as backend:
        one = runtime(schedule_enabled=True)
        await one.start()
        await backend()
        stopping = asyncio.create_task(one.stop())
        await asyncio.sleep(0.1)
        assert (stopping.done(), one.state) == (False, "stopping")
        with pytest.raises(RuntimeError, match="is stopping"):
            await one.start()
    await stopping
    await fired(schedules, 10)
    assert one.state == "stopped"


async def test_a_lifespan_runs_it_around_the_services_own(runtime: Runtime) -> None:
    seen = []

    @asynccontextmanager
    async def own(app: str) -> AsyncIterator[dict[str, str]]:
        seen.append((app, one.state))
        yield {"key": "value"}
        seen.append((app, one.state))

    one = runtime()
    async with taskq_lifespan(one, own)("app") as state:
        assert state == {"key": "value"}
    assert seen == [("app", "running"), ("app", "running")]
    assert one.state == "stopped"
    async with taskq_lifespan(one)("app") as state:
        assert (state, one.state) == (None, "running")
    with pytest.raises(ZeroDivisionError):
        async with taskq_lifespan(one)("app"):
            raise ZeroDivisionError
    assert one.state == "stopped"


async def test_its_lines_go_where_the_service_logs(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with runtime():
            pass
    lines = [record.getMessage() for record in caplog.records if record.name == "taskqd.maintenance"]
    assert [line.split()[0] for line in lines] == [
        f"event='maintenance-{what}'" for what in ("begun", "ending", "ended")
    ]


# -- what it refuses --------------------------------------------------------------------------------


async def test_a_database_that_is_down(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKQ_DATABASE_BOOT_TIMEOUT", "0")
    one = TaskqRuntime(dsn=f"postgresql://postgres:hunter2@/postgres?host={short_dir}")
    for _ in range(2):
        with pytest.raises(DatabaseUnavailableError, match="not reachable") as raised:
            await one.start()
        assert "hunter2" not in str(raised.value)
        assert (one.state, one.trouble) == ("failed", "the runtime is failed")
    with pytest.raises(DatabaseUnavailableError):
        async with taskq_lifespan(one)("app"):
            raise AssertionError("the service has started")


async def test_a_start_that_is_given_up(short_dir: Path) -> None:
    settings = load_settings({"pg_dsn": f"postgresql://postgres@/postgres?host={short_dir}"}, environ={})
    one = TaskqRuntime(settings=settings)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.start(), 0.2)
    assert one.state == "failed"


async def test_a_schema_that_is_not_migrated(runtime: Runtime) -> None:
    with pytest.raises(SchemaNotMigratedError):
        await runtime(schema="nothing_here").start()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"housekeeper_enabled": False}, "housekeeper_enabled and schedule_enabled are both false"),
        ({"schedule_enabled": "yes"}, "schedule_enabled = 'yes' must be true or false"),
        ({"housekeeper_enabled": None}, "housekeeper_enabled = None must be true or false"),
        ({"dsn": 5}, "dsn must be text or None, it is of type int"),
        ({"schema": b"x"}, "schema must be text or None, it is of type bytes"),
        ({"settings": {}}, "settings must come from load_settings(), it is of type dict"),
        ({"settings": load_settings(environ={}), "schema": "x"}, "leave these out"),
        ({"schema": "Not A Name"}, "settings refused: schema = 'Not A Name'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TaskqRuntime(**options)
    assert problem in str(raised.value)


@pytest.mark.parametrize("name", parameters(TaskqRuntime))
async def test_nonsense_is_accepted_or_refused_by_name(name: str) -> None:
    wrong = [(await complaint(lambda value=value: TaskqRuntime(**{name: value}), name))[1] for value in NONSENSE]
    assert not any(wrong), wrong


def test_a_bad_dsn_is_named_once_and_not_shown() -> None:
    with pytest.raises(SettingsError) as raised:
        TaskqRuntime(dsn="mysql://u:hunter2@h/d")
    (problem,) = raised.value.problems
    assert problem.startswith("dsn")
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    "arguments", [(None,), ("app",), (TaskqRuntime(), "no function")], ids=["none", "text", "no-lifespan"]
)
def test_bad_arguments_of_a_lifespan(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="must be a"):
        taskq_lifespan(*arguments)
