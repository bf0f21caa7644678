"""Idempotency keys: one key, one job, for as long as the key is held."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from taskqd import EnqueueItem, IdempotencyKeyActorMismatchError, JobStatus, TaskQ, new_uuid
from tests.client.actors import Number, Text, double, fail, text
from tests.client.conftest import Finish
from tests.support import eventually

Count = Callable[[], Awaitable[int]]


async def test_a_duplicate_answers_with_the_job_that_holds_the_key(tq: TaskQ, count: Count) -> None:
    first = await tq.enqueue(double, Number(n=1), idempotency_key="k")
    again = await tq.enqueue(double, Number(n=2), idempotency_key="k")
    assert again.job_id == first.job_id
    assert (first.was_existing, again.was_existing) == (False, True)
    assert (await again.row()).payload == {"n": 1}
    assert await count() == 1


@pytest.mark.parametrize("status", ["running", "succeeded", "failed", "cancelled"])
async def test_a_key_is_held_whatever_has_become_of_the_job(tq: TaskQ, finish: Finish, status: str) -> None:
    first = await tq.enqueue(double, Number(), idempotency_key="k")
    await finish(first.job_id, status)
    again = await tq.enqueue(double, Number(), idempotency_key="k")
    assert (again.job_id, again.was_existing) == (first.job_id, True)


async def test_a_scope_has_keys_of_its_own(tq: TaskQ, count: Count) -> None:
    handles = [
        await tq.enqueue(double, Number(), idempotency_key="k", idempotency_scope=scope)
        for scope in ("", "a", "b", "a", "")
    ]
    assert [handle.was_existing for handle in handles] == [False, False, False, True, True]
    assert handles[1].job_id == handles[3].job_id
    assert await count() == 3


async def test_two_scopes_do_not_run_into_each_other(tq: TaskQ) -> None:
    one = await tq.enqueue(double, Number(), idempotency_scope="a", idempotency_key="bc")
    other = await tq.enqueue(double, Number(), idempotency_scope="ab", idempotency_key="c")
    assert one.job_id != other.job_id


async def test_a_key_of_another_actor_is_an_error(tq: TaskQ, count: Count) -> None:
    await tq.enqueue(double, Number(), idempotency_key="k", idempotency_scope="s")
    with pytest.raises(IdempotencyKeyActorMismatchError) as caught:
        await tq.enqueue(fail, Number(), idempotency_key="k", idempotency_scope="s")
    assert str(caught.value) == (
        "idempotency key 'k' (scope 's') asked for actor 'fail' is held by a job of actor 'double'"
    )
    assert (caught.value.key, caught.value.scope) == ("k", "s")
    assert (caught.value.actor, caught.value.holder) == ("fail", "double")
    assert await count() == 1


async def test_a_batch_with_a_key_of_another_actor_stores_nothing(tq: TaskQ, count: Count) -> None:
    await tq.enqueue(double, Number(), idempotency_key="k")
    batch = new_uuid()
    items = [
        EnqueueItem(actor_ref=text, payload=Text(value=1)),
        EnqueueItem(actor_ref=text, payload=Text(value=2), idempotency_key="k"),
    ]
    with pytest.raises(IdempotencyKeyActorMismatchError):
        await tq.enqueue_batch(items, batch_id=batch)
    assert await count() == 1
    assert await tq.batch_counts(batch) == {}


async def test_the_callers_transaction_survives_a_refused_batch(
    tq: TaskQ, conn: asyncpg.Connection, count: Count
) -> None:
    await tq.enqueue(double, Number(), idempotency_key="k")
    async with conn.transaction():
        await tq.enqueue(text, Text(value=1), connection=conn)
        with pytest.raises(IdempotencyKeyActorMismatchError):
            await tq.enqueue_batch(
                [
                    EnqueueItem(actor_ref=text, payload=Text(value=2)),
                    EnqueueItem(actor_ref=text, payload=Text(value=3), idempotency_key="k"),
                ],
                connection=conn,
            )
    assert await count() == 2


async def test_a_key_given_twice_in_a_batch_is_one_job(tq: TaskQ, count: Count) -> None:
    items = [
        EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=key)
        for n, key in enumerate(["a", None, "b", "a", None, "b"])
    ]
    batch = await tq.enqueue_batch(items)
    handles = batch.job_handles
    assert [handle.was_existing for handle in handles] == [False, False, False, True, False, True]
    assert handles[0].job_id == handles[3].job_id
    assert handles[2].job_id == handles[5].job_id
    assert batch.size == 6
    assert await count() == 4
    assert (await handles[3].row()).payload == {"n": 0}


async def test_a_key_given_to_two_actors_in_a_batch_stores_nothing(tq: TaskQ, count: Count) -> None:
    with pytest.raises(IdempotencyKeyActorMismatchError, match="asked for actor 'fail'"):
        await tq.enqueue_batch(
            [
                EnqueueItem(actor_ref=double, payload=Number(), idempotency_key="k"),
                EnqueueItem(actor_ref=fail, payload=Number(), idempotency_key="k"),
            ]
        )
    assert await count() == 0


# -- unique while active ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["succeeded", "failed", "cancelled", "crashed", "abandoned"])
async def test_unique_while_active_frees_the_key_at_the_end(
    tq: TaskQ, finish: Finish, count: Count, status: str
) -> None:
    options: dict[str, Any] = {"idempotency_key": "k", "unique_while": "active"}
    first = await tq.enqueue(double, Number(), **options)
    assert (await tq.enqueue(double, Number(), **options)).was_existing
    await finish(first.job_id, status)
    second = await tq.enqueue(double, Number(), **options)
    assert (second.was_existing, second.job_id != first.job_id) == (False, True)
    assert await count() == 2


async def test_a_freed_key_may_go_to_another_actor(tq: TaskQ, finish: Finish) -> None:
    first = await tq.enqueue(double, Number(), idempotency_key="k", unique_while="active")
    await finish(first.job_id)
    assert not (await tq.enqueue(fail, Number(), idempotency_key="k")).was_existing


async def test_the_holder_decides_how_long_it_holds(tq: TaskQ, finish: Finish) -> None:
    first = await tq.enqueue(double, Number(), idempotency_key="k")
    await finish(first.job_id)
    assert (await tq.enqueue(double, Number(), idempotency_key="k", unique_while="active")).was_existing


# -- at the same time -------------------------------------------------------------------------------


async def test_one_key_from_many_connections_is_one_job(dsn: str, schema: str, count: Count) -> None:
    async with TaskQ(dsn=dsn, schema=schema, min_pool_size=12, max_pool_size=12) as tq:
        for key in range(10):
            handles = await asyncio.gather(
                *(tq.enqueue(double, Number(n=n), idempotency_key=f"k{key}") for n in range(12))
            )
            assert len({handle.job_id for handle in handles}) == 1
            assert sum(not handle.was_existing for handle in handles) == 1
    assert await count() == 10


async def test_a_duplicate_waits_for_the_transaction_that_holds_the_key(
    tq: TaskQ, dsn: str, schema: str, conn: asyncpg.Connection
) -> None:
    for commits in (True, False):
        key = f"k{commits}"
        transaction = conn.transaction()
        await transaction.start()
        first = await tq.enqueue(double, Number(), idempotency_key=key, connection=conn)
        second = asyncio.create_task(tq.enqueue(double, Number(), idempotency_key=key))
        await _somebody_waits(dsn)
        await (transaction.commit() if commits else transaction.rollback())
        handle = await asyncio.wait_for(second, 20)
        assert handle.was_existing is commits
        assert (handle.job_id == first.job_id) is commits
        assert await handle.status() is JobStatus.PENDING


async def test_batches_that_share_keys_in_opposite_order_do_not_deadlock(
    dsn: str, schema: str, conn: asyncpg.Connection, count: Count
) -> None:
    def batch(*keys: str) -> list[EnqueueItem]:
        return [EnqueueItem(actor_ref=double, payload=Number(), idempotency_key=key) for key in keys]

    async with TaskQ(dsn=dsn, schema=schema) as tq:
        transaction = conn.transaction()
        await transaction.start()
        await tq.enqueue(double, Number(), idempotency_key="m", connection=conn)
        both = [asyncio.create_task(tq.enqueue_batch(batch(*keys))) for keys in (("a", "m", "z"), ("z", "m", "a"))]
        await _somebody_waits(dsn, 2)
        await transaction.rollback()
        one, other = await asyncio.wait_for(asyncio.gather(*both), 20)
    assert {handle.job_id for handle in one.job_handles} == {handle.job_id for handle in other.job_handles}
    assert await count() == 3


async def test_a_batch_is_claimed_in_its_own_order_whatever_its_keys(
    tq: TaskQ, conn: asyncpg.Connection, schema: str
) -> None:
    keys = ["z", "b", None, "m", "a"]
    await tq.enqueue_batch(
        [EnqueueItem(actor_ref=double, payload=Number(n=n), idempotency_key=key) for n, key in enumerate(keys)]
    )
    rows = await conn.fetch(
        f"select payload->>'n' as n from \"{schema}\".jobs order by priority desc, scheduled_at, id"
    )
    assert [row["n"] for row in rows] == ["0", "1", "2", "3", "4"]


async def _somebody_waits(dsn: str, sessions: int = 1) -> None:
    observer = await asyncpg.connect(dsn, timeout=30)
    try:
        await eventually(
            lambda: observer.fetchval(
                "select count(*) >= $1 from pg_stat_activity where wait_event_type = 'Lock' and datname = 'postgres'",
                sessions,
            )
        )
    finally:
        await observer.close(timeout=10)


# -- what may be a key ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"idempotency_key": ""}, "idempotency_key = '' must be text that is not blank"),
        ({"idempotency_key": " \t\n"}, "must be text that is not blank"),
        ({"idempotency_key": "a\x00"}, "holds no NUL"),
        ({"idempotency_key": "\ud800"}, "is not valid Unicode"),
        ({"idempotency_key": 7}, "idempotency_key = 7 must be text"),
        ({"idempotency_key": "k" * 1025}, "idempotency_key is 1025 bytes, the limit is 1024"),
        ({"idempotency_key": "é" * 513}, "idempotency_key is 1026 bytes, the limit is 1024"),
        ({"idempotency_key": "k", "idempotency_scope": " "}, "idempotency_scope = ' ' must be text"),
        ({"idempotency_key": "k", "idempotency_scope": "s" * 1025}, "idempotency_scope is 1025 bytes"),
        ({"idempotency_key": "k", "idempotency_scope": None}, "idempotency_scope = None must be text"),
    ],
)
async def test_a_bad_key_is_refused(tq: TaskQ, count: Count, options: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        await tq.enqueue(double, Number(), **options)
    assert await count() == 0


async def test_a_key_and_a_scope_may_both_be_as_long_as_allowed(tq: TaskQ) -> None:
    options = {"idempotency_key": "é" * 512, "idempotency_scope": "s" * 1024}
    first = await tq.enqueue(double, Number(), **options)  # type: ignore[arg-type]
    assert (await tq.enqueue(double, Number(), **options)).job_id == first.job_id  # type: ignore[arg-type]


async def test_keys_differ_by_every_byte(tq: TaskQ, count: Count) -> None:
    keys = ["k", "K", "k ", " k", "k\n", "\uff4b", "é", "é"]
    for key in keys:
        await tq.enqueue(double, Number(), idempotency_key=key)
    assert await count() == len(set(keys))
