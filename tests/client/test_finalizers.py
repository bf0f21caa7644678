"""What is stored of a batch itself: its finalizer, its policy, its summary."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskqd import BatchAbortedError, EnqueueItem, JobStatus, MaxPendingExceededError, TaskQ, new_uuid, wait_for_batch
from taskqd.batch import AbortBatchAfter, BatchFilter
from tests.client.actors import Number, double, fail
from tests.client.test_admission import few

Count = Callable[[], Awaitable[int]]
LAST = EnqueueItem(actor_ref=fail, payload=Number(n=99))


def items(number: int, **options: Any) -> list[EnqueueItem]:
    return [EnqueueItem(actor_ref=double, payload=Number(n=n), **options) for n in range(number)]


async def test_the_finalizer_is_held_until_the_batch_has_ended(tq: TaskQ) -> None:
    batch = await tq.enqueue_batch(items(2), finalizer=LAST)
    assert batch.finalizer is not None
    assert batch.size == 2
    row = await batch.finalizer.row()
    assert (row.status, row.batch_id, row.payload, row.scheduled_at.year) == ("scheduled", None, {"n": 99}, 9999)
    assert (await batch.status()).total == 2
    await tq.cancel(batch.job_handles[0].job_id)
    assert await batch.finalizer.status() == JobStatus.SCHEDULED
    await tq.cancel(batch.job_handles[1].job_id)
    assert await batch.finalizer.status() == JobStatus.PENDING
    assert await tq.batch_state(batch.batch_id) == "complete"


async def test_a_batch_that_is_enqueued_again_keeps_its_finalizer(tq: TaskQ, count: Count) -> None:
    name = new_uuid()
    keyed = [EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=f"{n}") for n in range(3)]
    first = await tq.enqueue_batch(keyed, batch_id=name, finalizer=LAST)
    again = await tq.enqueue_batch(keyed, batch_id=name, finalizer=LAST)
    assert first.finalizer is not None
    assert again.finalizer is not None
    assert again.finalizer.job_id == first.finalizer.job_id
    assert await count() == 4


async def test_of_many_who_enqueue_the_same_batch_at_once_one_gives_it_the_finalizer(tq: TaskQ, count: Count) -> None:
    name = new_uuid()
    keyed = [EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=f"{n}") for n in range(3)]
    batches = await asyncio.gather(*(tq.enqueue_batch(keyed, batch_id=name, finalizer=LAST) for _ in range(8)))
    assert len({batch.finalizer.job_id for batch in batches if batch.finalizer is not None}) == 1
    assert await count() == 4


async def test_a_batch_gets_its_finalizer_later(tq: TaskQ) -> None:
    batch = await tq.enqueue_batch(items(1))
    await tq.cancel(batch.job_handles[0].job_id)
    again = await tq.enqueue_batch(items(1), batch_id=batch.batch_id, finalizer=LAST)
    assert again.finalizer is not None
    assert await again.finalizer.status() == JobStatus.SCHEDULED
    await tq.cancel(again.job_handles[0].job_id)
    assert await again.finalizer.status() == JobStatus.PENDING


async def test_a_streams_finalizer_comes_with_its_end_however_soon_the_jobs_have_ended(tq: TaskQ) -> None:
    name = new_uuid()

    async def generate() -> Any:
        for number, one in enumerate(items(20)):
            if number == 15:
                for row in await tq.batch_jobs(name):
                    await tq.cancel(row.id)
                assert await tq.batch_state(name) == "complete"
            yield one

    batch = await tq.enqueue_batch_streaming(generate(), batch_id=name, finalizer=LAST, chunk_size=10)
    assert batch.finalizer is not None
    assert await batch.finalizer.status() == JobStatus.SCHEDULED
    for row in await tq.batch_jobs(name):
        await tq.cancel(row.id)
    assert await batch.finalizer.status() == JobStatus.PENDING

    async def ended() -> Any:
        yield items(1)[0]
        for row in await tq.batch_jobs(other):
            await tq.cancel(row.id)

    other = new_uuid()
    batch = await tq.enqueue_batch_streaming(ended(), batch_id=other, finalizer=LAST, chunk_size=1)
    assert batch.finalizer is not None
    assert await batch.finalizer.status() == JobStatus.PENDING


async def test_a_batch_is_rolled_back_with_its_finalizer(tq: TaskQ, conn: asyncpg.Connection, count: Count) -> None:
    transaction = conn.transaction()
    await transaction.start()
    await tq.enqueue_batch(items(2), finalizer=LAST, connection=conn)
    await transaction.rollback()
    assert await count() == 0
    assert await tq.list_batches() == []


async def test_a_finalizer_for_which_there_is_no_room_refuses_the_batch(tq: TaskQ, count: Count) -> None:
    for _ in range(3):
        await tq.enqueue(few, Number())
    with pytest.raises(MaxPendingExceededError):
        await tq.enqueue_batch(items(2), finalizer=EnqueueItem(actor_ref=few, payload=Number()))
    assert await count() == 3


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"finalizer": fail}, TypeError, "finalizer = .* must be an EnqueueItem"),
        (
            {"finalizer": EnqueueItem(actor_ref=fail, payload=Number(), scheduled_at=datetime.now(UTC))},
            ValueError,
            "leave out scheduled_at",
        ),
        ({"finalizer": EnqueueItem(actor_ref=fail, payload={"n": "x"})}, Exception, "payload of actor 'fail'"),
        ({"failure_policy": 3}, TypeError, "must be AbortBatchAfter"),
    ],
)
async def test_a_bad_option_of_a_batch_is_refused(tq: TaskQ, count: Count, options: Any, error: Any, fix: str) -> None:
    for enqueue in (tq.enqueue_batch, tq.enqueue_batch_streaming):
        with pytest.raises(error, match=fix):
            await enqueue(items(1), **options)
    assert await count() == 0


async def test_a_finalizer_is_no_job_of_its_batch(tq: TaskQ) -> None:
    name = new_uuid()
    with pytest.raises(ValueError, match="a finalizer in its own batch would wait for itself"):
        await tq.enqueue_batch(
            items(1), batch_id=name, finalizer=EnqueueItem(actor_ref=fail, payload=Number(), batch_id=name)
        )


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "3"])
def test_a_policy_counts_from_one(number: Any) -> None:
    with pytest.raises(ValueError, match=r"consecutive_failures = .* must be a whole number of at least 1"):
        AbortBatchAfter(consecutive_failures=number)


async def test_an_aborted_batch_takes_no_more_jobs(
    tq: TaskQ, conn: asyncpg.Connection, schema: str, count: Count
) -> None:
    batch = await tq.enqueue_batch(items(3), failure_policy=AbortBatchAfter(consecutive_failures=1))
    await conn.execute(
        f"update \"{schema}\".jobs set schedule_to_close = clock_timestamp() - interval '1 s' where id = $1",
        batch.job_handles[0].job_id,
    )
    await conn.fetchval(f'select "{schema}".tick()')
    assert await tq.batch_state(batch.batch_id) == "aborted"
    for enqueue in (tq.enqueue_batch, tq.enqueue_batch_fast, tq.enqueue_batch_streaming):
        with pytest.raises(BatchAbortedError, match=f"batch {batch.batch_id} was aborted"):
            await enqueue(items(1), batch_id=batch.batch_id)
    assert await count() == 3
    assert (await batch.status()).cancelled == 2
    with pytest.raises(BatchAbortedError):
        await wait_for_batch(tq, batch.batch_id)
    (summary,) = await tq.list_batches()
    assert (summary.status, summary.failed, summary.cancelled, summary.failure_threshold) == ("aborted", 1, 2, 1)


async def test_batches_are_listed_newest_first(tq: TaskQ) -> None:
    one = await tq.enqueue_batch(items(2), finalizer=LAST)
    two = await tq.enqueue_batch(items(1, queue="slow"))
    three = await tq.enqueue_batch(items(1, scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
    await tq.cancel(three.job_handles[0].job_id)
    assert [summary.id for summary in await tq.list_batches()] == [three.batch_id, two.batch_id, one.batch_id]
    first = (await tq.list_batches(BatchFilter(batch_id=one.batch_id)))[0]
    assert (first.status, first.queue, first.total, first.completed_at) == ("active", "numbers", 2, None)
    assert one.finalizer is not None
    assert first.finalizer_job_id == one.finalizer.job_id

    async def listed(**which: Any) -> list[Any]:
        return [summary.id for summary in await tq.list_batches(BatchFilter(**which))]

    assert await listed(queue="slow") == [two.batch_id]
    assert await listed(active=True) == [two.batch_id, one.batch_id]
    assert await listed(active=False) == [three.batch_id]
    assert await listed(limit=1) == [three.batch_id]
    for limit in (0, 501):
        with pytest.raises(ValueError, match=f"limit = {limit} must be a whole number between 1 and 500"):
            BatchFilter(limit=limit)
