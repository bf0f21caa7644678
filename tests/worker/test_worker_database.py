"""Workers and schedulers whose database comes and goes. This module has a server of its own, to stop and to start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from tests.fleet import Fleet, ask, events, wait_for_event
from tests.jobs import JobTable
from tests.postgres import Server, embedded
from tests.proxy import Proxy
from tests.support import eventually

WAIT = 60
PATIENT = {"TASKQ_LOCK_LEASE": "8", "TASKQ_MAX_HEARTBEAT_FAILURES": "5"}
"""Leases that outlast every outage of these tests; six failed beats until a worker gives up its jobs."""
HASTY = {"TASKQ_LOCK_LEASE": "14"}
"""Gives up its jobs at the second failed beat, long before their leases end."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = embedded(18)
    try:
        yield server
    finally:
        server.remove()


class Table:
    """The jobs of the schema, through a new connection each time: the old one does not survive."""

    def __init__(self, dsn: str, schema: str) -> None:
        self._dsn = dsn
        self.schema = schema

    async def __aenter__(self) -> JobTable:
        self._conn = await asyncpg.connect(self._dsn, timeout=30)
        return JobTable(self._conn, self.schema)

    async def __aexit__(self, *_: object) -> None:
        await self._conn.close(timeout=10)

    async def counts(self) -> dict[str, int]:
        async with self as jobs:
            return await jobs.counts()


@pytest.fixture
def table(dsn: str, schema: str) -> Table:
    return Table(dsn, schema)


async def all_succeeded(table: Table, count: int) -> bool:
    return await table.counts() == {"succeeded": count}


async def check_accounts(table: Table, fleet: Fleet) -> None:
    """Each job was executed, at most as often as it was claimed."""
    executed: dict[str, int] = {}
    for one in fleet.executions():
        executed[one.job] = executed.get(one.job, 0) + 1
    async with table as jobs:
        for row in await jobs.conn.fetch(f'select id, attempt, interrupt_count from "{table.schema}".jobs'):
            assert 1 <= executed[str(row["id"])] <= row["attempt"]


async def test_sessions_that_are_ended_again_and_again_lose_nothing(fleet: Fleet, table: Table, dsn: str) -> None:
    worker = fleet.worker(env=PATIENT)
    async with table as jobs:
        await jobs.plant(300, payload="'{\"seconds\": 0.02}'", max_attempts="50")
        await jobs.conn.execute(jobs.scheduler_sql.wake)
        for _ in range(15):
            await jobs.conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like $1",
                f"taskqd/{table.schema}/%",
            )
            await asyncio.sleep(0.1)
    await eventually(lambda: all_succeeded(table, 300), WAIT)
    assert worker.process.poll() is None
    await check_accounts(table, fleet)


@pytest.mark.parametrize("immediate", [False, True], ids=["restart", "crash"])
async def test_a_restart_of_the_database_loses_nothing(
    fleet: Fleet, table: Table, server: Server, immediate: bool
) -> None:
    processes = [fleet.worker(env=PATIENT), fleet.worker(env=PATIENT), fleet.scheduler(env=PATIENT)]
    async with table as jobs:
        await jobs.plant(250, payload="'{\"seconds\": 0.05}'", max_attempts="50")
        later = await jobs.plant(20, status="'scheduled'", scheduled_at="now() + interval '2 seconds'")
        await jobs.conn.execute(jobs.scheduler_sql.wake)
    await fleet.wait_for_executions(20)
    await asyncio.to_thread(server.restart, immediate=immediate)
    await eventually(lambda: all_succeeded(table, 250 + len(later)), WAIT)
    assert [process.process.poll() for process in processes] == [None] * 3
    await check_accounts(table, fleet)


async def test_work_stops_before_leases_end_and_the_worker_stays(
    fleet: Fleet, table: Table, proxy: Proxy, schema: str
) -> None:
    worker = fleet.worker(env={**HASTY, "TASKQ_PG_DSN": proxy.dsn()})
    async with table as jobs:
        (job,) = await jobs.plant(actor="'tidy'", payload="'{\"seconds\": 60}'", max_attempts="1")
        await jobs.conn.execute(jobs.scheduler_sql.wake)
    await fleet.wait_for_executions(1)
    proxy.cut()
    wait_for_event(worker, "worker-isolated", 10)
    await fleet.wait_for_executions(1, "cancelled shutdown", timeout=10)
    async with table as jobs:
        assert (await jobs.row(job))["status"] == "running", "nobody could write it down"
        await asyncio.sleep(1)
        proxy.restore()
        wait_for_event(worker, "worker-recovered", 20)
        (fresh,) = await jobs.plant()
        await jobs.conn.execute(jobs.scheduler_sql.wake)
        await eventually(lambda: _has(jobs, fresh, "succeeded"), 20)
    assert worker.process.poll() is None


async def _has(jobs: JobTable, job: UUID, status: str) -> bool:
    return str((await jobs.row(job))["status"]) == status


async def test_an_outage_shorter_than_the_failures_allowed_stops_no_handler(
    fleet: Fleet, table: Table, proxy: Proxy
) -> None:
    worker = fleet.worker(env={**PATIENT, "TASKQ_PG_DSN": proxy.dsn()})
    async with table as jobs:
        (job,) = await jobs.plant(actor="'succeed'", payload="'{\"seconds\": 3}'")
        await jobs.conn.execute(jobs.scheduler_sql.wake)
        await fleet.wait_for_executions(1)
        proxy.cut()
        wait_for_event(worker, "heartbeat-failed", 10)
        proxy.restore()
        await eventually(lambda: _has(jobs, job, "succeeded"), 20)
        row = await jobs.row(job)
    assert (row["attempt"], row["epoch"]) == (1, 1)
    assert list(events(worker, "worker-isolated")) == []


async def test_a_hang_is_survived_like_an_outage(fleet: Fleet, table: Table, proxy: Proxy) -> None:
    worker = fleet.worker(env={**PATIENT, "TASKQ_PG_DSN": proxy.dsn()})
    async with table as jobs:
        await jobs.plant(60, payload="'{\"seconds\": 0.05}'", max_attempts="50")
        await jobs.conn.execute(jobs.scheduler_sql.wake)
        await fleet.wait_for_executions(10)
        proxy.freeze()
        await asyncio.sleep(2)
        proxy.restore()
        await eventually(lambda: _succeeded(jobs, 60), WAIT)
    assert worker.process.poll() is None
    await check_accounts(table, fleet)


async def _succeeded(jobs: JobTable, count: int) -> bool:
    return await jobs.counts() == {"succeeded": count}


@pytest.mark.parametrize("actor", ["plain", "stubborn"])
async def test_work_that_nothing_can_stop_ends_with_its_process_before_its_lease(
    fleet: Fleet, table: Table, proxy: Proxy, actor: str
) -> None:
    """Or another worker would run the job while this one still does."""
    worker = fleet.worker(env={"TASKQ_PG_DSN": proxy.dsn()})
    async with table as jobs:
        (job,) = await jobs.plant(actor=f"'{actor}'", payload="'{\"seconds\": 120}'")
        await jobs.conn.execute(jobs.scheduler_sql.wake)
        await fleet.wait_for_executions(1)
        await eventually(lambda: _renewed(jobs, job), 10)
        proxy.freeze()
        began = time.monotonic()
        assert worker.wait(20) == 70
        assert time.monotonic() - began < 4
        row = await jobs.row(job)
        assert row["status"] == "running"
        assert row["lock_expires_at"] > row["now"], "the lease had not ended when the work did"
    assert next(events(worker, "worker-watchdog-trip"))["detector"] == "lease"


async def _renewed(jobs: JobTable, job: UUID) -> bool:
    return (await jobs.row(job))["last_heartbeat_at"] is not None


async def test_an_idle_worker_waits_out_any_outage_alive_and_not_ready(
    fleet: Fleet, table: Table, proxy: Proxy, short_dir: Path
) -> None:
    """Restarting it could not help, so its liveness does not depend on the database; its readiness does."""
    health = short_dir / "w.sock"
    worker = fleet.worker(env={"TASKQ_PG_DSN": proxy.dsn(), "TASKQ_HEALTH_SOCKET_PATH": str(health)})
    assert ask(health, "/ready").startswith("HTTP/1.1 200")
    proxy.cut()
    wait_for_event(worker, "worker-isolated", 15)
    await asyncio.sleep(2.5)
    assert ask(health, "/live").startswith("HTTP/1.1 200")
    answer = ask(health, "/ready")
    assert answer.startswith("HTTP/1.1 503")
    assert "database" in answer
    proxy.restore()
    await eventually(lambda: ask(health, "/ready").startswith("HTTP/1.1 200"), 20)
    async with table as jobs:
        (job,) = await jobs.plant()
        await eventually(lambda: _has(jobs, job, "succeeded"), 20)
    assert worker.process.poll() is None


async def test_a_stop_while_the_database_hangs_takes_seconds(fleet: Fleet, proxy: Proxy) -> None:
    worker = fleet.worker(env={"TASKQ_PG_DSN": proxy.dsn(), "TASKQ_DISPATCHER_COMMAND_TIMEOUT": "1"})
    proxy.freeze()
    began = time.monotonic()
    worker.process.terminate()
    assert worker.wait(40) == 0
    assert time.monotonic() - began < 30


async def test_a_stop_during_an_outage_takes_seconds(fleet: Fleet, proxy: Proxy) -> None:
    processes = [fleet.worker(env={"TASKQ_PG_DSN": proxy.dsn()}), fleet.scheduler(env={"TASKQ_PG_DSN": proxy.dsn()})]
    proxy.cut()
    began = time.monotonic()
    for process in processes:
        process.process.terminate()
    assert [process.wait(30) for process in processes] == [0, 0]
    assert time.monotonic() - began < 10


async def test_the_scheduler_goes_on_after_an_outage(fleet: Fleet, table: Table, proxy: Proxy) -> None:
    scheduler = fleet.scheduler(env={"TASKQ_PG_DSN": proxy.dsn()})
    proxy.cut()
    wait_for_event(scheduler, "loop-failed", 15)
    await asyncio.sleep(1)
    async with table as jobs:
        (job,) = await jobs.plant(status="'scheduled'")
        (dead,) = await jobs.running(await jobs.register())
        await jobs.update([dead], lock_expires_at="clock_timestamp()")
        proxy.restore()
        await eventually(lambda: _has(jobs, job, "pending"), 40)
        await eventually(lambda: _has(jobs, dead, "pending"), 40)
    assert scheduler.process.poll() is None
