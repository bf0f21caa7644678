"""The counters of batches: they follow every end, complete, abort, reopen, and a sweep repairs what has drifted."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from tests.jobs import JobTable

ENDS = ("succeeded", "failed", "cancelled", "crashed", "abandoned")
EXPIRED = "clock_timestamp() - interval '1 second'"
HELD = "'9999-12-31 00:00:00+00'"


class Batches:
    """Batches of one schema, looked at behind the client's back."""

    def __init__(self, jobs: JobTable) -> None:
        self.jobs = jobs
        self.schema = jobs.schema

    async def open(self, size: int, **columns: Any) -> tuple[UUID, list[UUID]]:
        """Plant a batch of pending jobs; ``columns`` are SQL expressions of the batch."""
        batch = new_uuid()
        ids = await self.jobs.plant(size, batch_id=f"'{batch}'")
        values = {"id": f"'{batch}'", "total": size, **columns}
        await self.jobs.conn.execute(
            f'insert into "{self.schema}".batches ({", ".join(values)}) values ({", ".join(map(str, values.values()))})'
        )
        return batch, ids

    async def end(self, ids: list[UUID], status: str, *, conn: asyncpg.Connection | None = None) -> None:
        """End jobs as a statement that settles them does: the rows first, then their batches."""
        await (conn or self.jobs.conn).execute(
            f"""
            with old as materialized (select id, status from "{self.schema}".jobs where id = any($1)),
            ended as (
                update "{self.schema}".jobs j set status = $2::text::"{self.schema}".job_status
                from old where j.id = old.id returning j.batch_id, old.status as old, j.status as new
            )
            select "{self.schema}".count_batches(array_agg(batch_id), array_agg(old), array_agg(new)) from ended
            """,
            ids,
            status,
        )

    async def row(self, batch: UUID) -> asyncpg.Record:
        """Return the stored batch."""
        record = await self.jobs.conn.fetchrow(f'select * from "{self.schema}".batches where id = $1', batch)
        assert record is not None
        return record

    async def is_right(self, batch: UUID) -> bool:
        """Whether the counters are what the jobs say."""
        records = await self.jobs.conn.fetch(
            f'select status::text, count(*) from "{self.schema}".jobs where batch_id = $1 group by 1', batch
        )
        counts = {record["status"]: record["count"] for record in records}
        row = await self.row(batch)
        return {end: row[end] for end in ENDS} == {end: counts.get(end, 0) for end in ENDS}

    async def is_due(self) -> None:
        """Let the next tick recount every batch."""
        await self.jobs.conn.execute(f'update "{self.schema}".batches set count_again_at = {EXPIRED}')


@pytest.fixture
def batches(jobs: JobTable) -> Batches:
    """The batches of this test's schema."""
    return Batches(jobs)


async def test_every_end_counts_and_the_last_completes_the_batch(batches: Batches) -> None:
    batch, ids = await batches.open(6)
    for job, end in zip(ids, ENDS, strict=False):
        await batches.end([job], end)
        assert await batches.is_right(batch)
        row = await batches.row(batch)
        assert (row["status"], row["completed_at"]) == ("active", None)
    await batches.end([ids[-1]], "succeeded")
    row = await batches.row(batch)
    assert (row["status"], row["total"], row["succeeded"]) == ("complete", 6, 2)
    assert row["completed_at"] is not None
    assert await batches.is_right(batch)


async def test_a_job_of_no_stored_batch_counts_nowhere(batches: Batches) -> None:
    (job,) = await batches.jobs.plant(batch_id=f"'{new_uuid()}'")
    await batches.end([job], "succeeded")
    assert (await batches.jobs.row(job))["status"] == "succeeded"


async def test_the_last_two_ends_at_once_complete_the_batch(batches: Batches, dsn: str) -> None:
    opened = [await batches.open(2) for _ in range(20)]
    other = await asyncpg.connect(dsn, timeout=30)
    try:
        for _, (one, two) in opened:
            transaction = batches.jobs.conn.transaction()
            await transaction.start()
            await batches.end([one], "succeeded")
            waiting = asyncio.create_task(batches.end([two], "succeeded", conn=other))
            await asyncio.sleep(0.005)
            await transaction.commit()
            await asyncio.wait_for(waiting, 30)
    finally:
        await other.close(timeout=10)
    await batches.jobs.tick()  # for those that were held too long
    for batch, _ in opened:
        row = await batches.row(batch)
        assert (row["status"], row["succeeded"]) == ("complete", 2)


async def test_ends_of_several_batches_in_any_order_never_deadlock(batches: Batches, dsn: str) -> None:
    opened = [await batches.open(40) for _ in range(3)]
    groups = [[ids[n] for _, ids in opened] for n in range(40)]

    async def settle(order: list[list[UUID]], backwards: bool) -> None:
        own = await asyncpg.connect(dsn, timeout=30)
        try:
            for group in order:
                await batches.end(sorted(group, reverse=backwards), "succeeded", conn=own)
        finally:
            await own.close(timeout=10)

    await asyncio.gather(*(settle(groups[n::4], n % 2 == 0) for n in range(4)))
    await batches.jobs.tick()
    for batch, _ in opened:
        row = await batches.row(batch)
        assert (row["status"], row["succeeded"]) == ("complete", 40)


@pytest.mark.parametrize("who", ["scheduler", "worker"])
async def test_who_holds_a_batch_does_not_keep_its_jobs_from_ending(batches: Batches, dsn: str, who: str) -> None:
    jobs = batches.jobs
    batch, _ = await batches.open(0)
    ids = await jobs.running(await jobs.register(), 3, batch_id=f"'{batch}'")
    other = await asyncpg.connect(dsn, timeout=30)
    try:
        async with other.transaction():
            await other.execute(f'select from "{batches.schema}".batches where id = $1 for update', batch)
            async with asyncio.timeout(30):
                assert set(await jobs.succeed(*ids) or ()) == set(ids)
                assert (await jobs.tick())["batches_counted"] == 1
            assert (await batches.row(batch))["succeeded"] == 0, "nor does the tick wait"
            assert await jobs.conn.fetchval("show lock_timeout") == "0"
    finally:
        await other.close(timeout=10)
    if who == "scheduler":
        await jobs.tick()
    else:
        assert (await jobs.conn.fetchrow(jobs.worker_sql.micro_maintenance))["recounted"] == 1
        assert (await jobs.conn.fetchrow(jobs.worker_sql.micro_maintenance))["recounted"] is None
    row = await batches.row(batch)
    assert (row["status"], row["succeeded"]) == ("complete", 3)


async def test_an_operators_retry_takes_the_end_back(batches: Batches) -> None:
    batch, ids = await batches.open(2)
    await batches.end(ids, "failed")
    assert (await batches.row(batch))["status"] == "complete"
    await batches.end([ids[0]], "pending")
    row = await batches.row(batch)
    assert (row["status"], row["failed"], row["completed_at"]) == ("active", 1, None)
    await batches.end([ids[0]], "succeeded")
    row = await batches.row(batch)
    assert (row["status"], row["failed"], row["succeeded"]) == ("complete", 1, 1)


# -- failures in a row ------------------------------------------------------------------------------


async def test_a_success_ends_a_row_of_failures(batches: Batches) -> None:
    batch, ids = await batches.open(9, failure_threshold=3)
    for job, end in zip(ids, ["failed", "crashed", "succeeded", "failed", "cancelled", "failed"], strict=False):
        await batches.end([job], end)
    row = await batches.row(batch)
    assert (row["status"], row["consecutive_failures"]) == ("active", 2)


@pytest.mark.parametrize("together", [True, False])
async def test_failures_in_a_row_abort_the_batch_and_the_tick_cancels_what_waits(
    batches: Batches, together: bool
) -> None:
    batch, ids = await batches.open(10, failure_threshold=3)
    await batches.jobs.update([ids[9]], status="'running'")
    await batches.jobs.update([ids[8]], status="'scheduled'")
    for group in [ids[:3]] if together else [[one] for one in ids[:3]]:
        await batches.end(group, "failed")
    row = await batches.row(batch)
    assert (row["status"], row["consecutive_failures"], row["completed_at"]) == ("aborted", 3, None)

    assert (await batches.jobs.tick())["batch_cancelled"] == 6
    assert await batches.jobs.counts() == {"failed": 3, "cancelled": 6, "running": 1}
    cancelled = await batches.jobs.row(ids[8])
    assert cancelled["error_class"] == "BatchAborted"
    assert cancelled["error_message"] == "the batch was aborted after 3 failures in a row"
    assert (cancelled["epoch"], cancelled["finished_at"] is not None) == (1, True)
    assert (await batches.jobs.events(ids[8]))[0]["reason"] == "batch_aborted"
    assert (await batches.row(batch))["completed_at"] is None, "one still runs"

    await batches.end([ids[9]], "succeeded")
    row = await batches.row(batch)
    assert (row["status"], row["succeeded"], row["cancelled"]) == ("aborted", 1, 6)
    assert row["completed_at"] is not None


async def test_a_big_aborted_batch_is_cancelled_in_bounded_passes(batches: Batches) -> None:
    await batches.open(700, status="'aborted'")
    assert [(await batches.jobs.tick())["batch_cancelled"] for _ in range(3)] == [500, 200, 0]


async def test_a_retry_makes_an_aborted_batch_active_again(batches: Batches) -> None:
    batch, ids = await batches.open(3, failure_threshold=1)
    await batches.end([ids[0]], "failed")
    await batches.end([ids[0]], "pending")
    row = await batches.row(batch)
    assert (row["status"], row["consecutive_failures"]) == ("active", 0)
    assert (await batches.jobs.tick())["batch_cancelled"] == 0


# -- who counts -------------------------------------------------------------------------------------


async def test_a_deadline_counts_in_the_batch(batches: Batches) -> None:
    batch, ids = await batches.open(2)
    await batches.jobs.update(ids, schedule_to_close=EXPIRED)
    assert (await batches.jobs.tick())["deadline_exceeded"] == 2
    row = await batches.row(batch)
    assert (row["status"], row["failed"]) == ("complete", 2)


@pytest.mark.parametrize("end", [*ENDS, "snoozed", "released"])
async def test_every_settlement_counts_in_the_batch(batches: Batches, end: str) -> None:
    jobs = batches.jobs
    batch, _ = await batches.open(0)
    ids = await jobs.running(await jobs.register(), 2, batch_id=f"'{batch}'", max_attempts="1")
    if end != "succeeded":
        await jobs.update(ids, cancel_requested_at="clock_timestamp()", cancel_phase="1")
    given = (ids, [1, 1], [0.5, 0.5])
    match end:
        case "succeeded":
            await jobs.succeed(*ids, result="1")
        case "failed" | "cancelled":
            if end == "failed":
                await jobs.update(ids, cancel_requested_at="null", cancel_phase="0")
            none = [None, None]
            await jobs.conn.fetch(jobs.worker_sql.settle_failed, *given, none, none, none, none, none, none)
        case "abandoned":
            await jobs.conn.fetch(jobs.worker_sql.settle_abandoned, *given)
        case "snoozed":
            await jobs.conn.fetch(jobs.worker_sql.settle_snoozed, *given, [9.0, 9.0])
        case "released":
            await jobs.conn.fetch(jobs.worker_sql.settle_released, *given, ["worker_shutdown"] * 2)
        case "crashed":
            await jobs.update(ids, cancel_requested_at="null", cancel_phase="0", lock_expires_at=EXPIRED)
            assert (await jobs.tick())["reaped"] == 2
    assert await batches.is_right(batch)
    row = await batches.row(batch)
    counter = "cancelled" if end in ("snoozed", "released") else end
    assert (row["status"], row[counter]) == ("complete", 2)


@pytest.mark.parametrize("end", ["failed", "snoozed", "released", "crashed"])
async def test_an_attempt_that_ends_without_its_job_does_not_count(batches: Batches, end: str) -> None:
    jobs = batches.jobs
    batch, _ = await batches.open(0)
    ids = await jobs.running(await jobs.register(), 2, batch_id=f"'{batch}'")
    given = (ids, [1, 1], [0.5, 0.5])
    match end:
        case "failed":
            none = [None, None]
            await jobs.conn.fetch(jobs.worker_sql.settle_failed, *given, none, none, none, none, none, none)
        case "snoozed":
            await jobs.conn.fetch(jobs.worker_sql.settle_snoozed, *given, [9.0, 9.0])
        case "released":
            await jobs.conn.fetch(jobs.worker_sql.settle_released, *given, ["worker_shutdown"] * 2)
        case "crashed":
            await jobs.update(ids, lock_expires_at=EXPIRED)
            assert (await jobs.tick())["reaped"] == 2
    assert await batches.is_right(batch)
    assert (await batches.row(batch))["status"] == "active"


async def test_a_sweep_leaves_a_batch_that_somebody_holds_to_the_next_tick(batches: Batches, dsn: str) -> None:
    batch, ids = await batches.open(3)
    await batches.jobs.update(ids[:2], schedule_to_close=EXPIRED)
    other = await asyncpg.connect(dsn, timeout=30)
    try:
        async with other.transaction():
            await other.execute(f'select from "{batches.schema}".batches where id = $1 for update', batch)
            assert (await batches.jobs.tick())["deadline_exceeded"] == 2
            assert (await batches.row(batch))["failed"] == 0
    finally:
        await other.close(timeout=10)
    assert (await batches.jobs.tick())["batches_counted"] == 1
    assert await batches.is_right(batch)
    assert (await batches.row(batch))["status"] == "active"


# -- repair -----------------------------------------------------------------------------------------


async def test_the_tick_repairs_what_has_drifted(batches: Batches) -> None:
    batch, ids = await batches.open(4, succeeded=3, failed=1)
    await batches.jobs.update(ids[:1], status="'succeeded'")
    assert (await batches.jobs.tick())["batches_counted"] == 0, "not due yet"
    await batches.is_due()
    assert (await batches.jobs.tick())["batches_counted"] == 1
    assert await batches.is_right(batch)
    row = await batches.row(batch)
    assert (row["status"], row["total"]) == ("active", 4)
    assert (await batches.jobs.tick())["batches_counted"] == 0, "once a minute"

    await batches.jobs.update(ids[1:], status="'failed'")
    await batches.is_due()
    await batches.jobs.tick()
    assert await batches.is_right(batch)
    assert (await batches.row(batch))["status"] == "complete"
    await batches.is_due()
    assert (await batches.jobs.tick())["batches_counted"] == 0, "what is complete is looked at no more"


async def test_a_recount_of_a_batch_in_motion_adds_the_difference(batches: Batches, dsn: str) -> None:
    batch, ids = await batches.open(30, succeeded=5)
    other = await asyncpg.connect(dsn, timeout=30)
    try:

        async def settle() -> None:
            for job in ids:
                await batches.end([job], "succeeded", conn=other)

        settling = asyncio.create_task(settle())
        while not settling.done():
            await batches.is_due()
            await batches.jobs.tick()
        await settling
    finally:
        await other.close(timeout=10)
    await batches.is_due()
    await batches.jobs.tick()
    assert await batches.is_right(batch)
    assert (await batches.row(batch))["status"] == "complete"


# -- the finalizer ----------------------------------------------------------------------------------


async def held(batches: Batches) -> UUID:
    (job,) = await batches.jobs.plant(status="'scheduled'", scheduled_at=HELD)
    return job


async def test_the_finalizer_is_due_once_the_batch_has_ended(batches: Batches) -> None:
    job = await held(batches)
    batch, ids = await batches.open(2, finalizer_job_id=f"'{job}'")
    await batches.end([ids[0]], "failed")
    assert (await batches.jobs.row(job))["status"] == "scheduled"
    await batches.end([ids[1]], "succeeded")
    row = await batches.jobs.row(job)
    assert row["status"] == "pending"
    assert row["scheduled_at"] <= row["now"]
    assert (await batches.row(batch))["finalized_at"] is not None

    await batches.jobs.update([job], status="'succeeded'")
    await batches.end([ids[1]], "pending")
    await batches.end([ids[1]], "succeeded")
    assert (await batches.jobs.row(job))["status"] == "succeeded", "let go once"


async def test_a_finalizer_that_somebody_holds_is_let_go_by_the_tick(batches: Batches, dsn: str) -> None:
    job = await held(batches)
    _, ids = await batches.open(1, finalizer_job_id=f"'{job}'")
    other = await asyncpg.connect(dsn, timeout=30)
    try:
        async with other.transaction():
            await other.execute(f'select from "{batches.schema}".jobs where id = $1 for update', job)
            await batches.end(ids, "succeeded")
    finally:
        await other.close(timeout=10)
    assert (await batches.jobs.row(job))["status"] == "scheduled"
    await batches.is_due()
    await batches.jobs.tick()
    assert (await batches.jobs.row(job))["status"] == "pending"


async def test_a_finalizer_that_was_cancelled_stays_so(batches: Batches) -> None:
    job = await held(batches)
    batch, ids = await batches.open(1, finalizer_job_id=f"'{job}'")
    await batches.jobs.update([job], status="'cancelled'")
    await batches.end(ids, "succeeded")
    assert (await batches.jobs.row(job))["status"] == "cancelled"
    assert (await batches.row(batch))["finalized_at"] is not None


async def test_what_goes_back_into_the_queue_waits_for_nobody(batches: Batches, dsn: str) -> None:
    batch, (job,) = await batches.open(1)
    await batches.jobs.update([job], status="'running'")
    other = await asyncpg.connect(dsn, timeout=30)
    try:
        async with other.transaction():
            await other.execute(f'select from "{batches.schema}".batches where id = $1 for update', batch)
            async with asyncio.timeout(30):
                await batches.end([job], "scheduled")
    finally:
        await other.close(timeout=10)
    assert (await batches.row(batch))["status"] == "active"


@pytest.mark.parametrize("state", ["ended", "open", "half"])
async def test_looking_for_a_job_in_flight_reads_no_others(batches: Batches, state: str) -> None:
    jobs = batches.jobs
    batch, ids = await batches.open(3000)
    await jobs.plant(3000)
    ended = {"ended": ids, "open": [], "half": ids[:1500]}[state]
    await jobs.update(ended, status="'succeeded'")
    await jobs.conn.execute(f'analyze "{jobs.schema}".jobs')
    table = f"'\"{jobs.schema}\".jobs'::regclass"
    read = f"select pg_stat_get_xact_tuples_returned({table}) + pg_stat_get_xact_tuples_fetched({table})"
    async with jobs.conn.transaction():
        before = await jobs.conn.fetchval(read)
        await jobs.conn.execute(f'select "{jobs.schema}".close_batches(array[$1::uuid])', batch)
        after = await jobs.conn.fetchval(read)
    assert after - before <= 10
    assert (await batches.row(batch))["status"] == ("complete" if state == "ended" else "active")
