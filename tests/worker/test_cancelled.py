"""A job that was cancelled while it ran: whatever its attempt answers but success ends it, and nothing repeats it."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.jobs import JobTable
from tests.worker.test_settle import Settlement

COOPERATIVE, FORCED = "CancelledCooperatively", "CancelledForced"


@pytest.fixture
def settle(jobs: JobTable) -> Settlement:
    return Settlement(jobs)


@pytest.fixture
async def cancelled(jobs: JobTable) -> UUID:
    """A running job, at epoch 1, that somebody cancelled."""
    worker = await jobs.register()
    (job,) = await jobs.running(worker, unique_while_active="true", idempotency_key="'k'")
    await jobs.update([job], cancel_requested_at="clock_timestamp()", cancel_phase="1")
    return job


@pytest.mark.parametrize("verb", ["failed", "snoozed", "released"])
@pytest.mark.parametrize(("phase", "error_class"), [(1, COOPERATIVE), (2, FORCED)])
async def test_what_would_run_it_again_ends_it(
    jobs: JobTable, settle: Settlement, cancelled: UUID, verb: str, phase: int, error_class: str
) -> None:
    await jobs.update([cancelled], cancel_phase=str(phase))
    assert await getattr(settle, verb)((cancelled, 1)) == {cancelled}
    row = await jobs.row(cancelled)
    assert (row["status"], row["error_class"]) == ("cancelled", error_class)
    assert (row["epoch"], row["attempt"], row["cancel_phase"], row["lock_expires_at"]) == (1, 1, 0, None)
    assert row["finished_at"] is not None
    assert row["started_at"] is not None
    assert row["idempotency_freed"] is True
    assert await jobs.attempts(cancelled) == [], "the row itself tells of the attempt that ended the job"
    assert settle.counts is not None
    assert (settle.counts["repended"], settle.counts["failed"]) == (0, 0)


async def test_the_actors_own_words_are_kept(jobs: JobTable, settle: Settlement, cancelled: UUID) -> None:
    await settle.failed((cancelled, 1), kind="non_retryable", message="half of it is done")
    row = await jobs.row(cancelled)
    assert (row["status"], row["error_message"], row["error_traceback"]) == (
        "cancelled",
        "half of it is done",
        "traceback",
    )


async def test_success_is_success(jobs: JobTable, settle: Settlement, cancelled: UUID) -> None:
    await settle.succeeded((cancelled, 1))
    row = await jobs.row(cancelled)
    assert (row["status"], row["result"], row["cancel_phase"]) == ("succeeded", '"fine"', 0)


async def test_an_attempt_that_had_not_begun_is_refunded(jobs: JobTable, settle: Settlement, cancelled: UUID) -> None:
    await settle.released((cancelled, 1), ran=None)
    row = await jobs.row(cancelled)
    assert (row["status"], row["error_class"], row["attempt"]) == ("cancelled", "CancelledBeforeStart", 0)


async def test_an_abandoned_one_is_over_for_good(jobs: JobTable, settle: Settlement, cancelled: UUID) -> None:
    await settle.abandoned((cancelled, 1))
    row = await jobs.row(cancelled)
    assert (row["status"], row["error_class"], row["epoch"]) == ("abandoned", "CancelAbandoned", 1)
    assert row["finished_at"] is not None
    assert row["idempotency_freed"] is True
    (event,) = await jobs.events(cancelled)
    assert (event["to_state"], event["reason"]) == ("abandoned", "cancel")


async def test_the_dead_workers_row_is_cancelled_not_run_again(jobs: JobTable, cancelled: UUID) -> None:
    await jobs.update([cancelled], lock_expires_at="clock_timestamp() - interval '1 second'")
    assert (await jobs.tick())["reaped"] == 1
    row = await jobs.row(cancelled)
    assert (row["status"], row["epoch"]) == ("cancelled", 2)


async def test_the_others_of_a_group_go_their_own_way(jobs: JobTable, settle: Settlement, cancelled: UUID) -> None:
    worker = (await jobs.row(cancelled))["worker_id"]
    (other,) = await jobs.running(worker)
    assert await settle.released((cancelled, 1), (other, 1)) == {cancelled, other}
    assert (await jobs.row(other))["status"] == "pending"
    assert settle.counts is not None
    assert settle.counts["repended"] == 1


async def test_a_worker_hears_of_its_own_running_jobs_alone(jobs: JobTable, cancelled: UUID) -> None:
    worker = (await jobs.row(cancelled))["worker_id"]
    other = await jobs.register()
    (theirs,) = await jobs.running(other)
    await jobs.update([theirs], cancel_requested_at="clock_timestamp()")
    await jobs.running(worker)
    heard = await jobs.conn.fetch(jobs.worker_sql.cancelled, worker)
    assert [(record["id"], record["epoch"]) for record in heard] == [(cancelled, 1)]


async def test_force_names_the_attempt(jobs: JobTable, cancelled: UUID) -> None:
    await jobs.conn.execute(jobs.worker_sql.force_cancel, cancelled, 2)
    assert (await jobs.row(cancelled))["cancel_phase"] == 1
    await jobs.conn.execute(jobs.worker_sql.force_cancel, cancelled, 1)
    assert (await jobs.row(cancelled))["cancel_phase"] == 2
