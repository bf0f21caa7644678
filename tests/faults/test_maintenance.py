"""What maintains the schema loses its network or its database, has a double, or finds a million jobs that are due."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg
import pytest

from taskqd.maintenance.retention import Retention, RetentionLoop
from taskqd.settings import load_settings
from taskqd.storage.connect import create_pool
from taskqd.storage.migrate import migrate_up
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.postgres import Server, embedded
from tests.proxy import Proxy
from tests.scheduler.schedules import ScheduleTable
from tests.scheduler.test_firing_faults import AGO, TOMORROW, fired
from tests.scheduler.test_worker_hosts import AUTO, HOURLY, Hosts, elected
from tests.support import Command, eventually

GROUP = """\
actors = "tests.apps.basic:actors"
[supervisor]
runtime_dir = "run"
[[workers]]
name = "{name}"
"""


@pytest.fixture
def schedules(conn: asyncpg.Connection, schema: str) -> ScheduleTable:
    """The schedules of this test's schema."""
    return ScheduleTable(conn, schema)


@pytest.fixture
def hosts(conn: asyncpg.Connection, schema: str) -> Hosts:
    """Who maintains this test's schema."""
    return Hosts(conn, schema)


async def test_a_leader_whose_network_hangs_is_stood_in_for_and_comes_back(
    fleet: Fleet, schedules: ScheduleTable, hosts: Hosts, proxy: Proxy
) -> None:
    await schedules.plant_many(50, TOMORROW, **HOURLY)
    scheduler = fleet.scheduler(env={"TASKQ_PG_DSN": proxy.dsn()})
    await hosts.become(("scheduler", scheduler.pid))
    worker = fleet.worker(env=AUTO)
    await asyncio.to_thread(proxy.freeze)
    await hosts.age("scheduler")
    assert await elected(hosts) == worker.pid
    due = f'update "{schedules.schema}".schedules set next_fire_at = {AGO("1 second")}'
    # What it may have claimed, and was not told of.
    await schedules.conn.execute(f"{due}, claim_token = null, claim_expires_at = null")
    await fired(schedules, 50)
    await asyncio.to_thread(proxy.restore)
    await hosts.become(("scheduler", scheduler.pid))
    assert scheduler.process.poll() is None
    await schedules.conn.execute(due)
    await fired(schedules, 100)


async def test_two_supervisors_on_one_database_fire_and_run_everything_once(
    fleet: Fleet, schedules: ScheduleTable, jobs: JobTable, start: Callable[..., Command]
) -> None:
    """One of them is killed in the middle, with all that it has started."""
    await schedules.plant_many(
        40, TOMORROW, actor="succeed", catch_up="fire_all", catch_up_max=5, catch_up_window=None, **HOURLY
    )
    for name in ("one", "two"):
        (fleet.directory / f"{name}.toml").write_text(GROUP.format(name=name))
    groups = [start("run", f"{name}.toml", env=fleet.env) for name in ("one", "two")]
    for group in groups:
        await eventually(lambda group=group: group.stderr.count('"event": "ready"') == 2, 60, group.stderr)
    due = f'update "{schedules.schema}".schedules set next_fire_at = {AGO("24 hours 30 minutes")}'
    await schedules.conn.execute(due)
    await fleet.wait_for_executions(100, timeout=120)
    groups[0].signal(signal.SIGKILL)
    sessions = "select count(*) from pg_stat_activity where application_name like $1"

    async def is_gone() -> bool:
        return not await schedules.conn.fetchval(sessions, f"taskqd/{schedules.schema}/one/%")

    await eventually(is_gone, 30)
    # What its scheduler held it would hold for a minute.
    await schedules.conn.execute(
        f'update "{schedules.schema}".schedules set claim_expires_at = {AGO("1 second")} where claim_token is not null'
    )
    await fired(schedules, 1000, 240)

    async def all_done() -> bool:
        return await jobs.counts() == {"succeeded": 1000}

    await eventually(all_done, 120)
    ran = Counter((one.job, one.epoch) for one in fleet.executions())
    assert set(ran.values()) == {1}
    assert len({job for job, _ in ran}) == 1000
    groups[1].signal(signal.SIGTERM)
    assert groups[1].wait(60) == 0, groups[1].stderr


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server to crash."""
    server = embedded(18)
    try:
        yield server
    finally:
        server.remove()


async def test_a_database_that_crashes_while_jobs_are_archived_loses_and_doubles_none(own_server: Server) -> None:
    conn = await asyncpg.connect(own_server.dsn(), timeout=30)
    await migrate_up(conn, "taskq")
    jobs = JobTable(conn, "taskq")
    ids = await jobs.plant(1000, status="'succeeded'", finished_at="clock_timestamp() - interval '40 days'")
    # A batch waits in its transaction for what becomes of this row.
    holder = await asyncpg.connect(own_server.dsn(), timeout=30)
    held = await holder.fetchval("select id from taskq.jobs order by finished_at, id offset 700 limit 1")
    await holder.execute("begin")
    await holder.execute(
        "insert into taskq.jobs_archive select j.*, now(), now() from taskq.jobs j where id = $1", held
    )
    pool = await create_pool(
        own_server.dsn(), role="test", schema="taskq", group="", min_size=1, max_size=2, command_timeout=10, pinned=True
    )
    failures: list[str] = []
    retention = Retention(pool, "taskq", load_settings({"prune_batch_size": 50}, environ={}))
    loop = RetentionLoop(retention, on_failure=lambda name, error, streak: failures.append(repr(error))).loop
    loop.start()
    try:

        async def in_a_batch() -> bool:
            waiting = "select count(*) from pg_stat_activity where wait_event = 'transactionid'"
            return bool(await conn.fetchval(waiting) and retention.archived)

        await eventually(in_a_batch, 60)
        assert retention.archived < 1000
        await asyncio.to_thread(own_server.restart, immediate=True)
        conn = await asyncpg.connect(own_server.dsn(), timeout=30)

        async def all_moved() -> bool:
            return not await conn.fetchval("select count(*) from taskq.jobs")

        await eventually(all_moved, 120)
        assert failures, "it was told"
        archived = await conn.fetch("select id from taskq.jobs_archive")
        assert sorted(row["id"] for row in archived) == ids
        await eventually(lambda: loop.failures == 0, 30)
        duty = await conn.fetchrow("select * from taskq.maintenance where duty = 'archive'")
        assert (duty["cursor"], duty["last_finished_at"] >= duty["last_started_at"]) == (None, True)
    finally:
        await loop.stop()
        pool.terminate()
        await conn.close(timeout=10)


@pytest.mark.parametrize("rows", [30_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
async def test_a_backlog_that_is_due_at_boot_holds_up_neither_jobs_nor_schedules(
    fleet: Fleet, schedules: ScheduleTable, jobs: JobTable, rows: int
) -> None:
    bulk: dict[str, Any] = {"queue": "'bulk'", "route": "'bulk'", "status": "'scheduled'"}
    for _ in range(rows // 10_000):
        await jobs.plant(10_000, scheduled_at="clock_timestamp() - random() * interval '1 day'", **bulk)
    await schedules.plant("second", due=TOMORROW, actor="succeed", kind="cron", expression="* * * * * *")
    fleet.worker()
    fleet.scheduler()
    await schedules.update("second", next_fire_at="date_trunc('second', clock_timestamp())")
    left = f"select count(*) from \"{jobs.schema}\".jobs where status = 'scheduled'"
    longest, deadline = 0.0, time.monotonic() + 60 + rows / 2000
    while True:
        (job,) = await jobs.plant()
        began = time.monotonic()

        async def ended(job: Any = job) -> bool:
            return bool((await jobs.row(job))["status"] == "succeeded")

        await eventually(ended, 30)
        longest = max(longest, time.monotonic() - began)
        if not await jobs.conn.fetchval(left):
            break
        assert time.monotonic() < deadline, "the backlog is not promoted"
    assert longest < 10

    async def fires() -> bool:
        return len(await schedules.slots("second")) >= 2

    await eventually(fires, 30)
    late = await jobs.conn.fetchval(
        f"""select max(extract(epoch from j.created_at - o.due_at))::float8
            from "{jobs.schema}".schedule_occurrences o join "{jobs.schema}".jobs j on j.id = o.job_id"""
    )
    assert late < 10
    promoted = f"select count(*) from \"{jobs.schema}\".jobs where status = 'pending' and route = 'bulk'"
    assert await jobs.conn.fetchval(promoted) == rows

    async def ticked() -> bool:
        return bool(await jobs.conn.fetchval(f'select max(tick_at) is not null from "{jobs.schema}".maintenance_hosts'))

    await eventually(ticked, 30)
