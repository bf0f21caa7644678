"""Stopping a worker: quick when idle, and otherwise everything handed back or finished, by the table."""

from __future__ import annotations

import signal
import time
from uuid import UUID

import pytest

from taskqd import TaskQ
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet, events, wait_for_event
from tests.jobs import JobTable
from tests.support import eventually

WAIT = 30


async def workers_left(jobs: JobTable) -> int:
    return int(await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".workers'))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_idle_worker_is_gone_within_a_second(fleet: Fleet, jobs: JobTable, number: signal.Signals) -> None:
    worker = fleet.worker()
    assert await workers_left(jobs) == 1
    began = time.monotonic()
    worker.signal(number)
    assert worker.wait() == 0
    assert time.monotonic() - began < 1.0
    assert await workers_left(jobs) == 0
    sockets = await jobs.conn.fetchval(
        "select count(*) from pg_stat_activity where application_name like $1", f"taskqd/{jobs.schema}/%"
    )
    assert sockets == 0


async def test_what_runs_may_finish_within_the_grace(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "10", "TASKQ_LOCK_LEASE": "15"})
    handles = [
        await tq.enqueue(basic.succeed, Work(key="a", seconds=1.0)),
        await tq.enqueue(basic.plain, Work(seconds=1.0)),
    ]
    await fleet.wait_for_executions(2)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    rows = [await handle.row() for handle in handles]
    assert [(row.status, row.attempt, row.interrupt_count) for row in rows] == [("succeeded", 1, 0)] * 2
    assert len(fleet.executions("end")) == 2


async def test_a_handler_hears_of_the_stop_at_once(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "15", "TASKQ_LOCK_LEASE": "20"})
    listens = await tq.enqueue(basic.listens, Work(seconds=60))
    polite = await tq.enqueue(basic.polite, Work(seconds=60))
    await fleet.wait_for_executions(2)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 5
    assert await listens.wait(1) == "shutdown", "what it returns is recorded"
    row = await polite.row()
    assert (row.status, row.attempt, row.interrupt_count) == ("pending", 1, 1), "what it raises is an interrupt"


async def test_no_job_begins_once_it_stops(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker()
    await tq.enqueue(basic.succeed, Work(seconds=1.5))
    await fleet.wait_for_executions(1)
    worker.signal(signal.SIGTERM)
    wait_for_event(worker, "shutdown-phase")
    late = await tq.enqueue(basic.succeed, Work(key="late"))
    assert worker.wait() == 0
    assert (await late.row()).attempt == 0
    assert len(fleet.executions()) == 1


async def test_under_load_everything_goes_back_or_ends(fleet: Fleet, jobs: JobTable) -> None:
    """Fast jobs, so that rows wait in the local queue when the signal comes."""
    ids = await jobs.plant(4000)
    worker = fleet.worker(concurrency=4)
    await fleet.wait_for_executions(500)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    executed = {UUID(one.job) for one in fleet.executions()}
    assert len(executed) < len(ids), "the signal came too late to interrupt anything"
    rows = await jobs.conn.fetch(f'select id, status::text, attempt, epoch, interrupt_count from "{jobs.schema}".jobs')
    for row in rows:
        if row["id"] in executed:
            assert (row["status"], row["attempt"], row["interrupt_count"]) == ("succeeded", 1, 0)
        else:
            assert (row["status"], row["attempt"], row["interrupt_count"]) == ("pending", 0, 0), "refunded"
    assert await workers_left(jobs) == 0


async def test_what_outlasts_the_grace_is_cancelled_and_released(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.5"})
    handles = [await tq.enqueue(basic.tidy, Work(key=str(n), seconds=60)) for n in range(3)]
    await fleet.wait_for_executions(3)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 5
    assert len(fleet.executions("cancelled shutdown")) == 3
    for handle in handles:
        row = await handle.row()
        assert (row.status, row.attempt, row.interrupt_count, row.epoch) == ("pending", 1, 1, 2)
        (attempt,) = await jobs.attempts(handle.job_id)
        assert (attempt["outcome"], attempt["cause"]) == ("interrupted", "worker_shutdown")
    phases = [event["phase"] for event in events(worker, "shutdown-phase")]
    assert phases[:2] == ["draining", "cancelling"]
    assert await workers_left(jobs) == 0


async def test_a_deploy_never_ends_a_job(fleet: Fleet, tq: TaskQ) -> None:
    """A job at its last attempt is interrupted again and again, and still runs to its own end."""
    handle = await tq.enqueue(basic.tidy, Work(seconds=60))
    for round_ in range(1, 5):
        worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0"})
        await fleet.wait_for_executions(round_)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        row = await handle.row()
        assert (row.status, row.attempt, row.interrupt_count) == ("pending", round_, round_)
    assert row.attempt > row.max_attempts


async def test_what_swallows_its_cancellation_is_released_and_left_behind(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.3", "TASKQ_CLEANUP_GRACE_PERIOD": "0.3"})
    handle = await tq.enqueue(basic.stubborn, Work(seconds=120))
    await fleet.wait_for_executions(1)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 6
    row = await handle.row()
    assert (row.status, row.attempt, row.interrupt_count) == ("pending", 1, 1)
    assert [event["phase"] for event in events(worker, "shutdown-phase")][:3] == ["draining", "cancelling", "releasing"]


async def test_a_thread_that_a_handler_left_behind_does_not_keep_the_process(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.3"})
    handle = await tq.enqueue(basic.leaves_a_thread, Work(seconds=120))
    await fleet.wait_for_executions(1)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 6
    assert (await handle.row()).interrupt_count == 1


async def test_a_thread_that_does_not_listen_keeps_its_row_until_the_process_is_gone(
    fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    """Released while its thread still works, the job would run twice at once. Later it is an interrupt."""
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.3", "TASKQ_CLEANUP_GRACE_PERIOD": "0.3"})
    handle = await tq.enqueue(basic.plain, Work(seconds=120))
    await fleet.wait_for_executions(1)
    worker.signal(signal.SIGTERM)
    assert worker.wait(15) == 0
    assert (await handle.row()).status == "running"
    assert await workers_left(jobs) == 1, "its row tells the reaper that it was stopping"
    await jobs.update([handle.job_id], lock_expires_at="clock_timestamp()")
    assert (await jobs.tick())["reaped"] == 1
    row = await handle.row()
    assert (row.status, row.attempt, row.interrupt_count) == ("pending", 1, 1)


async def test_a_second_signal_begins_the_next_step_and_a_third_ends_it(fleet: Fleet, tq: TaskQ) -> None:
    graces = {
        "TASKQ_CANCELLATION_GRACE_PERIOD": "60",
        "TASKQ_CLEANUP_GRACE_PERIOD": "60",
        "TASKQ_TERMINATION_GRACE_PERIOD": "200",
        "TASKQ_LOCK_LEASE": "200",
    }
    worker = fleet.worker(env=graces)
    tidy = await tq.enqueue(basic.tidy, Work(seconds=120))
    stubborn = await tq.enqueue(basic.stubborn, Work(seconds=120))
    await fleet.wait_for_executions(2)
    worker.signal(signal.SIGTERM)
    wait_for_event(worker, "shutdown-phase")
    assert fleet.executions("cancelled shutdown") == []
    worker.signal(signal.SIGTERM)
    await fleet.wait_for_executions(1, "cancelled shutdown", timeout=10)
    await fleet.wait_for_executions(1, "swallowed", timeout=10)
    await eventually(lambda: _is(tidy, "pending"), 10)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 3
    assert time.monotonic() - began < 1
    assert (await stubborn.row()).status == "running"


async def _is(handle: object, status: str) -> bool:
    return (await handle.row()).status == status  # type: ignore[attr-defined]


async def test_an_outcome_that_waits_for_a_lock_is_written_before_the_end(
    fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    worker = fleet.worker()
    handle = await tq.enqueue(basic.succeed, Work(key="a", seconds=0.5))
    await fleet.wait_for_executions(1)
    async with jobs.conn.transaction():
        await jobs.conn.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', handle.job_id)
        await fleet.wait_for_executions(1, "end")
        worker.signal(signal.SIGTERM)
        wait_for_event(worker, "shutdown-phase")
        time.sleep(0.5)
    assert worker.wait() == 0
    assert (await handle.row()).status == "succeeded"


async def test_the_deadline_of_the_platform_is_kept_whatever_happens(fleet: Fleet, tq: TaskQ) -> None:
    """A handler that blocks the loop at the wrong moment cannot outlive the termination grace."""
    worker = fleet.worker(
        env={
            "TASKQ_WATCHDOG_ENABLED": "true",
            "TASKQ_WATCHDOG_LOOP_LAG_BUDGET": "60",
            "TASKQ_WATCHDOG_CHECK_INTERVAL": "0.2",
            "TASKQ_LOCK_LEASE": "70",
            "TASKQ_CANCELLATION_GRACE_PERIOD": "0.1",
            "TASKQ_CLEANUP_GRACE_PERIOD": "0.1",
            "TASKQ_TERMINATION_GRACE_PERIOD": "5.5",
        }
    )
    await tq.enqueue(basic.blocks_when_cancelled, Work(seconds=50))
    await fleet.wait_for_executions(1)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait(40) == 70
    assert 4.5 < time.monotonic() - began < 15
    assert next(events(worker, "worker-watchdog-trip"))["detector"] == "shutdown-deadline"
