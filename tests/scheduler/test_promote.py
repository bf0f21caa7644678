"""Promotion: due jobs become claimable soon, however many there are, and nobody waits for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.maintenance.housekeeping import PROMOTION_BATCH, Housekeeping, HousekeepingLoops
from tests.jobs import JobTable
from tests.support import eventually

DUE = "clock_timestamp() - interval '1 second'"


def never() -> bool:
    return False


async def test_only_what_is_due_is_promoted(jobs: JobTable) -> None:
    (due,) = await jobs.plant(status="'scheduled'", scheduled_at=DUE)
    (later,) = await jobs.plant(status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 hour'")
    (ended,) = await jobs.plant(status="'cancelled'", scheduled_at=DUE)
    assert (await jobs.promote())["promoted"] == 1
    assert [(await jobs.row(job))["status"] for job in (due, later, ended)] == ["pending", "scheduled", "cancelled"]
    row = await jobs.row(due)
    assert (row["epoch"], row["attempt"]) == (0, 0)
    assert [one["id"] for one in await jobs.claim(new_uuid(), 5)] == [due]


async def test_the_longest_due_come_first(jobs: JobTable) -> None:
    for minutes in (1, 9, 5):
        await jobs.plant(status="'scheduled'", scheduled_at=f"now() - interval '{minutes} minutes'")
    record = await jobs.promote(2)
    assert record["promoted"] == 2
    left = await jobs.conn.fetchval(
        "select round(extract(epoch from now() - scheduled_at) / 60)"
        f" from \"{jobs.schema}\".jobs where status = 'scheduled'"
    )
    assert left == 1


async def test_a_locked_row_is_passed_and_found_again(jobs: JobTable, pool: Any, dsn: str) -> None:
    ids = await jobs.plant(3, status="'scheduled'", scheduled_at=DUE)
    core = Housekeeping(pool, jobs.schema, statement_timeout=5)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', ids[0])
            assert await core.promote(never) == (2, True)
        assert await core.promote(never) == (1, True)
    finally:
        await other.close()


async def test_a_backlog_of_many_batches_is_promoted_in_one_round(jobs: JobTable, pool: Any) -> None:
    await jobs.plant(
        2 * PROMOTION_BATCH + 500, status="'scheduled'", scheduled_at="now() - random() * interval '1 day'"
    )
    core = Housekeeping(pool, jobs.schema, statement_timeout=5)
    assert await core.promote(never, slice_seconds=60) == (2 * PROMOTION_BATCH + 500, True)
    assert core.promoted == 2 * PROMOTION_BATCH + 500


async def test_a_round_ends_with_its_slice_or_with_the_process(jobs: JobTable, pool: Any) -> None:
    await jobs.plant(3 * PROMOTION_BATCH, status="'scheduled'", scheduled_at="now() - random() * interval '1 day'")
    core = Housekeeping(pool, jobs.schema, statement_timeout=5)
    assert await core.promote(never, slice_seconds=0.0) == (PROMOTION_BATCH, False)
    assert await core.promote(lambda: True, slice_seconds=60) == (PROMOTION_BATCH, False)
    assert await core.promote(never, slice_seconds=60) == (PROMOTION_BATCH, True)


async def test_a_row_that_becomes_due_below_the_floor_is_found(jobs: JobTable, pool: Any) -> None:
    await jobs.plant(PROMOTION_BATCH + 10, status="'scheduled'", scheduled_at="now() - interval '1 hour'")
    core = Housekeeping(pool, jobs.schema, statement_timeout=5)
    assert await core.promote(never, slice_seconds=0.0) == (PROMOTION_BATCH, False)  # the floor is an hour ago now
    (old,) = await jobs.plant(status="'scheduled'", scheduled_at="now() - interval '1 day'")
    await core.promote(never)
    await core.promote(never)
    assert (await jobs.row(old))["status"] == "pending"


async def test_a_round_comes_when_the_next_job_is_due(
    jobs: JobTable, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskqd.maintenance.housekeeping.PROMOTION_CADENCE", 600.0)
    (job,) = await jobs.plant(status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 second'")
    await jobs.plant(status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 day'")
    core = Housekeeping(pool, jobs.schema, statement_timeout=10)
    loops = HousekeepingLoops(core, tick_cadence=600, on_failure=lambda *_: None)
    loops.start()
    try:
        await eventually(lambda: core.promoted, 60)
        row = await jobs.row(job)
        assert row["status"] == "pending"
        assert row["now"] >= row["scheduled_at"]
    finally:
        for loop in loops.loops:
            await loop.stop()


async def test_a_job_that_becomes_due_right_after_a_round_is_next(jobs: JobTable, pool: Any) -> None:
    core = Housekeeping(pool, jobs.schema, statement_timeout=10)
    await core.promote(never)
    await jobs.plant(status="'scheduled'", scheduled_at="clock_timestamp()")
    seconds = await core.next_due()
    assert seconds is not None
    assert seconds < 0


async def test_claims_do_not_starve_while_a_flood_is_promoted(jobs: JobTable, pool: Any, dsn: str) -> None:
    await jobs.plant(40 * PROMOTION_BATCH, status="'scheduled'", scheduled_at="now() - random() * interval '1 day'")
    await jobs.plant(400, priority="0")
    core = Housekeeping(pool, jobs.schema, statement_timeout=10)
    promotion = asyncio.ensure_future(core.promote(never, slice_seconds=60))
    conn = await asyncpg.connect(dsn)
    try:
        longest, during = 0.0, 0
        while not promotion.done():
            began = time.monotonic()
            assert len(await jobs.claim(new_uuid(), 5, conn=conn)) == 5
            longest = max(longest, time.monotonic() - began)
            during += 1
    finally:
        await conn.close()
    assert await promotion == (40 * PROMOTION_BATCH, True)
    assert during > 5
    assert longest < 2


async def test_promotion_wakes_the_workers(jobs: JobTable, pool: Any, dsn: str) -> None:
    core = Housekeeping(pool, jobs.schema, statement_timeout=5)
    async with jobs.listening(dsn) as heard:
        await core.promote(never)
        await jobs.conn.execute(jobs.scheduler_sql.wake)
        await eventually(lambda: heard)
        assert len(heard) == 1, "nothing was promoted, and nobody woken but by us"
        await jobs.plant(status="'scheduled'", scheduled_at=DUE)
        await core.promote(never)
        await eventually(lambda: len(heard) == 2)
