"""One job: what is stored of it, on whose transaction, and which options are refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from taskqd import JobStatus, PayloadNotStorableError, PayloadValidationError, TaskQ, new_uuid
from taskqd.domain.ids import new_uuid as new_id
from tests.client.actors import Number, Text, double, patient, text
from tests.client.conftest import Wakes
from tests.support import eventually

Count = Callable[[], Awaitable[int]]


async def test_a_job_is_stored_as_its_actor_declares(tq: TaskQ) -> None:
    handle = await tq.enqueue(double, Number(n=21))
    row = await handle.row()
    assert not handle.was_existing
    assert handle.job_id.version == 7
    assert (row.actor, row.queue, row.route, row.priority) == ("double", "numbers", "numbers", 3)
    assert (row.status, row.attempt, row.epoch) == (JobStatus.PENDING, 0, 0)
    assert row.payload == {"n": 21}
    assert (row.result, row.metadata, row.tags, row.batch_id, row.schedule_to_close) == (None, None, None, None, None)
    assert not row.is_terminal
    assert await tq.get(handle.job_id) == row


async def test_an_enqueue_may_override_what_the_actor_declares(
    tq: TaskQ, conn: asyncpg.Connection, schema: str
) -> None:
    batch = new_uuid()
    handle = await tq.enqueue(
        double,
        {"n": 1},
        queue="other.queue",
        priority=-7,
        start_to_close=timedelta(seconds=90),
        schedule_to_close=timedelta(hours=2),
        heartbeat_timeout=timedelta(seconds=25),
        batch_id=batch,
        metadata={"who": "me", "deep": {"n": [1, None]}},
        tags=["a", "b-c", "ä_1"],
    )
    row = await handle.row()
    assert (row.queue, row.route, row.priority, row.batch_id) == ("other.queue", "other.queue", -7, batch)
    assert row.metadata == {"who": "me", "deep": {"n": [1, None]}}
    assert row.tags == ["a", "b-c", "ä_1"]
    stored = await conn.fetchrow(f'select * from "{schema}".jobs where id = $1', handle.job_id)
    assert stored is not None
    assert (stored["start_to_close"], stored["heartbeat_timeout"]) == (timedelta(seconds=90), timedelta(seconds=25))
    assert abs(stored["schedule_to_close"] - stored["created_at"] - timedelta(hours=2)) < timedelta(seconds=10)


async def test_the_retry_curve_is_stamped_on_the_job(tq: TaskQ, conn: asyncpg.Connection, schema: str) -> None:
    handle = await tq.enqueue(patient, Number())
    row = await conn.fetchrow(
        f"""select max_attempts, retry_kind, retry_backoff, retry_base, retry_cap, retry_jitter,
            schedule_to_close - created_at as budget from "{schema}".jobs where id = $1""",
        handle.job_id,
    )
    budget = row["budget"]
    assert tuple(row)[:-1] == (9, "indefinite", "linear", 2.0, 86_400.0, -1.0)  # the cap is bounded by a day
    assert timedelta(hours=1, minutes=59) < budget <= timedelta(hours=2)


@pytest.mark.parametrize("value", ["\\u0000", "日本 \U0001f600", "", "' or 1=1 --", "{schema}", "a,b", "\x01\x7f"])
async def test_text_is_stored_as_it_is(tq: TaskQ, value: str) -> None:
    handle = await tq.enqueue(text, Text(value=value), metadata={"value": value})
    row = await handle.row()
    assert row.payload == {"value": value}
    assert row.metadata == {"value": value}


async def test_ids_of_one_process_are_in_the_order_they_were_made() -> None:
    ids = [new_id() for _ in range(5000)]
    assert ids == sorted(ids)


# -- time -------------------------------------------------------------------------------------------


async def test_a_future_job_is_scheduled_and_a_past_one_pending(tq: TaskQ) -> None:
    when = datetime.now(UTC) + timedelta(hours=1)
    future = await tq.enqueue(double, Number(), scheduled_at=when)
    past = await tq.enqueue(double, Number(), scheduled_at=when - timedelta(hours=2))
    assert await future.status() is JobStatus.SCHEDULED
    assert await past.status() is JobStatus.PENDING
    assert (await future.row()).scheduled_at == when


async def test_any_time_zone_will_do(tq: TaskQ) -> None:
    when = datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=-5)))
    row = await (await tq.enqueue(double, Number(), scheduled_at=when)).row()
    assert row.scheduled_at == when
    assert row.scheduled_at.utcoffset() == timedelta(0)


async def test_the_database_decides_when_now_is(tq: TaskQ, conn: asyncpg.Connection) -> None:
    before = await conn.fetchval("select clock_timestamp()")
    row = await (await tq.enqueue(double, Number())).row()
    assert before <= row.scheduled_at <= await conn.fetchval("select clock_timestamp()")


# -- whose transaction ------------------------------------------------------------------------------


async def test_a_rollback_of_the_caller_takes_the_job_back(
    tq: TaskQ, conn: asyncpg.Connection, count: Count, wakes: Wakes
) -> None:
    transaction = conn.transaction()
    await transaction.start()
    handle = await tq.enqueue(double, Number(), connection=conn)
    await transaction.rollback()

    assert await tq.get(handle.job_id) is None
    assert await count() == 0
    await conn.execute("select 1")
    assert wakes.seen == 0


async def test_a_commit_of_the_caller_brings_job_and_wake_up_together(
    tq: TaskQ, dsn: str, conn: asyncpg.Connection, wakes: Wakes
) -> None:
    caller = await asyncpg.connect(dsn, timeout=30)
    try:
        async with caller.transaction():
            handle = await tq.enqueue(double, Number(n=5), connection=caller)
            assert await tq.get(handle.job_id) is None  # nobody else sees it yet
            await conn.execute("select 1")
            assert wakes.seen == 0
        assert await handle.status() is JobStatus.PENDING
        await eventually(lambda: wakes.seen == 1)
    finally:
        await caller.close(timeout=10)


async def test_a_connection_without_a_transaction_commits_at_once(
    tq: TaskQ, conn: asyncpg.Connection, wakes: Wakes
) -> None:
    handle = await tq.enqueue(double, Number(), connection=conn)
    assert await handle.status() is JobStatus.PENDING
    await eventually(lambda: wakes.seen == 1)


async def test_the_callers_codecs_do_not_matter(tq: TaskQ, conn: asyncpg.Connection) -> None:
    for kind in ("json", "jsonb"):
        await conn.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    handle = await tq.enqueue(double, Number(n=8), connection=conn, metadata={"a": 1})
    assert (await handle.row()).payload == {"n": 8}


async def test_a_connection_of_the_callers_pool_will_do(tq: TaskQ, dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        async with pool.acquire() as own, own.transaction():
            handle = await tq.enqueue(double, Number(), connection=own)
        assert await handle.status() is JobStatus.PENDING


async def test_what_sql_stores_and_python_cannot_hold_is_still_read(
    tq: TaskQ, conn: asyncpg.Connection, schema: str
) -> None:
    handle = await tq.enqueue(double, Number())
    store = f'update "{schema}".jobs set payload = $2::text::jsonb where id = $1'
    await conn.execute(store, handle.job_id, '{"n": 1' + "0" * 5000 + "}")
    assert (await handle.row()).payload == {"n": Decimal("1e5000")}
    deep = "[" * 3000 + "]" * 3000
    await conn.execute(store, handle.job_id, deep)
    assert json.dumps((await handle.row()).payload) in (deep, json.dumps(deep))  # some versions of Python do hold it


# -- what is refused, before anything is stored -----------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("options", "error", "fix"),
    [
        ({"scheduled_at": datetime(2026, 1, 1)}, ValueError, r"has no time zone; use datetime.now\(UTC\)"),
        (
            {"scheduled_at": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
            ValueError,
            "must be between the years 1 and 9999 in UTC",
        ),
        ({"batch_id": "7"}, TypeError, "batch_id = '7' must be a UUID"),
        ({"scheduled_at": date(2026, 1, 1)}, TypeError, "must be a datetime with a time zone"),
        ({"scheduled_at": "2026-01-01"}, TypeError, "scheduled_at = '2026-01-01' must be a datetime"),
        ({"priority": 32768}, ValueError, "priority = 32768 must be a whole number between -32768 and 32767"),
        ({"priority": -32769}, ValueError, "between -32768 and 32767"),
        ({"priority": 1.5}, ValueError, "priority = 1.5 must be a whole number"),
        ({"priority": "9"}, ValueError, "priority = '9' must be a whole number"),
        ({"queue": "a b"}, ValueError, "queue = 'a b' must be 1 to 200 letters"),
        ({"queue": ""}, ValueError, "queue = '' must be"),
        ({"queue": "q" * 201}, ValueError, "must be 1 to 200 letters"),
        ({"queue": 5}, ValueError, "queue = 5 must be"),
        ({"start_to_close": timedelta(0)}, ValueError, "start_to_close = .* above zero, up to 365 days"),
        ({"start_to_close": 30}, ValueError, "start_to_close = 30 must be a timedelta"),
        ({"schedule_to_close": timedelta(0)}, ValueError, "schedule_to_close = .* above zero, up to 365 days"),
        ({"schedule_to_close": timedelta(days=366)}, ValueError, "schedule_to_close = .* up to 365 days"),
        (
            {"heartbeat_timeout": timedelta(seconds=19)},
            ValueError,
            "heartbeat_timeout = .* at least 20 s, two TASKQ_HEA",
        ),
        ({"heartbeat_timeout": timedelta(seconds=60)}, ValueError, "and below 60 s, TASKQ_LOCK_LEASE"),
        ({"heartbeat_timeout": 30}, ValueError, "heartbeat_timeout = 30 must be a timedelta"),
        ({"unique_while": "forever"}, ValueError, "unique_while = 'forever' must be 'stored' or 'active'"),
        ({"unique_while": "active"}, ValueError, "need an idempotency_key"),
        ({"idempotency_scope": "s"}, ValueError, "need an idempotency_key"),
        ({"tags": "urgent"}, TypeError, "tags = 'urgent' must be a list or a tuple of words"),
        ({"tags": ["a,b"]}, ValueError, "tag 'a,b' must be letters, digits, '_' and inner '-'"),
        ({"tags": ["-a"]}, ValueError, "tag '-a' must be"),
        ({"tags": ["a-"]}, ValueError, "tag 'a-' must be"),
        ({"tags": [""]}, ValueError, "tag '' must be"),
        ({"tags": ["a\n"]}, ValueError, "must be letters"),
        ({"tags": [7]}, ValueError, "tag 7 must be"),
        ({"tags": ["x" * 101]}, ValueError, "at most 100 characters"),
        ({"tags": ["x"] * 51}, ValueError, "51 tags given, the limit is 50"),
        ({"metadata": {"a": "\x00"}}, PayloadNotStorableError, "metadata holds a NUL or a lone surrogate"),
        ({"metadata": {"a\x00": 1}}, PayloadNotStorableError, "metadata holds a NUL"),
        ({"metadata": {"a": "\ud800"}}, PayloadNotStorableError, "lone surrogate"),
        ({"metadata": {"a": float("nan")}}, PayloadNotStorableError, "metadata does not encode as JSON"),
        ({"metadata": {"a": object()}}, PayloadNotStorableError, "metadata does not encode as JSON"),
        ({"metadata": nested(100_000)}, PayloadNotStorableError, "metadata is nested too deeply"),
        ({"metadata": 7}, PayloadNotStorableError, "metadata does not encode as JSON"),
        ({"metadata": {"a": "x" * 65_536}}, PayloadNotStorableError, "bytes, the limit is 65536"),
    ],
)
async def test_a_bad_option_is_refused_with_its_range(
    tq: TaskQ, count: Count, options: dict[str, Any], error: type[Exception], fix: str
) -> None:
    with pytest.raises(error, match=fix):
        await tq.enqueue(double, Number(), **options)
    assert await count() == 0


async def test_limits_themselves_are_allowed(tq: TaskQ) -> None:
    handle = await tq.enqueue(
        double,
        Number(),
        priority=32767,
        queue="q" * 200,
        tags=["x" * 100] * 50,
        metadata={"a": "x" * 65_527},
        start_to_close=timedelta(days=365),
        schedule_to_close=timedelta(days=365),
        heartbeat_timeout=timedelta(seconds=20),
    )
    row = await handle.row()
    assert (row.priority, len(row.queue), len(row.tags or [])) == (32767, 200, 50)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ({"n": "many"}, PayloadValidationError),
        ({"m": None, "n": []}, PayloadValidationError),
        (None, PayloadValidationError),
    ],
)
async def test_a_payload_that_does_not_fit_is_not_stored(
    tq: TaskQ, count: Count, payload: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="payload of actor 'double' is invalid: "):
        await tq.enqueue(double, payload)
    assert await count() == 0


@pytest.mark.parametrize("value", ["\x00", "\ud800", float("inf")])
async def test_a_payload_that_postgres_cannot_keep_is_not_stored(tq: TaskQ, count: Count, value: Any) -> None:
    with pytest.raises(PayloadNotStorableError, match="payload of actor 'text'"):
        await tq.enqueue(text, Text(value=value))
    assert await count() == 0


async def test_an_undecorated_function_is_explained(tq: TaskQ) -> None:
    async def plain(payload: Number) -> None: ...

    with pytest.raises(TypeError, match="is not an actor; decorate the function with @actor"):
        await tq.enqueue(plain, Number())  # type: ignore[arg-type]


async def test_a_refused_job_leaves_the_callers_transaction_usable(
    tq: TaskQ, conn: asyncpg.Connection, count: Count
) -> None:
    async with conn.transaction():
        with pytest.raises(PayloadNotStorableError):
            await tq.enqueue(text, Text(value="\x00"), connection=conn)
        await tq.enqueue(text, Text(value="fine"), connection=conn)
    assert await count() == 1


async def test_an_unknown_job_is_none(tq: TaskQ) -> None:
    assert await tq.get(UUID(int=7)) is None
    assert await tq.get(uuid4()) is None
