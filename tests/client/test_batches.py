"""Batches: how many, all or none, counted, paged and waited for."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd import (
    BatchAbortedError,
    EmptyBatchError,
    EnqueueItem,
    JobStatus,
    PayloadNotStorableError,
    PayloadValidationError,
    Snooze,
    TaskQ,
    new_uuid,
)
from taskqd import wait_for_batch as public_wait_for_batch
from taskqd.batch import BatchStatus, wait_for_batch
from taskqd.client import enqueue as module
from tests.client.actors import Number, double, fail
from tests.client.conftest import Finish, Wakes
from tests.support import eventually

Count = Callable[[], Awaitable[int]]


def items(number: int, **options: Any) -> list[EnqueueItem]:
    return [EnqueueItem(actor_ref=double, payload=Number(n=n), **options) for n in range(number)]


async def test_a_batch_of_one_thousand_keeps_its_order(tq: TaskQ, conn: asyncpg.Connection, schema: str) -> None:
    batch = await tq.enqueue_batch(items(1000))
    assert batch.size == 1000
    ids = [handle.job_id for handle in batch.job_handles]
    rows = await conn.fetch(
        f"select id, payload->>'n' as n, batch_id from \"{schema}\".jobs order by priority desc, scheduled_at, id"
    )
    assert [row["id"] for row in rows] == ids
    assert [int(row["n"]) for row in rows] == list(range(1000))
    assert {row["batch_id"] for row in rows} == {batch.batch_id}
    assert await batch.status() == BatchStatus(1000, 1000, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("number", [0, 1001])
async def test_a_batch_takes_one_to_a_thousand_items(tq: TaskQ, count: Count, number: int) -> None:
    with pytest.raises(ValueError, match=f"a batch takes 1 to 1000 items, not {number}"):
        await tq.enqueue_batch(items(number))
    assert await count() == 0


@pytest.mark.parametrize("wrong", [(item for item in items(2)), [{"actor_ref": double}], {1: 2}])
async def test_a_batch_takes_a_sequence_of_items(tq: TaskQ, count: Count, wrong: Any) -> None:
    with pytest.raises(TypeError, match="EnqueueItem, not"):
        await tq.enqueue_batch(wrong)
    assert await count() == 0


async def test_the_id_of_a_batch_is_a_uuid(tq: TaskQ, count: Count) -> None:
    with pytest.raises(TypeError, match="must be a UUID"):
        await tq.enqueue_batch(items(1), batch_id="x")  # type: ignore[arg-type]
    assert await count() == 0


async def test_the_payloads_of_a_batch_are_bounded_together(
    tq: TaskQ, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BATCH_SIZE", 100)
    with pytest.raises(PayloadNotStorableError, match="payloads of the batch are 150 characters, the limit is 100"):
        await tq.enqueue_batch(items(20))
    assert await count() == 0
    await tq.enqueue_batch(items(10))


async def test_one_bad_payload_refuses_the_whole_batch(tq: TaskQ, count: Count) -> None:
    bad = EnqueueItem(actor_ref=double, payload={"n": "x"})
    with pytest.raises(PayloadValidationError, match="payload of actor 'double' is invalid: n: "):
        await tq.enqueue_batch([*items(3), bad])
    assert await count() == 0


async def test_items_differ_in_actor_time_queue_and_batch(tq: TaskQ) -> None:
    other = new_uuid()
    later = datetime.now(UTC) + timedelta(hours=1)
    batch = await tq.enqueue_batch(
        [
            EnqueueItem(actor_ref=double, payload=Number()),
            EnqueueItem(actor_ref=fail, payload=Number(), queue="slow", priority=9),
            EnqueueItem(actor_ref=double, payload=Number(), scheduled_at=later),
            EnqueueItem(actor_ref=double, payload=Number(), batch_id=other),
        ]
    )
    rows = [await handle.row() for handle in batch.job_handles]
    assert [row.actor for row in rows] == ["double", "fail", "double", "double"]
    assert [row.queue for row in rows] == ["numbers", "slow", "numbers", "numbers"]
    assert [row.priority for row in rows] == [3, 9, 3, 3]
    assert [row.status for row in rows] == ["pending", "pending", "scheduled", "pending"]
    assert [row.batch_id for row in rows] == [batch.batch_id] * 3 + [other]
    assert await tq.batch_counts(other) == {"pending": 1}


async def test_a_batch_is_part_of_the_callers_transaction(
    tq: TaskQ, dsn: str, count: Count, wakes: Wakes, conn: asyncpg.Connection
) -> None:
    caller = await asyncpg.connect(dsn, timeout=30)
    try:
        transaction = caller.transaction()
        await transaction.start()
        batch = await tq.enqueue_batch(items(3), connection=caller)
        assert await batch.status() == BatchStatus(0, 0, 0, 0, 0, 0, 0)
        await transaction.rollback()
        assert await count() == 0

        async with caller.transaction():
            batch = await tq.enqueue_batch(items(3), connection=caller)
            assert wakes.seen == 0
        assert (await batch.status()).pending == 3
        await eventually(lambda: wakes.seen == 1)
    finally:
        await caller.close(timeout=10)


async def test_a_second_enqueue_into_the_same_batch_adds_to_it(tq: TaskQ) -> None:
    name = new_uuid()
    await tq.enqueue_batch(items(2), batch_id=name)
    batch = await tq.enqueue_batch(items(3), batch_id=name)
    await tq.enqueue(double, Number(), batch_id=name)
    assert batch.batch_id == name
    assert (await batch.status()).total == 6


async def test_a_repeated_enqueue_with_keys_adds_nothing(tq: TaskQ, count: Count) -> None:
    name = new_uuid()
    keyed = [EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=f"{name}:{n}") for n in range(5)]
    first = await tq.enqueue_batch(keyed, batch_id=name)
    again = await tq.enqueue_batch(keyed, batch_id=name)
    assert [one.job_id for one in first.job_handles] == [one.job_id for one in again.job_handles]
    assert all(handle.was_existing for handle in again.job_handles)
    assert (await again.status()).total == 5
    assert await count() == 5


# -- counting and paging ----------------------------------------------------------------------------


async def test_the_status_counts_every_end(tq: TaskQ, finish: Finish) -> None:
    batch = await tq.enqueue_batch(items(7))
    ends = ["succeeded", "succeeded", "failed", "cancelled", "crashed", "abandoned"]
    for handle, status in zip(batch.job_handles, ends, strict=False):
        await finish(handle.job_id, status)
    status = await batch.status()
    assert status == BatchStatus(total=7, pending=1, succeeded=2, failed=1, cancelled=1, crashed=1, abandoned=1)
    assert not status.is_complete
    await finish(batch.job_handles[-1].job_id)
    assert (await batch.status()).is_complete


def test_an_empty_batch_is_not_complete() -> None:
    assert not BatchStatus.from_counts({}).is_complete


async def test_the_jobs_of_a_batch_come_in_pages(tq: TaskQ, finish: Finish) -> None:
    batch = await tq.enqueue_batch(items(7))
    await tq.enqueue_batch(items(2))
    await finish(batch.job_handles[0].job_id, result={"n": 0})
    seen: list[UUID] = []
    sizes: list[int] = []
    after = None
    for _ in range(4):
        page = await tq.batch_jobs(batch.batch_id, after=after, limit=3)
        seen.extend(row.id for row in page)
        sizes.append(len(page))
        after = page[-1].id if page else after
    assert seen == [handle.job_id for handle in batch.job_handles]
    assert sizes == [3, 3, 1, 0]
    first = (await tq.batch_jobs(batch.batch_id, limit=1))[0]
    assert (first.status, first.result) == (JobStatus.SUCCEEDED, {"n": 0})


@pytest.mark.parametrize("limit", [0, -1, 1001])
async def test_a_page_is_one_to_a_thousand_jobs(tq: TaskQ, limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit = {limit} must be a whole number between 1 and 1000"):
        await tq.batch_jobs(new_uuid(), limit=limit)


# -- waiting ----------------------------------------------------------------------------------------


class Counts:
    """Stands for what can count a batch: answers one count after the other, the last for ever."""

    def __init__(self, *answers: dict[str, int], state: str | None = None) -> None:
        self.answers = list(answers)
        self.state = state
        self.asked = 0
        self.excluded: UUID | None = None

    async def batch_counts(self, _batch_id: UUID, *, exclude_job_id: UUID | None = None) -> dict[str, int]:
        self.asked += 1
        self.excluded = exclude_job_id
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def batch_state(self, _batch_id: UUID) -> str | None:
        return self.state


@pytest.mark.parametrize(
    ("counts", "state", "options", "outcome"),
    [
        ({"succeeded": 2, "failed": 1}, "complete", {}, BatchStatus(3, 0, 2, 1, 0, 0, 0)),
        ({"succeeded": 2, "failed": 1}, None, {}, BatchStatus(3, 0, 2, 1, 0, 0, 0)),
        ({"succeeded": 2}, "active", {"expect_at_least": 2}, BatchStatus(2, 0, 2, 0, 0, 0, 0)),
        ({"succeeded": 2}, "complete", {"expect_at_least": 3}, "holds 2 jobs, 3 were expected"),
        ({}, "active", {"expect_at_least": 1, "on_empty": "ok"}, "holds 0 jobs, 1 were expected"),
        ({}, None, {}, "holds no jobs"),
        ({}, None, {"on_empty": "ok"}, BatchStatus(0, 0, 0, 0, 0, 0, 0)),
        ({}, "active", {}, BatchStatus(0, 0, 0, 0, 0, 0, 0)),
        ({"pending": 1}, "active", {}, Snooze),
        ({"scheduled": 1, "succeeded": 9}, "active", {"expect_at_least": 3}, Snooze),
        ({"running": 1}, None, {"expect_at_least": 5}, Snooze),
        ({"running": 1, "failed": 3}, "aborted", {}, Snooze),
        ({"cancelled": 1, "failed": 3}, "aborted", {}, BatchAbortedError),
        ({"failed": 1}, "aborted", {"expect_at_least": 5}, BatchAbortedError),
    ],
)
async def test_what_waiting_for_a_batch_decides(
    counts: dict[str, int], state: str | None, options: dict[str, Any], outcome: Any
) -> None:
    reader = Counts(counts, state=state)
    if isinstance(outcome, BatchStatus):
        assert await wait_for_batch(reader, new_uuid(), **options) == outcome
    elif isinstance(outcome, str):
        with pytest.raises(EmptyBatchError, match=outcome):
            await wait_for_batch(reader, new_uuid(), **options)
    else:
        with pytest.raises(outcome):
            await wait_for_batch(reader, new_uuid(), **options)


async def test_a_job_of_the_batch_need_not_wait_for_itself(tq: TaskQ, finish: Finish) -> None:
    batch = await tq.enqueue_batch(items(2))
    await finish(batch.job_handles[0].job_id)
    with pytest.raises(Snooze):
        await wait_for_batch(tq, batch.batch_id)
    status = await wait_for_batch(tq, batch.batch_id, exclude_job_id=batch.job_handles[1].job_id)
    assert status == BatchStatus(1, 0, 1, 0, 0, 0, 0)


@pytest.mark.parametrize(("asked", "given"), [(10.0, 10.0), (0.0, 1.0), (2.5, 2.5)])
async def test_the_snooze_is_as_long_as_asked_and_at_least_a_second(asked: float, given: float) -> None:
    with pytest.raises(Snooze) as caught:
        await wait_for_batch(Counts({"pending": 1}), new_uuid(), snooze_interval=asked)
    assert caught.value.delay == given


async def test_outside_an_actor_it_polls_until_the_batch_is_done() -> None:
    counts = Counts({"pending": 1}, {"running": 1}, {"succeeded": 1})
    status = await wait_for_batch(counts, new_uuid(), snooze_interval=1, snooze_via_exception=False)
    assert status.succeeded == 1
    assert counts.asked == 3


async def test_polling_lasts_as_long_as_its_timeout_says() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"still has 1 jobs in flight after 0.3 s"):
        await wait_for_batch(
            Counts({"pending": 1}), new_uuid(), snooze_interval=10, snooze_via_exception=False, timeout=0.3
        )
    assert 0.3 <= time.monotonic() - started < 3


async def test_a_batch_that_ends_within_the_timeout_is_seen_though_the_interval_is_longer() -> None:
    counts = Counts({"pending": 1}, {"succeeded": 1})
    status = await wait_for_batch(counts, new_uuid(), snooze_interval=60, snooze_via_exception=False, timeout=0.1)
    assert status.is_complete


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"on_empty": "fail"}, "on_empty = 'fail' must be 'error' or 'ok'"),
        ({"timeout": 5}, "timeout bounds polling; it needs snooze_via_exception=False"),
    ],
)
async def test_a_bad_option_of_waiting_is_refused(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        await wait_for_batch(Counts({}), new_uuid(), **options)


async def test_a_client_can_wait_for_its_batch(tq: TaskQ, finish: Finish) -> None:
    batch = await tq.enqueue_batch(items(2))
    for handle in batch.job_handles:
        await finish(handle.job_id)
    status = await public_wait_for_batch(tq, batch.batch_id, snooze_via_exception=False, timeout=10)
    assert status == BatchStatus(2, 0, 2, 0, 0, 0, 0)
