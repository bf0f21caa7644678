"""A real worker takes the attempts of cancelled jobs up the ladder."""

from __future__ import annotations

import time
from typing import Any

import pytest

from taskqd import TaskQ
from taskqd.client.handle import JobHandle
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.support import eventually

LONG_GRACE = {"TASKQ_CANCELLATION_GRACE_PERIOD": "20", "TASKQ_LOCK_LEASE": "60"}
NO_NOTIFICATIONS = {"TASKQ_NOTIFY_ENABLED": "false"}


async def started(fleet: Fleet, tq: TaskQ, actor: Any, seconds: float = 60) -> JobHandle[Any]:
    """Enqueue a job and wait until its handler runs."""
    before = len(fleet.executions())
    handle = await tq.enqueue(actor, Work(seconds=seconds))
    await fleet.wait_for_executions(before + 1)
    return handle


async def ended(handle: JobHandle[Any]) -> Any:
    async def row() -> Any:
        found = await handle.row()
        return found if found.is_terminal else None

    return await eventually(row, 30)


@pytest.mark.parametrize("environ", [LONG_GRACE, LONG_GRACE | NO_NOTIFICATIONS], ids=["notified", "polled"])
async def test_an_actor_that_listens_keeps_what_it_returns(fleet: Fleet, tq: TaskQ, environ: dict[str, str]) -> None:
    fleet.worker(env=environ)
    handle = await started(fleet, tq, basic.listens)
    await handle.cancel()
    assert await handle.wait(30) == "operator"


async def test_a_notification_brings_it_long_before_the_next_beat(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(
        env=LONG_GRACE
        | {"TASKQ_HEARTBEAT_INTERVAL": "60", "TASKQ_LOCK_LEASE": "400", "TASKQ_HEARTBEAT_COMMAND_TIMEOUT": "2"}
    )
    handle = await started(fleet, tq, basic.listens)
    asked = time.monotonic()
    await handle.cancel()
    assert await handle.wait(30) == "operator"
    assert time.monotonic() - asked < 10


async def test_an_actor_that_does_not_listen_is_cancelled_after_the_grace(
    fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.5"})
    handle = await started(fleet, tq, basic.tidy)
    await handle.cancel()
    row = await ended(handle)
    assert (row.status, row.error_class, row.epoch, row.attempt) == ("cancelled", "CancelledForced", 1, 1)
    assert len(await fleet.wait_for_executions(1, "cancelled operator")) == 1
    assert await jobs.attempts(handle.job_id) == []


async def test_one_that_ignores_everything_is_abandoned_and_keeps_its_slot(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(
        concurrency=1, env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.2", "TASKQ_CLEANUP_GRACE_PERIOD": "2"}
    )
    handle = await started(fleet, tq, basic.stubborn, seconds=3.2)  # less than makes the worker give itself up
    await handle.cancel()
    row = await ended(handle)
    assert (row.status, row.error_class) == ("abandoned", "CancelAbandoned")
    assert [one["event"] for one in events(worker, "cancel-ignored")] == ["cancel-ignored"]
    following = await tq.enqueue(basic.succeed, Work(key="next"))
    assert await following.wait(30) == "next"
    first, second = fleet.executions()
    assert second.at - first.at > 3, "the next handler waits until this one has really ended"
    assert (await handle.row()).status == "abandoned"


async def test_a_plain_function_is_asked_and_its_end_is_recorded(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(env=LONG_GRACE)
    handle = await started(fleet, tq, basic.polite)
    await handle.cancel()
    row = await ended(handle)
    assert (row.status, row.error_class) == ("cancelled", "CancelledCooperatively")


async def test_the_neighbours_of_a_cancelled_job_go_on(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(concurrency=3, env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.1"})
    neighbour = await started(fleet, tq, basic.tidy, seconds=3)
    handle = await started(fleet, tq, basic.tidy)
    await handle.cancel()
    assert (await ended(handle)).status == "cancelled"
    await neighbour.wait(30)
    assert fleet.executions("cancelled operator")[0].job == str(handle.job_id)
    assert len(fleet.executions("cancelled operator")) == 1


async def test_a_cancelled_job_does_not_come_back_from_a_worker_that_stops(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(env=LONG_GRACE)
    handle = await started(fleet, tq, basic.tidy)
    await handle.cancel()
    await eventually(lambda: any(events(worker, "cancel-requested")), 20)
    worker.process.terminate()
    await eventually(lambda: any(events(worker, "shutdown-phase")), 20)
    worker.process.terminate()  # the second signal skips the grace
    row = await ended(handle)
    assert row.status == "cancelled"
    assert row.error_class in ("CancelledForced", "CancelledCooperatively")
    assert worker.process.wait(60) == 0


async def test_a_stubborn_one_is_abandoned_by_a_worker_that_stops(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "1", "TASKQ_CLEANUP_GRACE_PERIOD": "1"})
    handle = await started(fleet, tq, basic.stubborn)
    await handle.cancel()
    await eventually(lambda: any(events(worker, "cancel-requested")), 20)
    worker.process.terminate()
    assert (await ended(handle)).status == "abandoned"
    worker.process.wait(60)
