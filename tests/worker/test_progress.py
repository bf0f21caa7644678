"""What actors report is stored between times and before the end, by whoever holds the job, and survives the attempt."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from taskqd import JobNotFoundError, JobProgress, JobStatus, TaskQ, new_uuid
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.support import eventually

WAIT = 30


async def store(jobs: JobTable, job: object, epoch: int, seq: int = 5) -> None:
    await jobs.conn.execute(jobs.worker_sql.store_progress, [job], [epoch], [seq], ['{"step": "x"}'])


async def test_the_attempt_that_holds_the_job_writes_and_nobody_else(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    for epoch in (0, 2):
        await store(jobs, job, epoch)
        assert (await jobs.row(job))["progress_seq"] == 0
    await store(jobs, job, 1)
    row = await jobs.row(job)
    assert (row["progress_seq"], row["progress_state"], row["status"]) == (5, '{"step": "x"}', "running")
    await jobs.succeed(job)
    await store(jobs, job, 1, seq=6)
    assert (await jobs.row(job))["progress_seq"] == 5


async def test_a_locked_row_holds_nobody_up(jobs: JobTable, dsn: str) -> None:
    first, second = await jobs.running(await jobs.register(), 2)
    other = await asyncpg.connect(dsn, timeout=30)
    try:
        async with other.transaction(), asyncio.timeout(20):
            await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', first)
            columns = [first, second], [1, 1], [5, 5], ["{}", "{}"]
            await jobs.conn.execute(jobs.worker_sql.store_progress, *columns)
    finally:
        await other.close(timeout=10)
    assert [(await jobs.row(job))["progress_seq"] for job in (first, second)] == [0, 5]


async def test_the_last_report_is_there_when_the_job_has_ended(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(env={"TASKQ_PROGRESS_COALESCE_INTERVAL": "60"})
    for actor, times in ((basic.reports, 1), (basic.reports_plain, 50)):
        handle = await tq.enqueue(actor, Work(times=times))
        await handle.wait(WAIT)
        assert (await handle.progress()).seq == times
    assert (await handle.row()).progress_state == {"detail": "number 49"}


async def test_the_next_attempt_goes_on_where_the_last_one_stopped(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    handle = await tq.enqueue(basic.reports, Work(times=6))
    assert await handle.wait(WAIT) == "from 3"
    progress = await handle.progress()
    assert (progress.seq, progress.state["data"], progress.state["percent"]) == (6, {"done": 6}, 100)


async def test_reports_arrive_while_the_job_runs(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(env={"TASKQ_PROGRESS_COALESCE_INTERVAL": "0.1"})
    handle = await tq.enqueue(basic.reports, Work(times=8, seconds=0.4))
    seen: list[JobProgress] = []
    async with asyncio.timeout(WAIT):
        async for progress in handle.progress_stream(poll=0.05):
            seen.append(progress)
    assert [one.seq for one in seen] == sorted(one.seq for one in seen)
    assert any(one.status is JobStatus.RUNNING and one.seq for one in seen)
    assert (seen[-1].status, seen[-1].seq) == (JobStatus.SUCCEEDED, 8)


async def test_what_a_killed_worker_had_stored_is_there_for_the_next(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    first = fleet.worker(env={"TASKQ_PROGRESS_COALESCE_INTERVAL": "0.1"})
    handle = await tq.enqueue(basic.reports, Work(times=200, seconds=0.2))
    await eventually(lambda: _reported(jobs, handle.job_id), WAIT)
    first.process.kill()
    first.process.wait(10)
    before = await handle.progress()
    fleet.worker()
    fleet.scheduler()
    later = await eventually(lambda: _reported(jobs, handle.job_id, more_than=before.seq), WAIT)
    assert later["progress_seq"] >= before.seq


async def _reported(jobs: JobTable, job: object, more_than: int = 0) -> asyncpg.Record | None:
    row = await jobs.row(job)  # type: ignore[arg-type]
    return row if row["progress_seq"] > more_than else None


async def test_a_job_that_does_not_exist_and_a_poll_out_of_range(tq: TaskQ) -> None:
    handle = tq.handle(new_uuid(), basic.succeed)
    with pytest.raises(JobNotFoundError):
        await handle.progress()
    with pytest.raises(ValueError, match=r"poll = 0 must be between 0.05 and 60 seconds"):
        await anext(handle.progress_stream(poll=0))
