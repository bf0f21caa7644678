"""The database restarts, or ends every session, under two workers with limits, identities and batches in the mix.

This module has a server of its own, to stop and to start.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

import asyncpg
import pytest

from taskqd import EnqueueItem, TaskQ, new_uuid
from tests.apps import limited
from tests.apps.basic import Work
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.postgres import Server, embedded
from tests.support import eventually
from tests.worker.test_limits import items

WAIT = 120
RETURN = 10.0
"""Seconds after which the workers are as fast as before; a loaded machine is given ten times as long."""
ENV = {"TASKQ_LOCK_LEASE": "8", "TASKQ_MAX_HEARTBEAT_FAILURES": "5", "TASKQ_NOTIFY_POLL_INTERVAL": "1"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = embedded(18)
    try:
        yield server
    finally:
        server.remove()


async def restart(server: Server, schema: str) -> None:
    await asyncio.to_thread(server.restart)


async def crash(server: Server, schema: str) -> None:
    await asyncio.to_thread(server.restart, immediate=True)


async def end_sessions(server: Server, schema: str) -> None:
    conn = await asyncpg.connect(server.dsn(), timeout=30)
    for _ in range(5):
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name like $1",
            f"taskqd/{schema}/%",
        )
    await conn.close(timeout=10)


def most_finished_at_once(fleet: Fleet, *actors: str) -> int:
    """The most executions of these actors that ran at the same time, of those that were not cut short."""
    ends = {(run.job, run.epoch): run.at for run in fleet.executions("end")}
    begun = [run for run in fleet.executions() if run.actor in actors and (run.job, run.epoch) in ends]
    return max(sum(other.at <= run.at < ends[other.job, other.epoch] for other in begun) for run in begun)


def rate(fleet: Fleet, since: float) -> float:
    """Ends a second from then on until now."""
    now = time.time()
    return sum(since < run.at <= now for run in fleet.executions("end")) / (now - since)


@pytest.mark.parametrize("fault", [pytest.param(restart, marks=pytest.mark.soak), crash, end_sessions])
async def test_nothing_is_lost_or_ends_twice_and_limits_and_counters_are_right(
    fleet: Fleet, server: Server, dsn: str, schema: str, fault: Callable[[Server, str], Awaitable[None]]
) -> None:
    processes = [fleet.worker(actors="tests.apps.limited:actors", env=ENV) for _ in range(2)]
    processes.append(fleet.scheduler(env=ENV))
    batch = new_uuid()
    serial = [
        EnqueueItem(actor_ref=limited.free, payload=Work(key=key, seconds=0.02), identity_key=key)
        for _ in range(15)
        for key in "abcd"
    ]
    async with TaskQ(dsn=dsn, schema=schema) as tq:
        await tq.enqueue_batch(items(limited.free, 300, 0.05), batch_id=batch)
        await tq.enqueue_batch(items(limited.one, 30) + items(limited.left, 30) + items(limited.right, 30))
        await tq.enqueue_batch(serial)
    total = 300 + 90 + len(serial)
    await fleet.wait_for_executions(60, "end", WAIT)
    began = time.time()
    await fleet.wait_for_executions(120, "end", WAIT)
    before = rate(fleet, began)
    await fault(server, schema)

    async def as_fast() -> bool:
        over = len(fleet.executions("end")) >= total
        return over or rate(fleet, time.time() - 1) >= before / 2

    await eventually(as_fast, RETURN * 10)
    conn = await asyncpg.connect(dsn, timeout=30)
    jobs = JobTable(conn, schema)
    try:
        await eventually(lambda: _ended(jobs, total), WAIT)
        assert [process.process.poll() for process in processes] == [None] * 3
        executed = Counter((run.job, run.epoch) for run in fleet.executions())
        assert max(executed.values()) == 1, "an attempt was executed twice"
        per_job = Counter(job for job, _ in executed.elements())
        for row in await conn.fetch(f'select id, attempt, interrupt_count, epoch from "{schema}".jobs'):
            assert 1 <= per_job[str(row["id"])] <= row["attempt"]
            assert all(one["outcome"] in ("crashed", "interrupted") for one in await jobs.attempts(row["id"]))
        assert set((await jobs.held()).values()) == {0}
        counted = await conn.fetchrow(f'select * from "{schema}".batches where id = $1', batch)
        assert (counted["succeeded"], counted["total"], counted["status"]) == (300, 300, "complete")
        assert most_finished_at_once(fleet, "one") == 1
        assert most_finished_at_once(fleet, "left", "right") <= 2
    finally:
        await conn.close(timeout=10)


async def _ended(jobs: JobTable, total: int) -> bool:
    return await jobs.counts() == {"succeeded": total}
