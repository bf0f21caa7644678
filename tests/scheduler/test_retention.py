"""Retention: what has been kept for its time moves to the archive, or goes; never anything else."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.maintenance.retention import CADENCE, MIN_BATCH, BatchSize, Retention, RetentionLoop
from taskqd.settings import load_settings
from tests.jobs import JobTable
from tests.support import eventually

DAY = 86400
ENDED = "clock_timestamp() - interval '{} days'"


def never() -> bool:
    return False


@pytest.fixture
def retention(jobs: JobTable, pool: Any) -> Retention:
    """With the default settings, but small batches."""
    return Retention(pool, jobs.schema, load_settings({"prune_batch_size": 50}, environ={}))


async def ended(jobs: JobTable, days: float, status: str = "succeeded", count: int = 1, **columns: Any) -> list[Any]:
    """Jobs that ended ``days`` ago."""
    return await jobs.plant(count, status=f"'{status}'", finished_at=ENDED.format(days), **columns)


async def archive(jobs: JobTable) -> dict[Any, asyncpg.Record]:
    """The archive, by id."""
    rows = await jobs.conn.fetch(f'select * from "{jobs.schema}".jobs_archive')
    return {row["id"]: row for row in rows}


async def test_each_status_is_kept_for_its_time(jobs: JobTable, retention: Retention) -> None:
    old, young = [], []
    for status, days in (("succeeded", 30), ("cancelled", 30), ("failed", 90), ("crashed", 90), ("abandoned", 90)):
        old += await ended(jobs, days + 0.1, status)
        young += await ended(jobs, days - 0.1, status)
    assert await retention.run(never)
    assert set(await archive(jobs)) == set(old)
    assert retention.archived == 5
    left = await jobs.conn.fetch(f'select id from "{jobs.schema}".jobs')
    assert {row["id"] for row in left} == set(young)


async def test_what_has_not_ended_stays(jobs: JobTable, retention: Retention) -> None:
    for status in ("pending", "scheduled", "running"):
        await jobs.plant(2, status=f"'{status}'", created_at=ENDED.format(999), scheduled_at=ENDED.format(999))
    before = await jobs.image()
    assert await retention.run(never)
    assert await jobs.image() == before


async def test_a_job_arrives_whole_with_its_attempts(jobs: JobTable, retention: Retention) -> None:
    (job,) = await ended(jobs, 31, payload="'{\"n\": 1}'", result="'2'", tags="array['a']", error_message="'told'")
    await jobs.conn.execute(
        f"insert into \"{jobs.schema}\".job_attempts (job_id, epoch, attempt, outcome) values ($1, 1, 1, 'retried')",
        job,
    )
    row = dict(await jobs.row(job))
    await retention.run(never)
    kept = dict((await archive(jobs))[job])
    assert {name: value for name, value in kept.items() if name in row} == {
        name: value for name, value in row.items() if name != "now"
    }
    assert 364.9 * DAY < (kept["expire_at"] - kept["archived_at"]).total_seconds() < 365.1 * DAY
    attempts = await jobs.conn.fetch(f'select epoch, outcome from "{jobs.schema}".job_attempts_archive')
    assert [tuple(one) for one in attempts] == [(1, "retried")]
    assert await jobs.attempts(job) == []


async def test_an_actors_own_time_counts_where_it_is_shorter(jobs: JobTable, retention: Retention) -> None:
    await jobs.store_actor("brief", retention="interval '1 day'")
    await jobs.store_actor("long", retention="interval '999 days'")
    (brief,) = await ended(jobs, 2, actor="'brief'")
    (long,) = await ended(jobs, 31, actor="'long'")
    await ended(jobs, 2)
    await retention.run(never)
    assert set(await archive(jobs)) == {brief, long}


async def test_jobs_of_a_batch_wait_for_its_end(
    jobs: JobTable, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskqd.maintenance.retention.CADENCE", 0.0)  # each round looks from the beginning
    batch = new_uuid()
    await jobs.conn.execute(f'insert into "{jobs.schema}".batches (id) values ($1)', batch)
    (job,) = await ended(jobs, 99, batch_id=f"'{batch}'")
    await retention.run(never)
    assert await archive(jobs) == {}
    await jobs.conn.execute(f"update \"{jobs.schema}\".batches set completed_at = now() - interval '99 days'")
    await retention.run(never)
    assert set(await archive(jobs)) == {job}
    assert await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".batches') == 0


async def test_a_backlog_is_moved_in_batches_and_a_round_that_is_broken_off_is_taken_up(
    jobs: JobTable, retention: Retention, pool: Any
) -> None:
    young = await ended(jobs, 50, "failed", 120)  # passed over: they are kept for longer
    old = await ended(jobs, 40, "succeeded", 300)
    looks = iter([False, False, False, True])
    assert not await retention.run(lambda: next(looks, True))
    moved = len(await archive(jobs))
    assert 0 < moved < 300
    cursor = await jobs.conn.fetchval(f"select cursor from \"{jobs.schema}\".maintenance where duty = 'archive'")
    assert json.loads(cursor)["id"]
    successor = Retention(pool, jobs.schema, load_settings({"prune_batch_size": 50}, environ={}))
    assert await successor.run(never)
    assert set(await archive(jobs)) == set(old)
    assert successor.archived == 300 - moved
    duty = await jobs.conn.fetchrow(f"select * from \"{jobs.schema}\".maintenance where duty = 'archive'")
    assert duty["cursor"] is None
    assert duty["last_finished_at"] >= duty["last_started_at"]
    assert (await jobs.counts())["failed"] == len(young)


async def test_a_row_that_somebody_holds_is_left_for_the_next_round(
    jobs: JobTable, retention: Retention, dsn: str
) -> None:
    held, free = await ended(jobs, 31, count=2)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', held)
            assert await retention.run(never)
        assert set(await archive(jobs)) == {free}
    finally:
        await other.close()
    await retention.run(never)
    assert set(await archive(jobs)) == {held, free}


async def test_two_at_once_move_each_job_once(jobs: JobTable, pool: Any) -> None:
    old = await ended(jobs, 31, count=600)
    both = [Retention(pool, jobs.schema, load_settings({"prune_batch_size": 50}, environ={})) for _ in range(2)]
    await asyncio.gather(*(one.run(never) for one in both))
    await both[0].run(never)
    assert set(await archive(jobs)) == set(old)
    assert sum(one.archived for one in both) == 600


async def test_the_archive_forgets_after_its_time(jobs: JobTable, retention: Retention) -> None:
    await ended(jobs, 31, count=120)
    await retention.run(never)
    some = list(await archive(jobs))[:70]
    await jobs.conn.execute(f'update "{jobs.schema}".jobs_archive set expire_at = now() where id = any($1)', some)
    assert await retention.run(never)
    assert len(await archive(jobs)) == 50
    assert retention.expired == 70


async def test_events_go_after_their_time_and_leave_a_mark(jobs: JobTable, retention: Retention) -> None:
    await jobs.conn.execute(
        f"""insert into "{jobs.schema}".job_events (job_id, occurred_at, kind)
            select gen_random_uuid(), now() - make_interval(days => 20 - n), 'x' from generate_series(1, 19) n"""
    )
    await retention.run(never)
    ids = await jobs.conn.fetch(f'select id from "{jobs.schema}".job_events order by id')
    assert [row["id"] for row in ids] == list(range(14, 20)), "those of the last seven days"
    cursor = await jobs.conn.fetchval(f"select cursor from \"{jobs.schema}\".maintenance where duty = 'events'")
    assert json.loads(cursor) == {"pruned_through_id": 13}
    await retention.run(never)
    assert json.loads(cursor) == {"pruned_through_id": 13}


async def test_events_may_be_kept_for_ever(jobs: JobTable, pool: Any) -> None:
    await jobs.conn.execute(
        f'insert into "{jobs.schema}".job_events (job_id, occurred_at, kind) '
        "select gen_random_uuid(), '2000-01-01', 'x'"
    )
    await Retention(pool, jobs.schema, load_settings({"event_retention_period": 0}, environ={})).run(never)
    assert await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".job_events') == 1


async def test_a_time_of_nothing_archives_at_once(jobs: JobTable, pool: Any) -> None:
    await ended(jobs, 0)
    await Retention(pool, jobs.schema, load_settings({"prune_retention_succeeded": 0}, environ={})).run(never)
    assert len(await archive(jobs)) == 1


async def test_a_batch_that_is_too_slow_is_undone_and_halved(
    jobs: JobTable, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something slows each deleted row down."""
    monkeypatch.setattr("taskqd.maintenance.retention.BATCH_TIMEOUT", 0.4)
    await jobs.conn.execute(
        f"""create function "{jobs.schema}".slow() returns trigger language plpgsql as
            $$ begin perform pg_sleep(0.003); return old; end $$"""
    )
    await jobs.conn.execute(
        f'create trigger slow before delete on "{jobs.schema}".jobs '
        f'for each row execute function "{jobs.schema}".slow()'
    )
    old = await ended(jobs, 31, count=200)
    retention = Retention(pool, jobs.schema, load_settings({"prune_batch_size": 200}, environ={}))
    until = time.monotonic() + 60
    while not await retention.run(never):
        assert time.monotonic() < until
    assert set(await archive(jobs)) == set(old)
    assert retention.batch.size < 200


def test_a_batch_grows_again_when_it_is_quick() -> None:
    batch = BatchSize(1000)
    for _ in range(20):
        batch.was_slow()
    assert batch.size == MIN_BATCH
    sizes = Counter[int]()
    for _ in range(100):
        batch.was_quick()
        sizes[batch.size] += 1
    assert batch.size == 1000
    assert len(sizes) > 3, "step by step"


async def test_it_keeps_up_with_what_ends(jobs: JobTable, pool: Any) -> None:
    """2,000 jobs end each second for some seconds. The loop looks once a minute until it finds much to do."""
    retention = Retention(pool, jobs.schema, load_settings({"prune_retention_succeeded": 0}, environ={}))
    for _ in range(10):
        retention.batch.was_slow()
    loop = RetentionLoop(retention, on_failure=lambda *_: None).loop
    loop.start()
    try:
        for _ in range(60):
            await ended(jobs, 0, count=100)
            await asyncio.sleep(0.05)
        await eventually(lambda: retention.archived == 6_000, CADENCE / 2, "all of them archived")
        assert retention.batch.size > 10 * MIN_BATCH
        assert await jobs.counts() == {}
    finally:
        await loop.stop()


async def test_rounds_come_often_while_there_is_much_to_do(jobs: JobTable, retention: Retention) -> None:
    rounds = RetentionLoop(retention, on_failure=lambda *_: None)
    assert [await rounds._step() for _ in range(8)] == [2, 4, 8, 16, 32, 60, 60, 60]
    await ended(jobs, 50, count=60)
    assert [await rounds._step() for _ in range(3)] == [1, 2, 4]


async def test_a_walk_goes_on_where_the_last_one_came_to_and_begins_anew_after_a_while(
    jobs: JobTable, retention: Retention, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = await ended(jobs, 50)
    await retention.run(never)
    (before,) = await ended(jobs, 60)
    (after,) = await ended(jobs, 40)
    await retention.run(never)
    assert set(await archive(jobs)) == {first, after}
    monkeypatch.setattr("taskqd.maintenance.retention.time.monotonic", lambda: time.monotonic_ns() / 1e9 + CADENCE)
    await retention.run(never)
    assert set(await archive(jobs)) == {first, before, after}


async def test_no_duty_starves_while_another_has_much_to_do(jobs: JobTable, retention: Retention) -> None:
    await ended(jobs, 50, count=200)
    await retention.run(never)
    await jobs.conn.execute(f'update "{jobs.schema}".jobs_archive set expire_at = now()')
    await ended(jobs, 50, count=200)
    await retention.run(never, slice_seconds=0.0)
    assert retention.expired == 50, "a batch"


async def test_the_batch_is_read_from_the_index_of_ends(jobs: JobTable, pool: Any) -> None:
    await jobs.conn.execute(
        f"""insert into "{jobs.schema}".jobs (id, queue, route, actor, payload, status, finished_at)
            select gen_random_uuid(), 'default', 'default', 'succeed', '{{}}', 'succeeded', now()
            from generate_series(1, 20000)"""
    )
    sql = Retention(pool, jobs.schema, load_settings(environ={}))._sql
    arguments = "2000, '-infinity', '00000000-0000-0000-0000-000000000000', 1, 1, 1, 1, 1"
    async with pool.acquire() as pinned:
        await pinned.execute(f"prepare probe as {sql.archive}")
        plan = "\n".join(row[0] for row in await pinned.fetch(f"explain execute probe({arguments})"))
        await pinned.execute("deallocate probe")
    assert "Index Scan using jobs_finished" in plan
    assert "Seq Scan on jobs" not in plan
