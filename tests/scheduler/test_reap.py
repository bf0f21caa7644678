"""Taking back what dead workers held: once, on the job's own terms."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from tests.jobs import JobTable
from tests.support import eventually

EXPIRED = "clock_timestamp() - interval '1 second'"


async def reap(jobs: JobTable, limit: int = 200, conn: asyncpg.Connection | None = None) -> int:
    return int(await (conn or jobs.conn).fetchval(f'select "{jobs.schema}".reap($1)', limit))


async def test_a_live_lease_is_left_alone(jobs: JobTable) -> None:
    await jobs.running(await jobs.register())
    before = await jobs.image()
    assert await reap(jobs) == 0
    assert await jobs.image() == before


async def test_a_crash_waits_on_the_jobs_own_curve(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker, retry_base="30", retry_jitter="0")
    await jobs.update([job], lock_expires_at=EXPIRED)
    assert await reap(jobs) == 1
    row = await jobs.row(job)
    assert (row["status"], row["epoch"], row["attempt"], row["interrupt_count"]) == ("scheduled", 2, 1, 0)
    assert 29 < (row["scheduled_at"] - row["now"]).total_seconds() <= 30
    assert (row["worker_id"], row["lock_expires_at"], row["claimed_at"]) == (None, None, None)
    assert row["error_class"] == "WorkerCrashed"
    (attempt,) = await jobs.attempts(job)
    assert (attempt["epoch"], attempt["outcome"], attempt["cause"], attempt["worker_id"]) == (
        1,
        "crashed",
        "lock_expired",
        worker,
    )
    (event,) = await jobs.events(job)
    assert (event["from_state"], event["to_state"], event["reason"]) == ("running", "scheduled", "lock_expired")


async def test_a_crash_without_a_delay_goes_straight_back_and_wakes_the_others(jobs: JobTable, dsn: str) -> None:
    async with jobs.listening(dsn) as heard:
        (job,) = await jobs.running(await jobs.register())
        await jobs.update([job], lock_expires_at=EXPIRED)
        await reap(jobs)
        assert (await jobs.row(job))["status"] == "pending"
        await eventually(lambda: heard)


async def test_a_crash_at_the_last_attempt_ends_the_job(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker, max_attempts="1", unique_while_active="true", idempotency_key="'a'")
    await jobs.update([job], lock_expires_at=EXPIRED)
    await reap(jobs)
    row = await jobs.row(job)
    assert (row["status"], row["epoch"], row["attempt"], row["worker_id"]) == ("crashed", 2, 1, worker)
    assert (row["error_class"], row["idempotency_freed"]) == ("WorkerCrashed", True)
    assert row["finished_at"] is not None


@pytest.mark.parametrize(
    ("columns", "status"),
    [
        ({"retry_kind": "'non_retryable'"}, "crashed"),
        ({"retry_kind": "'indefinite'", "max_attempts": "1"}, "pending"),
    ],
)
async def test_the_kind_of_retry_decides_for_crashes_too(jobs: JobTable, columns: dict[str, str], status: str) -> None:
    (job,) = await jobs.running(await jobs.register(), **columns)
    await jobs.update([job], lock_expires_at=EXPIRED)
    await reap(jobs)
    assert (await jobs.row(job))["status"] == status


async def test_the_row_of_a_stopping_worker_is_an_interrupt_even_at_the_last_attempt(jobs: JobTable) -> None:
    worker = await jobs.register(stopping_at="clock_timestamp()")
    (job,) = await jobs.running(worker, max_attempts="1", retry_base="3600", error_class="'Earlier'")
    await jobs.update([job], lock_expires_at=EXPIRED)
    await reap(jobs)
    row = await jobs.row(job)
    assert (row["status"], row["epoch"], row["attempt"], row["interrupt_count"]) == ("pending", 2, 1, 1)
    assert row["error_class"] == "Earlier"
    (attempt,) = await jobs.attempts(job)
    assert (attempt["outcome"], attempt["cause"], attempt["error_class"]) == ("interrupted", "worker_shutdown", None)


async def test_a_stopping_worker_keeps_its_rows_until_their_leases_end(jobs: JobTable) -> None:
    await jobs.running(await jobs.register(stopping_at="clock_timestamp()"))
    assert await reap(jobs) == 0


async def test_the_rows_of_a_tombstoned_worker_are_taken_at_once(jobs: JobTable) -> None:
    dead = await jobs.register(dead_at="clock_timestamp()")
    (job,) = await jobs.running(dead)
    (other,) = await jobs.running(await jobs.register())
    assert await reap(jobs) == 1
    assert (await jobs.row(job))["status"] == "pending"
    assert (await jobs.row(other))["status"] == "running"
    (attempt,) = await jobs.attempts(job)
    assert (attempt["outcome"], attempt["cause"]) == ("crashed", "worker_dead")


async def test_what_a_dead_worker_had_finished_stays_finished(jobs: JobTable) -> None:
    worker = await jobs.register()
    ids = await jobs.running(worker, 2, heartbeat_timeout="interval '1 second'")
    await jobs.succeed(*ids)
    await jobs.update(ids, claimed_at="clock_timestamp() - interval '1 hour'")
    await jobs.conn.execute(f'update "{jobs.schema}".workers set dead_at = clock_timestamp()')
    before = await jobs.image()
    assert await reap(jobs) == 0
    assert await jobs.image() == before


async def test_the_rows_of_a_worker_that_nobody_knows_are_taken_when_their_leases_end(jobs: JobTable) -> None:
    (job,) = await jobs.running(new_uuid())
    assert await reap(jobs) == 0
    await jobs.update([job], lock_expires_at=EXPIRED)
    assert await reap(jobs) == 1


async def test_a_missed_heartbeat_is_a_crash(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker, heartbeat_timeout="interval '5 seconds'")
    assert await reap(jobs) == 0
    await jobs.update([job], claimed_at="clock_timestamp() - interval '6 seconds'")
    await jobs.update([job], last_heartbeat_at="clock_timestamp() - interval '4 seconds'")
    assert await reap(jobs) == 0, "the last heartbeat counts, not the claim"
    await jobs.update([job], last_heartbeat_at="clock_timestamp() - interval '6 seconds'")
    assert await reap(jobs) == 1
    (attempt,) = await jobs.attempts(job)
    assert (attempt["outcome"], attempt["cause"]) == ("crashed", "heartbeat_timeout")


async def test_a_retry_past_the_deadline_fails_instead(jobs: JobTable) -> None:
    (job,) = await jobs.running(
        await jobs.register(),
        retry_base="30",
        retry_jitter="0",
        schedule_to_close="clock_timestamp() + interval '29 seconds'",
    )
    await jobs.update([job], lock_expires_at=EXPIRED)
    await reap(jobs)
    row = await jobs.row(job)
    assert (row["status"], row["error_class"]) == ("failed", "DeadlineExceeded")


@pytest.mark.parametrize("stopping", [False, True])
async def test_a_job_that_somebody_cancelled_is_cancelled(jobs: JobTable, stopping: bool) -> None:
    worker = await jobs.register(**({"stopping_at": "clock_timestamp()"} if stopping else {}))
    (job,) = await jobs.running(worker)
    await jobs.update([job], lock_expires_at=EXPIRED, cancel_requested_at="clock_timestamp()", cancel_phase="1")
    await reap(jobs)
    row = await jobs.row(job)
    assert (row["status"], row["error_class"]) == ("cancelled", None)
    assert row["finished_at"] is not None
    assert row["cancel_requested_at"] is not None


async def test_a_reaped_row_goes_where_its_actor_is_served_now(jobs: JobTable) -> None:
    await jobs.store_actor(queue="'elsewhere'")
    (job,) = await jobs.running(await jobs.register())
    await jobs.update([job], lock_expires_at=EXPIRED, lane="'x'")
    await reap(jobs)
    row = await jobs.row(job)
    assert (row["route"], row["lane"], row["queue"]) == ("elsewhere", "", "default")


async def test_the_oldest_leases_come_first_and_the_limit_holds(jobs: JobTable) -> None:
    ids = await jobs.running(await jobs.register(), 5)
    for age, job in enumerate(ids):
        await jobs.update([job], lock_expires_at=f"clock_timestamp() - interval '{age + 1} seconds'")
    assert await reap(jobs, 2) == 2
    assert [(await jobs.row(job))["status"] for job in ids] == ["running"] * 3 + ["pending"] * 2


@pytest.mark.parametrize("limit", [0, -1, 10_001, None])
async def test_a_limit_out_of_range_is_refused_and_named(jobs: JobTable, limit: int | None) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="must be between 1 and 10000"):
        await reap(jobs, limit)  # type: ignore[arg-type]


async def test_a_row_that_is_being_settled_is_skipped(jobs: JobTable, dsn: str) -> None:
    ids = await jobs.running(await jobs.register(), 3)
    await jobs.update(ids, lock_expires_at=EXPIRED)
    settler = await asyncpg.connect(dsn)
    try:
        async with settler.transaction():
            await jobs.succeed(ids[1], conn=settler)
            assert await reap(jobs) == 2
    finally:
        await settler.close()
    assert (await jobs.row(ids[1]))["status"] == "succeeded"
    assert await reap(jobs) == 0


async def test_a_settlement_cannot_overtake_a_reap(jobs: JobTable, dsn: str) -> None:
    (job,) = await jobs.running(await jobs.register())
    await jobs.update([job], lock_expires_at=EXPIRED)
    reaper = await asyncpg.connect(dsn)
    try:
        async with reaper.transaction():
            assert await reap(jobs, conn=reaper) == 1
            assert await jobs.succeed(job) is None
    finally:
        await reaper.close()
    assert await jobs.succeed(job) is None
    assert (await jobs.row(job))["status"] == "pending"


async def test_reapers_at_once_take_each_row_once(jobs: JobTable, dsn: str) -> None:
    ids = await jobs.running(await jobs.register(), 300)
    await jobs.update(ids, lock_expires_at=EXPIRED)
    connections = [await asyncpg.connect(dsn) for _ in range(4)]
    try:
        while sum(await asyncio.gather(*(reap(jobs, 40, conn) for conn in connections))):
            continue
    finally:
        for conn in connections:
            await conn.close()
    epochs = await jobs.conn.fetch(f'select distinct epoch, status::text from "{jobs.schema}".jobs')
    assert [tuple(record) for record in epochs] == [(2, "pending")]


async def test_the_crash_of_an_attempt_ends_nothing_that_a_later_one_holds(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    await jobs.update([job], lock_expires_at=EXPIRED)
    await reap(jobs)
    (again,) = await jobs.claim(await jobs.register())
    assert (again["id"], again["epoch"], again["attempt"]) == (job, 3, 2)
    assert await reap(jobs) == 0


async def test_an_idle_worker_takes_back_a_few(jobs: JobTable) -> None:
    ids = await jobs.running(await jobs.register(), 8)
    await jobs.update(ids, lock_expires_at=EXPIRED)
    assert await jobs.conn.fetchval(jobs.worker_sql.micro_maintenance) == 5
