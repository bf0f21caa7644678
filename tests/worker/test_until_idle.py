"""``taskqd worker --until-idle``: works its queues empty, then says how it went."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from taskqd import TaskQ
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.support import Command, eventually

UNTIL_IDLE = ("--until-idle", "--max-runtime", "2m")


async def ended(worker: Command, timeout: float = 60) -> int:
    await eventually(lambda: worker.process.poll() is not None, timeout)
    return int(worker.process.returncode)


async def test_it_works_everything_and_ends_with_0(fleet: Fleet, jobs: JobTable, tq: TaskQ) -> None:
    await jobs.plant(40)
    await tq.enqueue(basic.parent, Work(key="a"))
    await tq.enqueue(basic.snooze, Work(seconds=3, times=1))  # longer than it waits for more
    worker = fleet.worker(flags=UNTIL_IDLE)
    assert await ended(worker) == 0
    assert await jobs.counts() == {"succeeded": 43}
    assert [one["failed"] for one in events(worker, "until-idle-reached")] == [0]


async def test_a_job_that_another_worker_still_runs_is_waited_for(fleet: Fleet, jobs: JobTable, tq: TaskQ) -> None:
    fleet.worker(queues="slow")
    handle = await tq.enqueue(basic.succeed, Work(seconds=5), queue="slow")
    await fleet.wait_for_executions(1)
    worker = fleet.worker(queues="default,slow", flags=UNTIL_IDLE)
    assert await ended(worker) == 0
    assert await handle.status() == "succeeded"


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_a_job_that_ended_badly_makes_it_3(fleet: Fleet, jobs: JobTable, tq: TaskQ, how: str) -> None:
    await jobs.plant(status="'failed'", finished_at="clock_timestamp()")  # before it started: not its concern
    later = await tq.enqueue(basic.succeed, Work(), scheduled_at=datetime.now(UTC) + timedelta(hours=1))
    worker = fleet.worker(flags=UNTIL_IDLE)
    if how == "failed":
        await tq.enqueue(basic.refuses, Work())
        await jobs.update([later.job_id], scheduled_at="clock_timestamp()")
    else:
        await later.cancel()
    assert await ended(worker) == 3
    assert [one["failed"] for one in events(worker, "until-idle-reached")] == [1]


async def test_other_queues_and_strangers_are_not_waited_for(fleet: Fleet, jobs: JobTable, tq: TaskQ) -> None:
    await jobs.plant(actor="'stranger'")
    await jobs.plant(route="'other'")
    await jobs.plant(status="'failed'", actor="'stranger'", finished_at="clock_timestamp() + interval '1 hour'")
    assert await ended(fleet.worker(flags=UNTIL_IDLE)) == 0


async def test_what_takes_too_long_makes_it_4(fleet: Fleet, tq: TaskQ) -> None:
    handle = await tq.enqueue(basic.tidy, Work(seconds=60))
    worker = fleet.worker(flags=("--until-idle", "--max-runtime", "2s"))
    assert await ended(worker) == 4
    row = await handle.row()
    assert (row.status, row.interrupt_count) == ("pending", 1)


async def test_a_signal_stops_it_as_ever(fleet: Fleet, tq: TaskQ) -> None:
    await tq.enqueue(basic.listens, Work(seconds=60))
    worker = fleet.worker(flags=("--until-idle",))
    await fleet.wait_for_executions(1)
    worker.process.terminate()
    assert await ended(worker) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-runtime", "5s"), "--max-runtime needs --until-idle"),
        (("--until-idle", "--max-runtime", "0"), "'0' must be between 1s and 30d"),
        (("--until-idle", "--max-runtime", "31d"), "'31d' must be between 1s and 30d"),
        (("--until-idle", "--max-runtime", "soon"), "'soon' must be a duration"),
    ],
)
async def test_a_wrong_time_is_refused(fleet: Fleet, flags: tuple[str, ...], message: str) -> None:
    worker = fleet.worker(flags=flags, ready=False)
    assert await ended(worker) == 2
    assert message in worker.stderr
