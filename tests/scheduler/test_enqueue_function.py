"""``enqueue()`` for psql, triggers, pg_cron and other languages."""

from __future__ import annotations

import asyncio
import uuid

import asyncpg
import pytest

from taskqd import TaskQ
from taskqd.domain.errors import IdempotencyKeyActorMismatchError
from tests.apps import basic
from tests.jobs import JobTable
from tests.support import eventually


async def enqueue(jobs: JobTable, arguments: str, conn: asyncpg.Connection | None = None) -> uuid.UUID:
    job: uuid.UUID = await (conn or jobs.conn).fetchval(f'select "{jobs.schema}".enqueue({arguments})')
    return job


async def count(jobs: JobTable) -> int:
    return sum((await jobs.counts()).values())


async def test_a_job_of_an_actor_that_nobody_has_declared_yet_takes_the_defaults(jobs: JobTable) -> None:
    row = await jobs.row(await enqueue(jobs, "'succeed', '{\"key\": \"a\"}'"))
    assert (row["actor"], row["queue"], row["route"], row["status"]) == ("succeed", "default", "default", "pending")
    assert (row["max_attempts"], row["retry_kind"], row["retry_base"], row["priority"]) == (3, "transient", 5, 0)
    assert (row["attempt"], row["epoch"], row["lane"]) == (0, 0, "")
    assert row["id"].version == 7


async def test_ids_are_in_the_order_of_time(jobs: JobTable) -> None:
    ids = []
    for _ in range(5):
        ids.append(await enqueue(jobs, "'succeed', '{}'"))
        await jobs.conn.execute("select pg_sleep(0.002)")
    assert ids == sorted(ids)
    assert {job.variant for job in ids} == {uuid.RFC_4122}


async def test_the_actors_stored_configuration_is_used(jobs: JobTable) -> None:
    await jobs.store_actor(
        "mailer",
        queue="'mail'",
        max_attempts=7,
        retry_kind="'indefinite'",
        retry_base=2,
        retry_cap=9,
        retry_jitter=-1,
        time_budget="interval '1 hour'",
        priority=4,
    )
    row = await jobs.row(await enqueue(jobs, "'mailer', '{}'"))
    assert (row["queue"], row["route"], row["priority"], row["max_attempts"]) == ("mail", "mail", 4, 7)
    assert (row["retry_kind"], row["retry_backoff"], row["retry_base"], row["retry_cap"], row["retry_jitter"]) == (
        "indefinite",
        "fixed",
        2,
        9,
        -1,
    )
    assert 3599 < (row["schedule_to_close"] - row["now"]).total_seconds() <= 3600
    row = await jobs.row(await enqueue(jobs, "'mailer', '{}', queue => 'other', priority => 9::smallint"))
    assert (row["queue"], row["route"], row["priority"]) == ("other", "other", 9)


async def test_a_job_for_later_is_scheduled(jobs: JobTable) -> None:
    later = await jobs.row(await enqueue(jobs, "'a', '{}', scheduled_at => now() + interval '1 hour'"))
    assert later["status"] == "scheduled"
    past = await jobs.row(await enqueue(jobs, "'a', '{}', scheduled_at => now() - interval '1 hour'"))
    assert past["status"] == "pending"


async def test_a_key_makes_one_job(jobs: JobTable) -> None:
    first = await enqueue(jobs, "'a', '{}', idempotency_key => 'k'")
    assert await enqueue(jobs, "'a', '{\"other\": 1}', idempotency_key => 'k'") == first
    assert await enqueue(jobs, "'a', '{}', idempotency_key => 'k', idempotency_scope => 's'") != first
    assert await count(jobs) == 2


async def test_a_key_of_another_actor_is_refused_and_named(jobs: JobTable) -> None:
    await enqueue(jobs, "'a', '{}', idempotency_key => 'k'")
    with pytest.raises(asyncpg.UniqueViolationError, match="idempotency key k is held by a job of actor a"):
        await enqueue(jobs, "'b', '{}', idempotency_key => 'k'")
    assert await count(jobs) == 1


async def test_a_key_means_the_same_to_sql_and_to_python(jobs: JobTable, tq: TaskQ) -> None:
    first = await enqueue(jobs, "'succeed', '{}', idempotency_key => 'k'")
    handle = await tq.enqueue(basic.succeed, basic.Work(), idempotency_key="k")
    assert (handle.job_id, handle.was_existing) == (first, True)
    with pytest.raises(IdempotencyKeyActorMismatchError):
        await tq.enqueue(basic.fail, basic.Work(), idempotency_key="k")


async def test_an_uncommitted_holder_of_the_key_is_waited_for(jobs: JobTable, dsn: str) -> None:
    other = await asyncpg.connect(dsn)
    try:
        transaction = other.transaction()
        await transaction.start()
        first = await enqueue(jobs, "'a', '{}', idempotency_key => 'k'", other)
        waiting = asyncio.ensure_future(enqueue(jobs, "'a', '{}', idempotency_key => 'k'"))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        await transaction.commit()
        assert await asyncio.wait_for(waiting, 10) == first
    finally:
        await other.close()


async def test_it_is_part_of_the_callers_transaction(jobs: JobTable) -> None:
    transaction = jobs.conn.transaction()
    await transaction.start()
    await enqueue(jobs, "'a', '{}'")
    await transaction.rollback()
    assert await count(jobs) == 0


async def test_a_freed_key_may_be_used_again(jobs: JobTable) -> None:
    first = await enqueue(jobs, "'a', '{}', idempotency_key => 'k'")
    await jobs.update([first], status="'succeeded'", idempotency_freed="true")
    assert await enqueue(jobs, "'a', '{}', idempotency_key => 'k'") != first


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ("null, '{}'", asyncpg.NullValueNotAllowedError, "must not be null"),
        ("'a', null", asyncpg.NullValueNotAllowedError, "must not be null"),
        ("'a', '{}', idempotency_scope => null", asyncpg.NullValueNotAllowedError, "must not be null"),
        ("' ', '{}'", asyncpg.InvalidParameterValueError, "actor must not be empty"),
        ("'a', '{}', idempotency_key => ' '", asyncpg.InvalidParameterValueError, "idempotency_key must not be empty"),
        ("'a', '{}', idempotency_key => repeat('k', 1025)", asyncpg.InvalidParameterValueError, "1024 bytes"),
        ("'a', '{}', idempotency_scope => repeat('k', 1025)", asyncpg.InvalidParameterValueError, "1024 bytes"),
        ("'a', '{}', queue => ''", asyncpg.InvalidParameterValueError, "queue = "),
        ("'a', '{}', queue => 'no spaces'", asyncpg.InvalidParameterValueError, "queue = no spaces must be"),
        ("'a', '{}', scheduled_at => '0044-03-15 BC'", asyncpg.InvalidParameterValueError, "scheduled_at = "),
        ("'a', '{}', scheduled_at => 'infinity'", asyncpg.InvalidParameterValueError, "scheduled_at = infinity"),
    ],
)
async def test_bad_input_is_refused_with_one_clear_message(
    jobs: JobTable, arguments: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await enqueue(jobs, arguments)
    assert await count(jobs) == 0


async def test_tags_and_metadata_are_stored(jobs: JobTable) -> None:
    row = await jobs.row(await enqueue(jobs, "'a', '{}', metadata => '{\"by\": \"hand\"}', tags => array['x', 'y']"))
    assert (row["metadata"], row["tags"]) == ('{"by": "hand"}', ["x", "y"])


async def test_it_wakes_the_workers_when_the_caller_commits(jobs: JobTable, dsn: str) -> None:
    async with jobs.listening(dsn) as heard:
        async with jobs.conn.transaction():
            await enqueue(jobs, "'a', '{}'")
            await asyncio.sleep(0.05)
            assert not heard
        await eventually(lambda: heard)
