"""What enqueue lets in: singletons, actors with ``max_pending``, identities within ``unique_for``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskqd import (
    ActorDefinitionError,
    BatchMaxPendingExceededError,
    EnqueueItem,
    IdempotencyKeyActorMismatchError,
    JobStatus,
    MaxPendingExceededError,
    MaxPendingLockTimeoutError,
    SingletonCollisionError,
    TaskQ,
    UniqueForLockTimeoutError,
    actor,
)
from taskqd.client import admission as module
from tests.client.actors import Number, double
from tests.client.conftest import Finish

Count = Callable[[], Awaitable[int]]


@actor(name="alone", singleton=True)
async def alone(payload: Number) -> None: ...


@actor(name="few", max_pending=3)
async def few(payload: Number) -> None: ...


@actor(name="once", unique_for=timedelta(minutes=5))
async def once(payload: Number) -> None: ...


@actor(name="ever", unique_for=timedelta(minutes=5), unique_states=(*JobStatus,))
async def ever(payload: Number) -> None: ...


def item(ref: Any, n: int = 0, **options: Any) -> EnqueueItem:
    return EnqueueItem(actor_ref=ref, payload=Number(n=n), **options)


@pytest.fixture
def cap(conn: asyncpg.Connection, schema: str) -> Callable[[str, int | None], Awaitable[None]]:
    """Store the max_pending of an actor, as an operator does."""

    async def store(name: str, value: int | None) -> None:
        await conn.execute(
            f"""
            insert into "{schema}".actor_config (actor, queue, max_attempts, retry_kind, retry_backoff, retry_base,
                retry_cap, retry_jitter, max_pending)
            values ($1, 'default', 3, 'transient', 'fixed', 0, 0, 0, $2)
            on conflict (actor) do update set max_pending = excluded.max_pending
            """,
            name,
            value,
        )

    return store


@pytest.fixture
async def caller(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection of a service that enqueues in transactions of its own."""
    connection = await asyncpg.connect(dsn, timeout=30)
    try:
        yield connection
    finally:
        await connection.close(timeout=10)


# -- declaration ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"singleton": 2}, "singleton = 2 must be True or False"),
        ({"max_pending": -1}, "max_pending = -1 must be a whole number between 0 and"),
        ({"max_pending": True}, "max_pending = True must be a whole number"),
        ({"unique_for": 5}, "unique_for = 5 must be a timedelta above zero"),
        ({"unique_for": timedelta(0)}, "unique_for = .* must be a timedelta above zero"),
        ({"unique_states": (JobStatus.PENDING,)}, "unique_states needs unique_for"),
        ({"unique_for": timedelta(1), "unique_states": ()}, "unique_states = .* must be a tuple of JobStatus"),
        ({"unique_for": timedelta(1), "unique_states": ("gone",)}, "unique_states = .* must be a tuple of JobStatus"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_at_import(options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ActorDefinitionError, match=fix):

        @actor(**options)
        async def wrong(payload: Number) -> None: ...


def test_an_actor_tells_its_limits() -> None:
    assert (alone.singleton, alone.max_pending, alone.unique_for) == (True, None, None)
    assert (few.singleton, few.max_pending) == (False, 3)
    assert once.unique_for == timedelta(minutes=5)
    assert once.unique_states == (JobStatus.PENDING, JobStatus.SCHEDULED, JobStatus.RUNNING)


@pytest.mark.parametrize("key", ["", " ", "a\x00", "\ud800", 5, "x" * 1025])
@pytest.mark.parametrize("name", ["identity_key", "fairness_key"])
async def test_a_key_that_cannot_be_stored_is_refused(tq: TaskQ, count: Count, name: str, key: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} "):
        await tq.enqueue(double, Number(), **{name: key})
    assert await count() == 0


async def test_identity_and_fairness_are_stored(tq: TaskQ) -> None:
    row = await (await tq.enqueue(double, Number(), identity_key="i", fairness_key="f")).row()
    assert (row.identity_key, row.fairness_key) == ("i", "f")


# -- singleton --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["scheduled", "pending", "running"])
async def test_a_second_singleton_is_refused_while_the_first_has_not_ended(
    tq: TaskQ, conn: asyncpg.Connection, schema: str, finish: Finish, count: Count, status: str
) -> None:
    first = await tq.enqueue(alone, Number())
    await conn.execute(f"update \"{schema}\".jobs set status = '{status}'")
    with pytest.raises(SingletonCollisionError, match=r"'alone' is a singleton and its job .* has not ended") as caught:
        await tq.enqueue(alone, Number())
    assert (caught.value.actor, caught.value.blocking_job_id) == ("alone", first.job_id)
    assert caught.value.retry_after >= 1
    assert await count() == 1
    await finish(first.job_id, "failed")
    await tq.enqueue(alone, Number())


async def test_a_singleton_that_waits_for_its_time_says_when(tq: TaskQ) -> None:
    await tq.enqueue(alone, Number(), scheduled_at=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(SingletonCollisionError) as caught:
        await tq.enqueue(alone, Number())
    assert 3000 < caught.value.retry_after < 4000


async def test_metadata_makes_one_job_a_singleton(tq: TaskQ) -> None:
    await tq.enqueue(double, Number())
    await tq.enqueue(double, Number(), metadata={"singleton": True})
    await tq.enqueue(double, Number())
    with pytest.raises(SingletonCollisionError):
        await tq.enqueue(double, Number(), metadata={"singleton": True})


async def test_a_collision_takes_its_batch_back_and_leaves_the_callers_transaction(
    tq: TaskQ, caller: asyncpg.Connection, count: Count
) -> None:
    await tq.enqueue(alone, Number())
    async with caller.transaction():
        await tq.enqueue(double, Number(), connection=caller)
        with pytest.raises(SingletonCollisionError):
            await tq.enqueue_batch([item(double), item(alone)], connection=caller)
        with pytest.raises(SingletonCollisionError):
            await tq.enqueue(alone, Number(), connection=caller)
    assert await count() == 2
    with pytest.raises(SingletonCollisionError):
        await tq.enqueue_batch_fast([item(double), item(alone)])
    assert await count() == 2


async def test_an_ended_singleton_does_not_come_back_beside_another(
    tq: TaskQ, finish: Finish, caller: asyncpg.Connection
) -> None:
    first = await tq.enqueue(alone, Number())
    await finish(first.job_id, "failed")
    second = await tq.enqueue(alone, Number())
    async with caller.transaction():
        for connection in (None, caller):
            with pytest.raises(SingletonCollisionError) as caught:
                await tq.retry(first.job_id, connection=connection)
            assert caught.value.blocking_job_id == second.job_id
    await finish(second.job_id, "failed")
    await tq.retry(first.job_id)


async def test_the_holder_of_a_key_is_answered_before_a_singleton_collides(tq: TaskQ) -> None:
    first = await tq.enqueue(alone, Number(), idempotency_key="k")
    again = await tq.enqueue(alone, Number(), idempotency_key="k")
    assert (again.job_id, again.was_existing) == (first.job_id, True)


async def test_of_many_that_enqueue_a_singleton_at_once_one_succeeds(tq: TaskQ, count: Count) -> None:
    answers = await asyncio.gather(*(tq.enqueue(alone, Number()) for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(answer, SingletonCollisionError) for answer in answers) == 19
    assert await count() == 1


# -- max_pending ------------------------------------------------------------------------------------


async def test_an_actor_has_room_for_as_many_as_it_says(tq: TaskQ, finish: Finish, count: Count) -> None:
    handles = [await tq.enqueue(few, Number()) for _ in range(2)]
    handles.append(await tq.enqueue(few, Number(), scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
    with pytest.raises(MaxPendingExceededError, match="'few' has 3 queued jobs, its max_pending is 3") as caught:
        await tq.enqueue(few, Number())
    assert (caught.value.actor, caught.value.current_count, caught.value.max_pending) == ("few", 3, 3)
    await finish(handles[0].job_id, "running")
    await tq.enqueue(few, Number())
    with pytest.raises(MaxPendingExceededError):
        await tq.enqueue(few, Number())
    assert await count() == 4


async def test_the_stored_cap_wins_and_one_that_is_cleared_does_not(tq: TaskQ, cap: Any) -> None:
    await cap("few", 1)
    await tq.enqueue(few, Number())
    with pytest.raises(MaxPendingExceededError, match="its max_pending is 1"):
        await tq.enqueue(few, Number())
    await cap("few", None)
    await tq.enqueue(few, Number())
    await tq.enqueue(few, Number())
    with pytest.raises(MaxPendingExceededError, match="its max_pending is 3"):
        await tq.enqueue(few, Number())


async def test_an_operator_caps_an_actor_whose_code_does_not(tq: TaskQ, cap: Any, count: Count) -> None:
    await tq.enqueue(double, Number())
    await cap("double", 1)
    await tq.enqueue(double, Number())
    with pytest.raises(MaxPendingExceededError, match="its max_pending is 1"):
        await tq.enqueue(double, Number())
    await cap("double", 0)
    with pytest.raises(MaxPendingExceededError, match="its max_pending is 0"):
        await tq.enqueue(double, Number())
    await cap("double", None)
    await tq.enqueue(double, Number())
    assert await count() == 3


async def test_a_duplicate_is_answered_however_full_the_actor_is(tq: TaskQ, cap: Any) -> None:
    first = await tq.enqueue(few, Number(), idempotency_key="k")
    await cap("few", 0)
    again = await tq.enqueue(few, Number(), idempotency_key="k")
    assert (again.job_id, again.was_existing) == (first.job_id, True)
    with pytest.raises(IdempotencyKeyActorMismatchError):
        await tq.enqueue(double, Number(), idempotency_key="k")


async def test_a_batch_enqueues_what_there_is_room_for(tq: TaskQ, cap: Any, count: Count) -> None:
    await cap("double", 5)
    items = [item(few, 0), item(double, 1), item(few, 2), item(few, 3), item(double, 4), item(few, 5)]
    with pytest.raises(BatchMaxPendingExceededError, match=r"'few' has 0 queued jobs, .* is 3: 4 items") as caught:
        await tq.enqueue_batch(items)
    assert (caught.value.actor, caught.value.indices) == ("few", [0, 2, 3, 5])
    assert caught.value.refused == {"few": [0, 2, 3, 5]}
    assert [handle.actor.name for handle in caught.value.batch.job_handles] == ["double", "double"]
    assert await count() == 2
    again = await tq.enqueue_batch([items[index] for index in caught.value.indices[:3]])
    assert again.size == 3
    with pytest.raises(BatchMaxPendingExceededError) as caught:
        await tq.enqueue_batch([item(few)])
    assert caught.value.batch.size == 0


async def test_items_that_share_a_key_are_one_job(tq: TaskQ, cap: Any) -> None:
    await cap("few", 1)
    batch = await tq.enqueue_batch([item(few, n, idempotency_key="k") for n in range(4)])
    assert len({handle.job_id for handle in batch.job_handles}) == 1


async def test_a_fast_batch_enqueues_what_there_is_room_for(tq: TaskQ, count: Count) -> None:
    items = [item(few, n) for n in range(4)] + [item(double, n) for n in range(5)]
    with pytest.raises(BatchMaxPendingExceededError) as caught:
        await tq.enqueue_batch_fast(items)
    assert caught.value.refused == {"few": [0, 1, 2, 3]}
    assert await count() == 5
    assert await tq.enqueue_batch_fast(items[:3]) == 3
    with pytest.raises(MaxPendingExceededError, match="has 3 queued jobs"):
        await tq.enqueue(few, Number())


async def test_many_who_enqueue_at_once_do_not_exceed_the_cap(tq: TaskQ, cap: Any, count: Count) -> None:
    await cap("few", 7)
    answers = await asyncio.gather(
        *(tq.enqueue(few, Number()) for _ in range(15)),
        *(tq.enqueue_batch([item(few), item(few)]) for _ in range(5)),
        return_exceptions=True,
    )
    refused = (MaxPendingExceededError, BatchMaxPendingExceededError)
    assert all(isinstance(answer, refused) for answer in answers if isinstance(answer, BaseException)), answers
    assert 6 <= await count() <= 7


async def test_who_does_not_commit_keeps_others_waiting_for_so_long(
    tq: TaskQ, caller: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.2)
    async with caller.transaction():
        await tq.enqueue(few, Number(), connection=caller)
        with pytest.raises(MaxPendingLockTimeoutError, match=r"max_pending of 'few': somebody .* for 0.2 s"):
            await tq.enqueue(few, Number())
        assert await caller.fetchval("show lock_timeout") == "0", "the caller's own stays"
    await tq.enqueue(few, Number())
    assert await count() == 2


async def test_sql_heeds_the_stored_cap(conn: asyncpg.Connection, schema: str, cap: Any, count: Count) -> None:
    await cap("few", 1)
    first = await conn.fetchval(f"select \"{schema}\".enqueue('few', '{{}}', idempotency_key => 'k')")
    with pytest.raises(asyncpg.ConfigurationLimitExceededError, match="actor few has 1 queued jobs"):
        await conn.fetchval(f"select \"{schema}\".enqueue('few', '{{}}')")
    assert await conn.fetchval(f"select \"{schema}\".enqueue('few', '{{}}', idempotency_key => 'k')") == first
    assert await count() == 1


# -- unique_for -------------------------------------------------------------------------------------


async def test_within_the_window_one_job_for_each_identity_is_enough(
    tq: TaskQ, conn: asyncpg.Connection, schema: str, count: Count
) -> None:
    first = await tq.enqueue(once, Number(), identity_key="a")
    again = await tq.enqueue(once, Number(n=1), identity_key="a")
    other = await tq.enqueue(once, Number(), identity_key="b")
    assert (again.job_id, again.was_existing) == (first.job_id, True)
    assert not other.was_existing
    await conn.execute(f"update \"{schema}\".jobs set created_at = clock_timestamp() - interval '301 seconds'")
    late = await tq.enqueue(once, Number(), identity_key="a")
    assert not late.was_existing
    assert await count() == 3


async def test_an_end_reopens_the_window_unless_ended_jobs_are_enough_too(tq: TaskQ, finish: Finish) -> None:
    first = await tq.enqueue(once, Number(), identity_key="a")
    kept = await tq.enqueue(ever, Number(), identity_key="a")
    await finish(first.job_id, "succeeded")
    await finish(kept.job_id, "succeeded")
    assert not (await tq.enqueue(once, Number(), identity_key="a")).was_existing
    assert (await tq.enqueue(ever, Number(), identity_key="a")).job_id == kept.job_id


async def test_without_an_identity_nothing_is_compared_and_the_log_says_so_once(
    tq: TaskQ, count: Count, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await tq.enqueue(once, Number())
    assert await count() == 3
    assert caplog.text.count("actor_config_unique_for_ignored: a job of actor 'once' has no identity_key") == 1


async def test_an_actor_without_a_window_compares_nothing(tq: TaskQ, count: Count) -> None:
    for _ in range(2):
        await tq.enqueue(double, Number(), identity_key="a")
    assert await count() == 2


async def test_a_batch_answers_with_what_is_enough_stored_or_its_own(tq: TaskQ, count: Count) -> None:
    first = await tq.enqueue(once, Number(), identity_key="a")
    batch = await tq.enqueue_batch(
        [
            item(once, 0, identity_key="b"),
            item(once, 1, identity_key="a"),
            item(double, 2, identity_key="b"),
            item(once, 3, identity_key="b"),
            item(once, 4),
        ]
    )
    ids = [handle.job_id for handle in batch.job_handles]
    assert ids[1] == first.job_id
    assert ids[3] == ids[0]
    assert [handle.was_existing for handle in batch.job_handles] == [False, True, False, True, False]
    assert len(set(ids)) == 4
    assert await count() == 4


async def test_a_fast_batch_compares_nothing_and_says_so(tq: TaskQ, count: Count) -> None:
    with pytest.raises(ValueError, match="'once' has unique_for, which enqueue_batch_fast does not look for"):
        await tq.enqueue_batch_fast([item(double), item(once, identity_key="a")])
    assert await count() == 0
    assert await tq.enqueue_batch_fast([item(double, identity_key="a"), item(once)]) == 2


async def test_of_many_at_once_one_job_is_made(tq: TaskQ, count: Count) -> None:
    handles = await asyncio.gather(*(tq.enqueue(once, Number(n=n), identity_key="a") for n in range(20)))
    assert len({handle.job_id for handle in handles}) == 1
    assert sum(not handle.was_existing for handle in handles) == 1
    assert await count() == 1


async def test_who_does_not_commit_keeps_the_identity(
    tq: TaskQ, caller: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, count: Count
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT", 0.2)
    async with caller.transaction():
        await tq.enqueue(once, Number(), identity_key="a", connection=caller)
        await tq.enqueue(once, Number(), identity_key="b")
        with pytest.raises(UniqueForLockTimeoutError, match=r"identity_key of 'once': somebody .* for 0.2 s"):
            await tq.enqueue(once, Number(), identity_key="a")
    assert (await tq.enqueue(once, Number(), identity_key="a")).was_existing
    assert await count() == 2
