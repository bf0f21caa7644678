"""Workers that stand still: blocked, frozen, hung. A lease is kept, or given up for good, and never half of each."""

from __future__ import annotations

import signal
import time

import pytest

from taskqd import ActorRef, TaskQ
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet, events, wait_for_event
from tests.jobs import JobTable
from tests.support import eventually

WAIT = 40


async def test_an_actor_that_blocks_the_loop_keeps_its_lease(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    """Blocked for longer than its lease, while two others look for expired ones."""
    worker = fleet.worker(concurrency=2)
    handle = await tq.enqueue(basic.blocks, Work(key="a", seconds=5.0))
    await fleet.wait_for_executions(1)
    others = await tq.enqueue(basic.succeed, Work(key="b"), queue="other")
    fleet.worker(queues="default,other")
    fleet.scheduler()
    await others.wait(WAIT)
    await handle.wait(WAIT)
    row = await handle.row()
    assert (row.status, row.attempt, row.epoch) == ("succeeded", 1, 1)
    assert await jobs.attempts(handle.job_id) == []
    (execution,) = [one for one in fleet.executions() if one.key == "a"]
    assert execution.pid == worker.pid


async def test_a_loop_that_stands_still_beyond_its_budget_ends_the_process(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(
        env={
            "TASKQ_WATCHDOG_ENABLED": "true",
            "TASKQ_WATCHDOG_LOOP_LAG_BUDGET": "1.5",
            "TASKQ_WATCHDOG_LOOP_LAG_WARN_BUDGET": "0.5",
            "TASKQ_WATCHDOG_CHECK_INTERVAL": "0.2",
        }
    )
    await tq.enqueue(basic.blocks, Work(seconds=60))
    await fleet.wait_for_executions(1)
    began = time.monotonic()
    assert worker.wait(20) == 70
    assert time.monotonic() - began < 15
    assert next(events(worker, "worker-watchdog-trip"))["detector"] == "event-loop-lag"
    assert len(list(events(worker, "worker-watchdog-lag-warn"))) == 1
    assert "in blocks" in worker.stderr, "the stack names the culprit"


@pytest.mark.parametrize("wreck", [basic.cancels_everything, basic.stops_the_loop])
async def test_a_handler_that_wrecks_the_worker_ends_it_whatever_others_hold_on_to(
    fleet: Fleet, tq: TaskQ, wreck: ActorRef[Work, None]
) -> None:
    worker = fleet.worker(concurrency=2)
    await tq.enqueue(basic.stubborn, Work(seconds=120))
    await fleet.wait_for_executions(1)
    await tq.enqueue(wreck, Work())
    assert worker.wait(20) == 70
    assert next(events(worker, "worker-cancelled"))["level"] == "critical"


async def test_a_worker_frozen_beyond_its_lease_changes_nothing_of_what_others_took(
    fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    frozen = fleet.worker(concurrency=4)
    handles = [await tq.enqueue(basic.succeed, Work(key=str(n), seconds=1.5)) for n in range(3)]
    handles.append(await tq.enqueue(basic.plain, Work(key="thread", seconds=1.5)))
    await fleet.wait_for_executions(4)
    frozen.signal(signal.SIGSTOP)
    try:
        fleet.worker(concurrency=4)
        for handle in handles:
            await handle.wait(WAIT)
            row = await handle.row()
            assert (row.status, row.attempt, row.epoch) == ("succeeded", 2, 3)
            assert [one["outcome"] for one in await jobs.attempts(handle.job_id)] == ["crashed"]
        before = await jobs.image()
    finally:
        frozen.signal(signal.SIGCONT)
    assert frozen.wait(20) == 70, "it cannot prove that its leases held, so it ends"
    trips = [event["detector"] for event in events(frozen, "worker-watchdog-trip")]
    assert trips in (["lease"], []), "as a rule the timer of the system is quicker, which cannot say so"
    assert await jobs.image() == before


async def test_a_worker_frozen_for_a_moment_goes_on(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker()
    fleet.scheduler()
    handle = await tq.enqueue(basic.succeed, Work(seconds=2.0))
    await fleet.wait_for_executions(1)
    worker.signal(signal.SIGSTOP)
    time.sleep(0.8)
    worker.signal(signal.SIGCONT)
    await handle.wait(WAIT)
    row = await handle.row()
    assert (row.attempt, row.epoch) == (1, 1)
    assert worker.process.poll() is None


async def test_a_worker_frozen_while_idle_goes_on_however_long_it_was(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker()
    worker.signal(signal.SIGSTOP)
    time.sleep(3.0)
    worker.signal(signal.SIGCONT)
    assert await (await tq.enqueue(basic.succeed, Work(key="a"))).wait(WAIT) == "a"
    assert worker.process.poll() is None


async def test_a_worker_that_was_declared_dead_ends(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    worker = fleet.worker(concurrency=1)  # with room for another it takes its own row back, and again
    handle = await tq.enqueue(basic.succeed, Work(seconds=60))
    await fleet.wait_for_executions(1)
    await jobs.conn.execute(f'update "{jobs.schema}".workers set dead_at = clock_timestamp()')
    assert worker.wait(20) == 70
    assert (await jobs.tick())["reaped"] == 1
    row = await handle.row()
    assert (row.status, row.attempt, row.epoch) == ("pending", 1, 2)


async def test_a_handler_whose_row_was_taken_is_stopped(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    """An operator may end a lease at any time; the worker hears of it at its next beat."""
    worker = fleet.worker()
    handle = await tq.enqueue(basic.tidy, Work(key="a", seconds=60))
    await fleet.wait_for_executions(1)
    await jobs.update([handle.job_id], status="'failed'", epoch="epoch + 1", lock_expires_at="null")
    before = await jobs.image()
    await fleet.wait_for_executions(1, "cancelled lease_lost", timeout=10)
    wait_for_event(worker, "lease-lost")
    assert await (await tq.enqueue(basic.succeed, Work(key="b"))).wait(WAIT) == "b"
    assert (await jobs.image())[1] == before[1]
    row = await handle.row()
    assert (row.status, row.epoch, row.attempt) == ("failed", 2, 1)
    assert worker.process.poll() is None
    assert len(list(events(worker, "lease-lost"))) == 1


async def test_a_row_that_somebody_holds_for_long_is_not_lost(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    worker = fleet.worker()
    handle = await tq.enqueue(basic.succeed, Work(key="a", seconds=3.0))
    await fleet.wait_for_executions(1)
    async with jobs.conn.transaction():
        await jobs.conn.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', handle.job_id)
        time.sleep(2.0)
    assert await handle.wait(WAIT) == "a"
    assert (await handle.row()).epoch == 1
    await eventually(lambda: worker.process.poll() is None)
