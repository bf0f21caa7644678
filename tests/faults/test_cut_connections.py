"""Connections cut in the middle of a statement: done by the server, and nobody heard of it."""

from __future__ import annotations

import pytest

from taskqd import EnqueueItem, TaskQ, new_uuid
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.proxy import Proxy
from tests.support import Command, eventually

WAIT = 60


@pytest.fixture
def worker(fleet: Fleet, proxy: Proxy) -> Command:
    """A worker behind the proxy, idle."""
    return fleet.worker(env={"TASKQ_PG_DSN": proxy.dsn(), "TASKQ_LOCK_LEASE": "8", "TASKQ_MAX_HEARTBEAT_FAILURES": "5"})


async def test_what_was_claimed_and_never_received_comes_back_by_its_lease(
    fleet: Fleet, jobs: JobTable, proxy: Proxy, worker: Command
) -> None:
    (worker_id,) = [row["id"] for row in await jobs.conn.fetch(f'select id from "{jobs.schema}".workers')]
    async with jobs.conn.transaction():
        ids = await jobs.plant(3, payload="'{\"seconds\": 0.01}'", max_attempts="50")
        proxy.lose_answer_to(worker_id.bytes, b"succeed")  # a claim names its worker and the actors that it knows
    await jobs.conn.execute(jobs.scheduler_sql.wake)
    await eventually(lambda: _succeeded(jobs, 3), WAIT)
    begun = fleet.executions()
    assert sorted(one.job for one in begun) == sorted(map(str, ids)), "each was executed once"
    lost = [job for job in ids for one in await jobs.attempts(job) if one["outcome"] == "crashed"]
    assert lost, "a claim was cut"
    for job in ids:
        row = await jobs.row(job)
        assert (row["attempt"], row["epoch"]) == ((2, 3) if job in lost else (1, 1))
    assert worker.process.poll() is None


async def test_an_end_that_was_stored_and_never_answered_is_told_and_counted_once(
    fleet: Fleet, tq: TaskQ, jobs: JobTable, proxy: Proxy, worker: Command
) -> None:
    await jobs.conn.execute(f"update \"{jobs.schema}\".actor_config set max_concurrent = 1 where actor = 'tells'")
    word = "told once"
    batch = await tq.enqueue_batch(
        [EnqueueItem(actor_ref=basic.tells, payload=Work(key=key, seconds=1.0)) for key in (word, "after")],
        batch_id=new_uuid(),
    )
    first, _ = [handle.job_id for handle in batch.job_handles]
    await fleet.wait_for_executions(1)
    proxy.lose_answer_to(first.bytes, f'"{word}"'.encode())  # its settlement, with the result
    await eventually(lambda: _succeeded(jobs, 2), WAIT)
    told = await fleet.wait_for_executions(2, "on_success", WAIT)
    assert sorted(one.key for one in told) == ["after", word]
    assert sorted(one.key for one in fleet.executions()) == ["after", word]
    row = await jobs.conn.fetchrow(f'select * from "{jobs.schema}".batches where id = $1', batch.batch_id)
    assert (row["succeeded"], row["status"], row["completed_at"] is not None) == (2, "complete", True)
    assert (await jobs.held())["a:tells"] == 0
    assert (await jobs.row(first))["epoch"] == 1
    assert list(events(worker, "lease-lost")) == []
    assert worker.process.poll() is None


async def _succeeded(jobs: JobTable, count: int) -> bool:
    return await jobs.counts() == {"succeeded": count}
