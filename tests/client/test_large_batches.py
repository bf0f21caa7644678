"""Many jobs at once: by COPY, all or none, and as a stream of chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskqd import (
    BatchMaxPendingExceededError,
    DuplicateIdempotencyKeyError,
    EnqueueItem,
    IdempotencyKeyActorMismatchError,
    PayloadNotStorableError,
    PayloadValidationError,
    TaskQ,
    new_uuid,
)
from taskqd.client import copying as module
from tests.client.actors import Number, Text, double, fail, patient, text
from tests.client.conftest import Wakes
from tests.client.test_admission import few
from tests.support import eventually

Count = Callable[[], Awaitable[int]]

SAMPLES = [
    "",
    "a\tb\nc\rd\\e\\\\n\\N\\.",
    '"quoted" \u2028 ünïcödé 🙂 %s %d 100%',
    [1, 2.5, None, True, {"deep": ["\\"]}],
    "x" * 70_000,
]


def items(number: int, **options: Any) -> list[EnqueueItem]:
    return [EnqueueItem(actor_ref=double, payload=Number(n=n), **options) for n in range(number)]


# -- COPY -------------------------------------------------------------------------------------------


async def test_a_copied_job_is_the_row_that_enqueue_makes(tq: TaskQ, conn: asyncpg.Connection, schema: str) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    differing = [
        EnqueueItem(actor_ref=double, payload=Number(n=1)),
        EnqueueItem(actor_ref=patient, payload=Number(n=2), queue="slow", priority=-9, scheduled_at=later),
        EnqueueItem(actor_ref=fail, payload=Number(), start_to_close=timedelta(seconds=2.5), tags=["null", "ü-1"]),
        EnqueueItem(
            actor_ref=double,
            payload=Number(),
            heartbeat_timeout=timedelta(seconds=40),
            schedule_to_close=timedelta(minutes=3),
            metadata={"a\\\t\n": "%s\\", "singleton": True},
        ),
        EnqueueItem(
            actor_ref=double,
            payload=Number(),
            idempotency_key="k\\\t%",
            idempotency_scope="s\n",
            unique_while="active",
            identity_key="i\\",
            fairness_key="f\r",
        ),
        *(EnqueueItem(actor_ref=text, payload=Text(value=value)) for value in SAMPLES),
    ]
    columns = """
        actor, queue, route, lane, status::text, priority, attempt, epoch, max_attempts, retry_kind, retry_backoff,
        retry_base, retry_cap, retry_jitter, idempotency_scope, idempotency_key, unique_while_active, identity_key,
        fairness_key, singleton, capped, payload::text, metadata::text, tags, start_to_close, heartbeat_timeout,
        date_trunc('minute', schedule_to_close - created_at + interval '1 second') as closes,
        case when status = 'scheduled' then scheduled_at end as due, scheduled_at <= clock_timestamp() as is_due
    """
    read = f'select {columns} from "{schema}".jobs where batch_id = $1 order by id'
    usual = await tq.enqueue_batch(differing)
    expected = await conn.fetch(read, usual.batch_id)
    await conn.execute(f'delete from "{schema}".jobs')
    batch = new_uuid()
    assert await tq.enqueue_batch_fast(differing, batch_id=batch) == len(differing)
    copied = await conn.fetch(read, batch)
    assert [dict(row) for row in copied] == [dict(row) for row in expected]
    assert [json.loads(row["payload"]) for row in copied[5:]] == [{"value": value} for value in SAMPLES]

    alike = new_uuid()
    await tq.enqueue_batch_fast([EnqueueItem(actor_ref=text, payload=Text(value=SAMPLES[2]))] * 3, batch_id=alike)
    assert [json.loads(row["payload"])["value"] for row in await conn.fetch(read, alike)] == [SAMPLES[2]] * 3


async def test_fifty_thousand_jobs_keep_their_order(tq: TaskQ, conn: asyncpg.Connection, schema: str) -> None:
    assert await tq.enqueue_batch_fast(items(50_000)) == 50_000
    rows = await conn.fetch(
        f"select (payload->>'n')::int as n from \"{schema}\".jobs order by priority desc, scheduled_at, id"
    )
    assert [row["n"] for row in rows] == list(range(50_000))
    (summary,) = await tq.list_batches()
    assert (summary.status, summary.total, summary.queue) == ("active", 50_000, "numbers")


@pytest.mark.parametrize("number", [0, 50_001])
async def test_a_fast_batch_takes_one_to_fifty_thousand_items(tq: TaskQ, number: int) -> None:
    with pytest.raises(ValueError, match=f"a fast batch takes 1 to 50000 items, not {number}"):
        await tq.enqueue_batch_fast([items(1)[0]] * number)


async def test_the_payloads_of_a_fast_batch_are_bounded_together(
    tq: TaskQ, count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAST_SIZE", 100)
    with pytest.raises(PayloadNotStorableError, match="payloads of the batch are 150 characters, the limit is 100"):
        await tq.enqueue_batch_fast(items(20))
    assert await count() == 0


async def test_one_bad_payload_refuses_the_whole_fast_batch(tq: TaskQ, count: Count) -> None:
    bad = EnqueueItem(actor_ref=double, payload={"n": "x"})
    with pytest.raises(PayloadValidationError, match="payload of actor 'double' is invalid: n: "):
        await tq.enqueue_batch_fast([*items(2000), bad])
    assert await count() == 0


async def test_a_key_that_is_there_twice_refuses_the_whole_fast_batch(tq: TaskQ, count: Count) -> None:
    twice = items(1, idempotency_key="k", idempotency_scope="s")
    with pytest.raises(
        DuplicateIdempotencyKeyError, match=r"key 'k' \(scope 's'\) is given twice; nothing was enqueued"
    ):
        await tq.enqueue_batch_fast([*items(3), *twice, *twice])
    assert await count() == 0
    await tq.enqueue_batch_fast([*twice, *items(1, idempotency_key="k")])


async def test_a_key_that_a_stored_job_holds_refuses_the_whole_fast_batch(tq: TaskQ, count: Count) -> None:
    held = await tq.enqueue(double, Number(), idempotency_key="k")
    batch = new_uuid()
    with pytest.raises(DuplicateIdempotencyKeyError, match=f"key 'k' .* is held by job {held.job_id}") as caught:
        await tq.enqueue_batch_fast([*items(3), *items(1, idempotency_key="k")], batch_id=batch)
    assert (caught.value.key, caught.value.scope, caught.value.holder) == ("k", "", held.job_id)
    with pytest.raises(IdempotencyKeyActorMismatchError, match="asked for actor 'fail' is held by a job of actor"):
        await tq.enqueue_batch_fast([EnqueueItem(actor_ref=fail, payload=Number(), idempotency_key="k")])
    assert await count() == 1
    assert await tq.batch_state(batch) is None


async def test_a_refused_copy_leaves_the_callers_transaction(
    tq: TaskQ, conn: asyncpg.Connection, count: Count, wakes: Wakes
) -> None:
    async with conn.transaction():
        await tq.enqueue_batch_fast(items(2, batch_id=new_uuid()), connection=conn)
        await tq.enqueue_batch_fast(items(1, idempotency_key="k"), connection=conn)
        with pytest.raises(DuplicateIdempotencyKeyError):
            await tq.enqueue_batch_fast([*items(2), *items(1, idempotency_key="k")], connection=conn)
        assert wakes.seen == 0
    assert await count() == 3
    await eventually(lambda: wakes.seen == 1)


async def test_two_copies_that_share_keys_never_deadlock(tq: TaskQ, count: Count) -> None:
    keyed = [EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=f"{n}") for n in range(300)]
    for _ in range(3):
        answers = await asyncio.gather(
            tq.enqueue_batch_fast(keyed),
            tq.enqueue_batch_fast(keyed[::-1]),
            tq.enqueue_batch_fast(keyed[150:] + keyed[:150]),
            return_exceptions=True,
        )
        assert {type(answer) for answer in answers} <= {int, DuplicateIdempotencyKeyError}, answers
    assert await count() == 300


async def test_codecs_of_the_callers_connection_do_not_change_what_is_stored(tq: TaskQ, dsn: str) -> None:
    caller = await asyncpg.connect(dsn, timeout=30)
    try:
        await caller.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
        batch = new_uuid()
        await tq.enqueue_batch_fast(items(2), batch_id=batch, connection=caller)
    finally:
        await caller.close(timeout=10)
    assert [row.payload for row in await tq.batch_jobs(batch)] == [{"n": 0}, {"n": 1}]


# -- streams ----------------------------------------------------------------------------------------


async def test_a_stream_is_as_long_as_it_is(tq: TaskQ, count: Count) -> None:
    def generate() -> Iterator[EnqueueItem]:
        yield from items(2500)

    batch = await tq.enqueue_batch_streaming(generate())
    assert (batch.size, batch.job_handles) == (2500, [])
    assert (await batch.status()).pending == 2500

    async def generate_slowly() -> AsyncIterator[EnqueueItem]:
        for one in items(25):
            await asyncio.sleep(0)
            yield one

    again = await tq.enqueue_batch_streaming(generate_slowly(), batch_id=batch.batch_id, chunk_size=7)
    assert again.size == 25
    assert await count() == 2525
    assert (await again.status()).total == 2525


async def test_what_was_streamed_before_an_error_stays(tq: TaskQ, count: Count) -> None:
    keyed = [EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=f"{n}") for n in range(25)]
    bad = EnqueueItem(actor_ref=double, payload={"n": "x"})
    batch = new_uuid()
    with pytest.raises(PayloadValidationError) as caught:
        await tq.enqueue_batch_streaming([*keyed, bad], batch_id=batch, chunk_size=10)
    assert caught.value.__notes__ == [
        f"batch {batch}: the 20 items before these stay enqueued; indices count from there"
    ]
    assert await count() == 20
    whole = await tq.enqueue_batch_streaming(keyed, batch_id=batch, chunk_size=10)
    assert whole.size == 25
    assert (await whole.status()).total == 25


async def test_a_stream_ends_where_an_actor_has_no_room(tq: TaskQ, count: Count) -> None:
    full = [EnqueueItem(actor_ref=few, payload=Number(n=n)) for n in range(4)]
    with pytest.raises(BatchMaxPendingExceededError) as caught:
        await tq.enqueue_batch_streaming([*items(10), *items(6), *full, *items(10)], chunk_size=10)
    assert caught.value.indices == [6, 7, 8, 9]
    assert await count() == 16


async def test_a_stream_is_part_of_the_callers_transaction(tq: TaskQ, dsn: str, count: Count) -> None:
    caller = await asyncpg.connect(dsn, timeout=30)
    try:
        transaction = caller.transaction()
        await transaction.start()
        await tq.enqueue_batch_streaming(items(25), connection=caller, chunk_size=10)
        assert await count() == 0
        await transaction.rollback()
        assert await count() == 0
    finally:
        await caller.close(timeout=10)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"chunk_size": 0}, "chunk_size = 0 must be a whole number between 1 and 1000"),
        ({"chunk_size": 1001}, "chunk_size = 1001 must be"),
        ({}, "items held none; a batch takes at least one item"),
    ],
)
async def test_a_stream_of_nothing_or_in_bad_chunks_is_refused(tq: TaskQ, options: Any, fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        await tq.enqueue_batch_streaming([], **options)
