"""Cancelling jobs and retrying ended ones, as the client asks for it."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from taskqd import (
    IdempotencyKeyTakenError,
    IllegalStateTransition,
    JobNotFoundError,
    JobStatus,
    TaskQ,
    new_uuid,
)
from tests.apps import basic
from tests.apps.basic import Work
from tests.jobs import JobTable

ENDS = ("succeeded", "failed", "cancelled", "crashed", "abandoned")


async def lock_held(conn: asyncpg.Connection) -> None:
    """Wait until somebody waits for a lock on this database."""
    async with asyncio.timeout(30):
        while not await conn.fetchval("select count(*) from pg_locks where not granted"):
            await asyncio.sleep(0.01)


# -- cancel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["pending", "scheduled"])
async def test_a_job_that_waits_is_cancelled_at_once(tq: TaskQ, jobs: JobTable, status: str) -> None:
    (job,) = await jobs.plant(status=f"'{status}'", unique_while_active="true", idempotency_key="'k'")
    result = await tq.cancel(job, "no longer wanted")
    assert (result.previous_status, result.new_status, result.cancellation_initiated) == (
        status,
        JobStatus.CANCELLED,
        True,
    )
    row = await jobs.row(job)
    assert (row["status"], row["error_class"], row["error_message"], row["epoch"]) == (
        "cancelled",
        "CancelledBeforeStart",
        "no longer wanted",
        1,
    )
    assert row["finished_at"] is not None
    assert row["idempotency_freed"] is True
    (event,) = await jobs.events(job)
    assert event == {"from_state": status, "to_state": "cancelled", "reason": "no longer wanted"}
    assert await jobs.claim(await jobs.register()) == []


async def test_a_running_job_is_asked_to_stop_once(tq: TaskQ, jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    first = await tq.cancel(job)
    assert (first.previous_status, first.new_status, first.cancellation_initiated) == (
        JobStatus.RUNNING,
        JobStatus.RUNNING,
        True,
    )
    row = await jobs.row(job)
    assert (row["status"], row["epoch"], row["cancel_phase"]) == ("running", 1, 1)
    assert row["cancel_requested_at"] is not None
    again = await tq.cancel(job)
    assert again.cancellation_initiated is False
    assert (await jobs.row(job))["cancel_requested_at"] == row["cancel_requested_at"]
    assert len(await jobs.events(job)) == 1


@pytest.mark.parametrize("status", ENDS)
async def test_a_job_that_has_ended_stays_as_it_is(tq: TaskQ, jobs: JobTable, status: str) -> None:
    (job,) = await jobs.plant(status=f"'{status}'", finished_at="now()")
    before = await jobs.image()
    result = await tq.cancel(job)
    assert (result.previous_status, result.new_status, result.cancellation_initiated) == (status, status, False)
    assert await jobs.image() == before
    assert await jobs.events(job) == []


async def test_a_job_that_does_not_exist(tq: TaskQ) -> None:
    with pytest.raises(JobNotFoundError):
        await tq.cancel(new_uuid())
    with pytest.raises(JobNotFoundError):
        await tq.retry(new_uuid())


@pytest.mark.parametrize("reason", ["x" * 1001, "nul \x00", "half \ud800"], ids=["long", "nul", "surrogate"])
async def test_a_reason_that_cannot_be_kept_is_refused_and_nothing_is_done(
    tq: TaskQ, jobs: JobTable, reason: str
) -> None:
    (job,) = await jobs.plant()
    with pytest.raises(ValueError, match="reason must be text of at most 1000 characters"):
        await tq.cancel(job, reason)
    assert (await jobs.row(job))["status"] == "pending"


async def test_a_handle_cancels_its_job(tq: TaskQ) -> None:
    handle = await tq.enqueue(basic.succeed, Work())
    assert (await handle.cancel("changed my mind")).new_status == JobStatus.CANCELLED
    assert await handle.status() == JobStatus.CANCELLED


async def test_a_cancellation_is_part_of_the_callers_transaction(
    tq: TaskQ, jobs: JobTable, conn: asyncpg.Connection
) -> None:
    (job,) = await jobs.plant()
    transaction = conn.transaction()
    await transaction.start()
    await tq.cancel(job, connection=conn)
    await transaction.rollback()
    assert (await jobs.row(job))["status"] == "pending"


# -- races, choreographed with locks ----------------------------------------------------------------

ROUNDS = 20


async def test_a_cancel_that_waits_for_a_claim_asks_the_attempt(
    tq: TaskQ, jobs: JobTable, other: asyncpg.Connection
) -> None:
    worker = await jobs.register()
    for _ in range(ROUNDS):
        (job,) = await jobs.plant()
        async with other.transaction():
            (claimed,) = await jobs.claim(worker, conn=other)
            cancelling = asyncio.ensure_future(tq.cancel(job))
            await lock_held(jobs.conn)
        result = await cancelling
        assert (claimed["id"], result.previous_status, result.new_status) == (job, JobStatus.RUNNING, JobStatus.RUNNING)
        row = await jobs.row(job)
        assert (row["status"], row["epoch"], row["cancel_phase"]) == ("running", 1, 1)


async def test_a_claim_passes_a_job_that_is_being_cancelled(
    tq: TaskQ, jobs: JobTable, other: asyncpg.Connection
) -> None:
    worker = await jobs.register()
    for _ in range(ROUNDS):
        (job,) = await jobs.plant()
        async with other.transaction():
            await tq.cancel(job, connection=other)
            assert await jobs.claim(worker) == []
        assert (await jobs.row(job))["status"] == "cancelled"


@pytest.mark.parametrize("again", [True, False], ids=["retried", "ended"])
async def test_a_cancel_that_waits_for_a_settlement_meets_what_it_left(
    tq: TaskQ, jobs: JobTable, other: asyncpg.Connection, again: bool
) -> None:
    worker = await jobs.register()
    expected = ("pending", "cancelled", True) if again else ("failed", "failed", False)
    for _ in range(ROUNDS):
        (job,) = await jobs.running(worker, max_attempts="9" if again else "1")
        async with other.transaction():
            columns = [job], [1], [0.1], ["RuntimeError"], ["it broke"], [None], [None], [None], [None]
            await other.fetchrow(jobs.worker_sql.settle_failed, *columns)
            cancelling = asyncio.ensure_future(tq.cancel(job))
            await lock_held(jobs.conn)
        result = await cancelling
        assert (result.previous_status, result.new_status, result.cancellation_initiated) == expected
        assert (await jobs.row(job))["status"] == expected[1]


async def test_a_settlement_passes_a_job_that_is_being_cancelled_and_meets_it_then(
    tq: TaskQ, jobs: JobTable, other: asyncpg.Connection
) -> None:
    worker = await jobs.register()
    for _ in range(ROUNDS):
        (job,) = await jobs.running(worker)
        columns = [job], [1], [0.1], [60.0]
        async with other.transaction():
            await tq.cancel(job, connection=other)
            skipped = await jobs.conn.fetchrow(jobs.worker_sql.settle_snoozed, *columns)
            assert skipped["ids"] is None
        await jobs.conn.fetchrow(jobs.worker_sql.settle_snoozed, *columns)
        assert (await jobs.row(job))["status"] == "cancelled"


async def test_a_cancel_that_waits_for_a_retry_ends_the_job_again(
    tq: TaskQ, jobs: JobTable, other: asyncpg.Connection
) -> None:
    for _ in range(ROUNDS):
        (job,) = await jobs.plant(status="'failed'", finished_at="now()", attempt="3")
        async with other.transaction():
            await tq.retry(job, connection=other)
            cancelling = asyncio.ensure_future(tq.cancel(job))
            await lock_held(jobs.conn)
        result = await cancelling
        assert (result.previous_status, result.new_status) == (JobStatus.PENDING, JobStatus.CANCELLED)
        row = await jobs.row(job)
        assert (row["status"], row["epoch"]) == ("cancelled", 2)


async def test_a_retry_that_waits_for_a_cancel_runs_the_job_again(
    tq: TaskQ, jobs: JobTable, other: asyncpg.Connection
) -> None:
    for _ in range(ROUNDS):
        (job,) = await jobs.plant()
        async with other.transaction():
            await tq.cancel(job, connection=other)
            retrying = asyncio.ensure_future(tq.retry(job))
            await lock_held(jobs.conn)
        await retrying
        row = await jobs.row(job)
        assert (row["status"], row["epoch"]) == ("pending", 2)
        await jobs.update([job], status="'succeeded'")  # out of the next round's way


# -- retry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ENDS)
async def test_an_ended_job_runs_again(tq: TaskQ, jobs: JobTable, status: str) -> None:
    (job,) = await jobs.plant(
        status=f"'{status}'",
        finished_at="now()",
        attempt="3",
        max_attempts="3",
        epoch="7",
        result="'1'",
        error_class="'E'",
        error_message="'m'",
        cancel_requested_at="now()",
        schedule_to_close="now() - interval '1 hour'",
    )
    await tq.retry(job)
    row = await jobs.row(job)
    assert (row["status"], row["epoch"], row["attempt"], row["max_attempts"]) == ("pending", 8, 3, 4)
    cleared = ("finished_at", "result", "error_class", "error_message", "cancel_requested_at", "schedule_to_close")
    assert [row[name] for name in cleared] == [None] * len(cleared)
    (ended,) = await jobs.attempts(job)
    assert (ended["epoch"], ended["outcome"], ended["error_class"]) == (7, status, "E")
    (claimed,) = await jobs.claim(await jobs.register())
    assert (claimed["id"], claimed["epoch"], claimed["attempt"]) == (job, 9, 4)


async def test_a_retry_keeps_the_attempts_that_are_left_and_a_deadline_to_come(tq: TaskQ, jobs: JobTable) -> None:
    (job,) = await jobs.plant(
        status="'failed'",
        finished_at="now()",
        attempt="1",
        max_attempts="5",
        schedule_to_close="now() + interval '1 hour'",
    )
    await tq.retry(job)
    row = await jobs.row(job)
    assert row["max_attempts"] == 5
    assert row["schedule_to_close"] > row["now"]


@pytest.mark.parametrize("status", ["pending", "scheduled", "running"])
async def test_a_job_that_has_not_ended_cannot_be_retried(tq: TaskQ, jobs: JobTable, status: str) -> None:
    (job,) = await jobs.plant(status=f"'{status}'")
    before = await jobs.image()
    with pytest.raises(IllegalStateTransition, match=f"is {status}: only a job that is abandoned, cancelled, crashed"):
        await tq.retry(job)
    assert await jobs.image() == before


async def test_a_key_that_another_job_took_meanwhile_refuses_the_retry(tq: TaskQ, jobs: JobTable) -> None:
    key = {"unique_while_active": "true", "idempotency_key": "'k'"}
    (old,) = await jobs.plant(**key, status="'failed'", idempotency_freed="true")
    await jobs.plant(**key)
    with pytest.raises(IdempotencyKeyTakenError, match="another job took its idempotency key"):
        await tq.retry(old)
    assert (await jobs.row(old))["status"] == "failed"


async def test_a_retried_job_holds_its_key_again(tq: TaskQ, jobs: JobTable) -> None:
    handle = await tq.enqueue(basic.succeed, Work(), idempotency_key="k", unique_while="active")
    await handle.cancel()
    await tq.retry(handle.job_id)
    again = await tq.enqueue(basic.succeed, Work(), idempotency_key="k", unique_while="active")
    assert (again.job_id, again.was_existing) == (handle.job_id, True)
