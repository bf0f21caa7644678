"""Giving back what dead workers held: at once, fenced, and whatever a late claim of theirs does."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.storage.release import release_workers
from taskqd.storage.statements import load
from tests.jobs import JobTable


async def release(jobs: JobTable, *workers: object) -> int:
    return await release_workers(jobs.conn, jobs.schema, list(workers), timeout=10)  # type: ignore[arg-type]


async def test_the_rows_of_a_dead_worker_come_back_as_crashes_on_their_own_curve(jobs: JobTable) -> None:
    dead = await jobs.register()
    (at_once,) = await jobs.running(dead, retry_base="0")
    (waits,) = await jobs.running(dead, retry_base="30", retry_jitter="0")
    (last,) = await jobs.running(dead, max_attempts="1")
    assert await release(jobs, dead) == 3
    assert [(await jobs.row(job))["status"] for job in (at_once, waits, last)] == ["pending", "scheduled", "crashed"]
    (attempt,) = await jobs.attempts(at_once)
    assert (attempt["outcome"], attempt["cause"], attempt["worker_id"]) == ("crashed", "worker_dead", dead)


async def test_others_keep_their_rows_even_expired_ones(jobs: JobTable) -> None:
    dead, other = await jobs.register(), await jobs.register()
    await jobs.running(dead)
    live = await jobs.running(other, 2)
    await jobs.update(live[:1], lock_expires_at="clock_timestamp() - interval '1 second'")
    assert await release(jobs, dead) == 1
    assert [(await jobs.row(job))["status"] for job in live] == ["running", "running"]


async def test_the_rows_of_a_worker_that_was_stopping_are_interrupts(jobs: JobTable) -> None:
    dead = await jobs.register(stopping_at="clock_timestamp()")
    (job,) = await jobs.running(dead, max_attempts="1")
    assert await release(jobs, dead) == 1
    row = await jobs.row(job)
    assert (row["status"], row["interrupt_count"]) == ("pending", 1)
    (attempt,) = await jobs.attempts(job)
    assert (attempt["outcome"], attempt["cause"]) == ("interrupted", "worker_shutdown")


async def test_a_claim_that_commits_after_the_release_finds_the_tombstone(jobs: JobTable, dsn: str) -> None:
    dead = await jobs.register()
    (job,) = await jobs.plant()
    late = await asyncpg.connect(dsn)
    try:
        async with late.transaction():
            await jobs.claim(dead, conn=late, lease=3600)
            assert await release(jobs, dead) == 0, "the claim is not visible yet"
    finally:
        await late.close()
    assert (await jobs.row(job))["status"] == "running"
    assert (await jobs.tick())["reaped"] == 1, "the reaper takes it with an hour of its lease left"
    assert (await jobs.row(job))["status"] == "pending"


async def test_an_outcome_under_way_wins_over_the_release_or_loses_whole(jobs: JobTable, dsn: str) -> None:
    dead = await jobs.register()
    first, second = await jobs.running(dead, 2)
    settler = await asyncpg.connect(dsn)
    try:
        async with settler.transaction():
            await jobs.succeed(first, conn=settler)
            assert await release(jobs, dead) == 1
        assert await jobs.succeed(second, conn=settler) is None
    finally:
        await settler.close()
    assert (await jobs.row(first))["status"] == "succeeded"
    assert (await jobs.row(second))["status"] == "pending"
    assert await release(jobs, dead) == 0


async def test_the_dead_one_is_told_that_it_is_dead(jobs: JobTable) -> None:
    dead = await jobs.register()
    assert await jobs.conn.fetchval(jobs.worker_sql.beat_worker, dead) is False
    await release(jobs, dead)
    assert await jobs.conn.fetchval(jobs.worker_sql.beat_worker, dead) is True


async def test_more_rows_than_one_batch_all_come_back(jobs: JobTable) -> None:
    dead = await jobs.register()
    await jobs.running(dead, 1203)
    assert await release(jobs, dead) == 1203
    assert await jobs.counts() == {"pending": 1203}


async def test_releases_of_the_same_workers_at_once_take_each_row_once(jobs: JobTable, dsn: str) -> None:
    dead = [await jobs.register() for _ in range(6)]
    for worker in dead:
        await jobs.running(worker, 20)
    connections = [await asyncpg.connect(dsn) for _ in range(4)]
    try:
        taken = await asyncio.gather(
            *(
                release_workers(conn, jobs.schema, dead if number % 2 else dead[::-1], timeout=10)
                for number, conn in enumerate(connections)
            )
        )
    finally:
        for conn in connections:
            await conn.close()
    assert sum(taken) == 120
    epochs = await jobs.conn.fetch(f'select distinct epoch, status::text from "{jobs.schema}".jobs')
    assert [tuple(record) for record in epochs] == [(2, "pending")]


async def test_a_worker_that_never_registered_is_nothing_to_release(jobs: JobTable) -> None:
    assert await release(jobs, new_uuid()) == 0
    assert await release(jobs) == 0


async def test_a_lost_session_is_tried_again_and_then_raised(jobs: JobTable, dsn: str) -> None:
    dead = await jobs.register()
    await jobs.running(dead)

    class Flaky:
        def __init__(self, failures: int) -> None:
            self.failures = failures

        async def fetchval(self, *arguments: object, timeout: float) -> int:
            if self.failures:
                self.failures -= 1
                raise ConnectionResetError
            value: int = await jobs.conn.fetchval(*arguments, timeout=timeout)
            return value

    with pytest.raises(ConnectionResetError):
        await release_workers(Flaky(4), jobs.schema, [dead], timeout=10)
    assert await release_workers(Flaky(3), jobs.schema, [dead], timeout=10) == 1


async def test_an_empty_or_missing_list_releases_nobody(jobs: JobTable) -> None:
    await jobs.running(await jobs.register())
    for value in ([], None):
        assert await jobs.conn.fetchval(load("release", jobs.schema).release, value, 10) == 0
