"""Listing jobs by what they are, page after page, and cancelling all that fit."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd import EmptyFilterError, EnqueueItem, JobFilter, JobOrder, JobStatus, TaskQ, new_uuid
from taskqd.client import control as module
from tests.client.actors import Number, double, fail
from tests.client.conftest import Finish


@pytest.fixture
async def some(tq: TaskQ, finish: Finish) -> dict[str, UUID]:
    """One job of each kind."""
    made = {
        "plain": await tq.enqueue(fail, Number()),
        "urgent": await tq.enqueue(fail, Number(), priority=9),
        "slow": await tq.enqueue(double, Number(), queue="slow", tags=["a", "b"]),
        "later": await tq.enqueue(double, Number(), scheduled_at=datetime.now(UTC) + timedelta(hours=1), tags=["b"]),
        "done": await tq.enqueue(double, Number(), identity_key="i"),
        "failed": await tq.enqueue(fail, Number(), identity_key="i", batch_id=new_uuid()),
    }
    await finish(made["done"].job_id, "succeeded")
    await finish(made["failed"].job_id, "failed")
    return {name: handle.job_id for name, handle in made.items()}


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({}, ["urgent", "slow", "done", "later", "plain", "failed"]),
        ({"queue": "slow"}, ["slow"]),
        ({"actor": "fail"}, ["urgent", "plain", "failed"]),
        ({"actor": "fail", "active": True}, ["urgent", "plain"]),
        ({"active": False}, ["done", "failed"]),
        ({"status": JobStatus.SCHEDULED}, ["later"]),
        ({"status": ["pending", JobStatus.FAILED]}, ["urgent", "slow", "plain", "failed"]),
        ({"status": JobStatus.FAILED, "active": True}, []),
        ({"identity_key": "i"}, ["done", "failed"]),
        ({"identity_key": "i", "actor": "fail"}, ["failed"]),
        ({"tags": ["b"]}, ["slow", "later"]),
        ({"tags": ["a", "z"]}, ["slow"]),
        ({"order_by": JobOrder.CREATED_AT_DESC}, ["failed", "done", "later", "slow", "urgent", "plain"]),
        ({"order_by": JobOrder.FINISHED_AT_DESC}, ["failed", "done"]),
        ({"order_by": "finished", "actor": "double"}, ["done"]),
        ({"actor": "nobody"}, []),
    ],
)
async def test_jobs_are_listed_by_what_they_are(
    tq: TaskQ, some: dict[str, UUID], which: dict[str, Any], expected: list[str]
) -> None:
    names = {job_id: name for name, job_id in some.items()}
    page = await tq.list(JobFilter(**which))
    assert [names[job.id] for job in page.jobs] == expected
    assert page.next_cursor is None


async def test_a_batch_is_listed(tq: TaskQ, some: dict[str, UUID]) -> None:
    row = await tq.get(some["failed"])
    assert row is not None
    assert [job.id for job in (await tq.list(JobFilter(batch_id=row.batch_id))).jobs] == [row.id]


@pytest.mark.parametrize("order", list(JobOrder))
@pytest.mark.parametrize("limit", [1, 7, 30])
async def test_pages_hold_every_job_once(
    tq: TaskQ, conn: asyncpg.Connection, schema: str, order: JobOrder, limit: int
) -> None:
    await tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number(n=n), priority=n % 3) for n in range(30)])
    if order is JobOrder.FINISHED_AT_DESC:
        await conn.execute(f"update \"{schema}\".jobs set status = 'succeeded', finished_at = clock_timestamp()")
    else:
        await conn.execute(f"update \"{schema}\".jobs set scheduled_at = date_trunc('hour', scheduled_at)")
    whole = (await tq.list(JobFilter(order_by=order))).jobs
    seen: list[UUID] = []
    cursor = None
    for _ in range(40):
        page = await tq.list(JobFilter(order_by=order, limit=limit, cursor=cursor))
        seen += [job.id for job in page.jobs]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [job.id for job in whole]
    assert len(set(seen)) == 30


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"limit": 0}, ValueError, "limit = 0 must be a whole number between 1 and 1000"),
        ({"limit": 1001}, ValueError, "limit = 1001 must be a whole number between 1 and 1000"),
        ({"status": "gone"}, ValueError, "status = 'gone' must be one of scheduled, pending, "),
        ({"order_by": "size"}, ValueError, "order_by = 'size' must be one of scheduled, created, finished"),
        ({"tags": "a"}, TypeError, "must be a list or a tuple of words"),
    ],
)
def test_a_filter_that_cannot_be_is_refused(options: Any, error: Any, fix: str) -> None:
    with pytest.raises(error, match=fix):
        JobFilter(**options)


async def test_a_cursor_is_of_one_order(tq: TaskQ, some: dict[str, UUID]) -> None:
    cursor = (await tq.list(JobFilter(limit=1))).next_cursor
    with pytest.raises(ValueError, match="the cursor is of a page in the order 'scheduled', not created"):
        await tq.list(JobFilter(limit=1, cursor=cursor, order_by=JobOrder.CREATED_AT_DESC))
    for wrong in ("x", "%%%", "bnVsbA==", "WzEsMl0="):
        with pytest.raises(ValueError, match="is not the next_cursor of a page"):
            await tq.list(JobFilter(cursor=wrong))


async def test_a_page_of_a_large_table_reads_no_more_than_it_shows(
    tq: TaskQ, conn: asyncpg.Connection, schema: str
) -> None:
    await tq.enqueue_batch_fast([EnqueueItem(actor_ref=double, payload=Number(n=n)) for n in range(5000)])
    await tq.enqueue_batch([EnqueueItem(actor_ref=fail, payload=Number(), tags=["rare"], identity_key="i")])
    batch = await tq.enqueue_batch([EnqueueItem(actor_ref=fail, payload=Number())])
    await conn.execute(f'analyze "{schema}".jobs')
    table = f"'\"{schema}\".jobs'::regclass"
    read = f"select pg_stat_get_xact_tuples_returned({table}) + pg_stat_get_xact_tuples_fetched({table})"
    call = f'select count(*) from "{schema}".list_jobs($1, null, $2, $3, $4, $5, $6, 10, null, null, null)'
    for arguments in (
        (None, None, None, None, None, "created"),
        (None, None, None, None, None, "finished"),
        (None, None, None, batch.batch_id, None, "scheduled"),
        (None, None, None, None, ["rare"], "scheduled"),
        (None, "fail", "i", None, None, "scheduled"),
    ):
        async with conn.transaction():
            before = await conn.fetchval(read)
            await conn.fetchval(call, *arguments)
            assert await conn.fetchval(read) - before <= 40, arguments


# -- cancelling many --------------------------------------------------------------------------------


async def test_all_that_fit_are_cancelled(
    tq: TaskQ, some: dict[str, UUID], conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(f"update \"{schema}\".jobs set status = 'running' where id = $1", some["slow"])
    result = await tq.cancel_where(JobFilter(actor="double"), "no more")
    assert (result.cancelled_ids, result.cancel_requested_ids) == ([some["later"]], [some["slow"]])
    assert (result.cancelled_directly, result.cancel_requested, result.total_affected) == (1, 1, 2)
    row = await tq.get(some["later"])
    assert row is not None
    assert (row.status, row.error_class, row.error_message) == ("cancelled", "CancelledBeforeStart", "no more")
    phase = await conn.fetchval(f'select cancel_phase from "{schema}".jobs where id = $1', some["slow"])
    assert phase == 1
    events = await conn.fetch(f"select job_id, detail->>'reason' as reason from \"{schema}\".job_events")
    assert {(event["job_id"], event["reason"]) for event in events} == {
        (some["later"], "no more"),
        (some["slow"], "no more"),
    }
    assert (await tq.cancel_where(JobFilter(actor="double"))).total_affected == 0
    left = (await tq.list(JobFilter(active=True))).jobs
    assert {job.id for job in left} == {some["plain"], some["urgent"], some["slow"]}


async def test_a_status_narrows_what_is_cancelled(tq: TaskQ, some: dict[str, UUID]) -> None:
    assert (await tq.cancel_where(JobFilter(status=JobStatus.SUCCEEDED))).total_affected == 0
    assert (await tq.cancel_where(JobFilter(status=JobStatus.SCHEDULED))).cancelled_ids == [some["later"]]


async def test_everything_is_cancelled_only_when_that_is_said(tq: TaskQ, some: dict[str, UUID]) -> None:
    for which in (JobFilter(), JobFilter(limit=5, order_by=JobOrder.CREATED_AT_DESC)):
        with pytest.raises(EmptyFilterError, match="pass allow_empty_filter=True"):
            await tq.cancel_where(which)
    assert (await tq.cancel_where(JobFilter(), allow_empty_filter=True)).cancelled_directly == 4
    with pytest.raises(ValueError, match="reason must be"):
        await tq.cancel_where(JobFilter(actor="double"), "a\x00")


async def test_many_are_cancelled_in_windows_and_count_in_their_batches(
    tq: TaskQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 10)
    batches = [
        await tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number()) for _ in range(25)]) for _ in range(2)
    ]
    await tq.cancel(batches[0].job_handles[7].job_id)
    result = await tq.cancel_where(JobFilter(actor="double"))
    assert len(set(result.cancelled_ids)) == 49
    assert [(one.status, one.cancelled) for one in await tq.list_batches()] == [("complete", 25), ("complete", 25)]


async def test_two_who_cancel_the_same_do_it_once(tq: TaskQ) -> None:
    await tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number()) for _ in range(300)])
    results = await asyncio.gather(*(tq.cancel_where(JobFilter(actor="double")) for _ in range(4)))
    ids = [job_id for result in results for job_id in result.cancelled_ids]
    assert len(ids) == len(set(ids)) == 300
