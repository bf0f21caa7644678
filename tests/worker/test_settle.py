"""The settlement statements: what each writes, and that an attempt which is no longer the row's writes nothing."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.worker.lane_claims import NO_CLAIM
from tests.jobs import JobTable
from tests.support import eventually


class Settlement:
    """Sends the settlement statements for single or several attempts; answers the ids they applied to."""

    def __init__(self, jobs: JobTable) -> None:
        self.jobs = jobs
        self.counts: asyncpg.Record | None = None

    async def succeeded(self, *pairs: tuple[UUID, int], result: str | None = '"fine"') -> set[UUID]:
        seconds, results = [1.5] * len(pairs), [result] * len(pairs)
        applied = await self.jobs.conn.fetchval(
            self.jobs.worker_sql.settle_succeeded, *_columns(pairs), seconds, results, *NO_CLAIM
        )
        return set(applied or ())

    async def failed(
        self,
        *pairs: tuple[UUID, int],
        kind: str | None = None,
        delay: float | None = None,
        exhausted: str | None = None,
        message: str = "it broke",
    ) -> set[UUID]:
        count = len(pairs)
        return await self._counted(
            self.jobs.worker_sql.settle_failed,
            *_columns(pairs),
            [1.5] * count,
            ["RuntimeError"] * count,
            [message] * count,
            ["traceback"] * count,
            [kind] * count,
            [delay] * count,
            [exhausted] * count,
        )

    async def snoozed(self, *pairs: tuple[UUID, int], delay: float = 60.0) -> set[UUID]:
        return await self._counted(
            self.jobs.worker_sql.settle_snoozed, *_columns(pairs), [1.5] * len(pairs), [delay] * len(pairs)
        )

    async def released(self, *pairs: tuple[UUID, int], ran: float | None = 1.5) -> set[UUID]:
        return await self._counted(
            self.jobs.worker_sql.settle_released, *_columns(pairs), [ran] * len(pairs), ["worker_shutdown"] * len(pairs)
        )

    async def abandoned(self, *pairs: tuple[UUID, int]) -> set[UUID]:
        return await self._counted(self.jobs.worker_sql.settle_abandoned, *_columns(pairs), [1.5] * len(pairs))

    async def _counted(self, statement: str, *arguments: Any) -> set[UUID]:
        self.counts = await self.jobs.conn.fetchrow(statement, *arguments)
        assert self.counts is not None
        return set(self.counts["ids"] or ())


def _columns(pairs: tuple[tuple[UUID, int], ...]) -> tuple[list[UUID], list[int]]:
    return [job_id for job_id, _ in pairs], [epoch for _, epoch in pairs]


VERBS = ("succeeded", "failed", "snoozed", "released", "abandoned")
ON_EVERY_VERB = pytest.mark.parametrize("verb", VERBS)


@pytest.fixture
def settle(jobs: JobTable) -> Settlement:
    return Settlement(jobs)


@pytest.fixture
async def worker(jobs: JobTable) -> UUID:
    return await jobs.register()


# -- guards -----------------------------------------------------------------------------------------


@ON_EVERY_VERB
@pytest.mark.parametrize("epoch", [0, 2], ids=["older", "never-issued"])
async def test_another_epoch_changes_nothing(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str, epoch: int
) -> None:
    (job,) = await jobs.running(worker)
    before = await jobs.image()
    assert await getattr(settle, verb)((job, epoch)) == set()
    assert await jobs.image() == before


@ON_EVERY_VERB
@pytest.mark.parametrize("end", VERBS)
async def test_a_row_that_is_not_running_changes_nothing(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str, end: str
) -> None:
    (job,) = await jobs.running(worker)
    assert await getattr(settle, end)((job, 1)) == {job}
    before = await jobs.image()
    epoch = (await jobs.row(job))["epoch"]
    assert await getattr(settle, verb)((job, epoch)) == set(), "the present epoch, but nobody's"
    assert await getattr(settle, verb)((job, 1)) == set(), "the attempt's own epoch, settled already"
    assert await jobs.image() == before


@ON_EVERY_VERB
async def test_an_attempt_that_was_claimed_again_changes_nothing(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str
) -> None:
    (job,) = await jobs.running(worker)
    await settle.released((job, 1))
    (again,) = await jobs.claim(new_uuid())
    assert (again["id"], again["epoch"], again["attempt"]) == (job, 3, 2)
    before = await jobs.image()
    assert await getattr(settle, verb)((job, 1)) == set()
    assert await jobs.image() == before


@ON_EVERY_VERB
async def test_a_missing_row_is_no_error(jobs: JobTable, settle: Settlement, worker: UUID, verb: str) -> None:
    (job,) = await jobs.running(worker)
    assert await getattr(settle, verb)((new_uuid(), 1), (job, 1)) == {job}


@ON_EVERY_VERB
async def test_a_lapsed_lease_that_nobody_took_still_settles(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str
) -> None:
    (job,) = await jobs.running(worker)
    await jobs.update([job], lock_expires_at="clock_timestamp() - interval '1 minute'")
    assert await getattr(settle, verb)((job, 1)) == {job}


@ON_EVERY_VERB
async def test_a_locked_row_is_skipped_and_the_others_settle(
    jobs: JobTable, settle: Settlement, worker: UUID, dsn: str, verb: str
) -> None:
    ids = await jobs.running(worker, 5)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', ids[2])
            applied = await getattr(settle, verb)(*((job, 1) for job in ids))
        assert applied == set(ids) - {ids[2]}
        assert (await jobs.row(ids[2]))["status"] == "running"
        assert await getattr(settle, verb)((ids[2], 1)) == {ids[2]}
    finally:
        await other.close()


@ON_EVERY_VERB
async def test_no_verb_lowers_the_epoch_and_only_the_own_end_keeps_it(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str
) -> None:
    (job,) = await jobs.running(worker)
    await getattr(settle, verb)((job, 1))
    row = await jobs.row(job)
    assert row["epoch"] == (1 if verb in ("succeeded", "abandoned") else 2)
    assert row["lock_expires_at"] is None


# -- success ----------------------------------------------------------------------------------------


async def test_success_ends_the_job_with_its_result(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker)
    await settle.succeeded((job, 1))
    row = await jobs.row(job)
    assert (row["status"], row["result"], row["result_size_bytes"]) == ("succeeded", '"fine"', 6)
    assert (row["epoch"], row["attempt"], row["worker_id"]) == (1, 1, worker)
    assert 1.4 < (row["finished_at"] - row["started_at"]).total_seconds() < 1.7
    assert await jobs.attempts(job) == [], "a job that ends at its first attempt leaves no history row"


async def test_the_error_of_an_earlier_attempt_is_cleared(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker)
    await settle.failed((job, 1))
    assert (await jobs.row(job))["error_class"] == "RuntimeError"
    await jobs.claim(worker)
    await settle.succeeded((job, 3))
    row = await jobs.row(job)
    assert (row["error_class"], row["error_message"], row["error_traceback"]) == (None, None, None)


async def test_an_end_frees_the_key_of_a_job_that_holds_it_only_while_active(
    jobs: JobTable, settle: Settlement, worker: UUID
) -> None:
    (active,) = await jobs.running(worker, unique_while_active="true", idempotency_key="'a'")
    (stored,) = await jobs.running(worker, idempotency_key="'b'")
    await settle.succeeded((active, 1), (stored, 1))
    assert (await jobs.row(active))["idempotency_freed"] is True
    assert (await jobs.row(stored))["idempotency_freed"] is False


async def test_a_retry_keeps_the_key(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, unique_while_active="true", idempotency_key="'a'")
    for verb, epoch in (("failed", 1), ("snoozed", 3), ("released", 5)):
        await getattr(settle, verb)((job, epoch))
        assert (await jobs.row(job))["idempotency_freed"] is False
        await jobs.update([job], status="'pending'", scheduled_at="clock_timestamp()")
        await jobs.claim(worker)
    await settle.failed((job, 7), kind="non_retryable")
    assert (await jobs.row(job))["idempotency_freed"] is True


# -- failure ----------------------------------------------------------------------------------------


async def test_a_failure_waits_on_the_rows_own_curve(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, retry_base="30", retry_jitter="0")
    await settle.failed((job, 1))
    row = await jobs.row(job)
    assert (row["status"], row["attempt"], row["epoch"]) == ("scheduled", 1, 2)
    assert 29 < (row["scheduled_at"] - row["now"]).total_seconds() <= 30
    assert (row["worker_id"], row["claimed_at"], row["started_at"], row["finished_at"]) == (None, None, None, None)
    (attempt,) = await jobs.attempts(job)
    assert (attempt["epoch"], attempt["attempt"], attempt["outcome"]) == (1, 1, "retried")
    assert (attempt["worker_id"], attempt["error_class"], attempt["error_message"]) == (
        worker,
        "RuntimeError",
        "it broke",
    )
    assert 1.4 < (attempt["finished_at"] - attempt["started_at"]).total_seconds() < 1.7


@pytest.mark.parametrize(
    ("backoff", "attempt", "seconds"),
    [("exponential", 1, 2), ("exponential", 3, 8), ("exponential", 60, 50), ("linear", 3, 6), ("fixed", 9, 2)],
)
async def test_the_curve(jobs: JobTable, backoff: str, attempt: int, seconds: int) -> None:
    exact = await jobs.conn.fetchval(f'select "{jobs.schema}".retry_delay($1, $2, 2, 50, 0)', attempt, backoff)
    assert exact.total_seconds() == seconds


@pytest.mark.parametrize(("jitter", "low", "high"), [(0.5, 5, 15), (1, 0, 20), (-1, 0, 10)])
async def test_jitter_stays_in_its_range_and_spreads(jobs: JobTable, jitter: float, low: float, high: float) -> None:
    drawn = await jobs.conn.fetch(
        f"select extract(epoch from \"{jobs.schema}\".retry_delay(1, 'fixed', 10, 20, $1))::float8"
        " from generate_series(1, 300)",
        jitter,
    )
    values = [record[0] for record in drawn]
    assert low <= min(values) <= max(values) <= high
    assert max(values) - min(values) > (high - low) / 2


async def test_no_delay_puts_it_straight_back(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker)
    await settle.failed((job, 1))
    assert (await jobs.row(job))["status"] == "pending"
    assert settle.counts is not None
    assert (settle.counts["repended"], settle.counts["failed"]) == (1, 0)


async def test_a_delay_of_the_attempts_own_replaces_the_curve(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, retry_base="3600", retry_cap="3600")
    await settle.failed((job, 1), delay=5.0)
    row = await jobs.row(job)
    assert 4 < (row["scheduled_at"] - row["now"]).total_seconds() <= 5


async def test_the_last_attempt_ends_the_job(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, max_attempts="1")
    await settle.failed((job, 1))
    row = await jobs.row(job)
    assert (row["status"], row["error_class"], row["error_message"]) == ("failed", "RuntimeError", "it broke")
    assert (row["attempt"], row["epoch"], row["worker_id"]) == (1, 1, worker)
    assert row["finished_at"] is not None
    assert await jobs.attempts(job) == [], "the row itself tells of the attempt that ended the job"
    assert settle.counts is not None
    assert (settle.counts["repended"], settle.counts["failed"]) == (0, 1)


async def test_an_exhausted_request_to_retry_says_so(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, max_attempts="1")
    await settle.failed((job, 1), delay=5.0, exhausted="MaxAttemptsExceeded")
    assert (await jobs.row(job))["error_class"] == "MaxAttemptsExceeded"


@pytest.mark.parametrize(
    ("columns", "kind", "status"),
    [
        ({"retry_kind": "'non_retryable'", "max_attempts": "9"}, None, "failed"),
        ({"max_attempts": "9"}, "non_retryable", "failed"),
        ({"retry_kind": "'indefinite'", "max_attempts": "1"}, None, "pending"),
        ({"retry_kind": "'indefinite'"}, "non_retryable", "failed"),
        ({"max_attempts": "1"}, "indefinite", "pending"),
        ({"retry_kind": "'non_retryable'", "max_attempts": "9"}, "transient", "pending"),
        ({"retry_kind": "'indefinite'", "max_attempts": "1"}, "transient", "failed"),
    ],
)
async def test_who_may_retry(
    jobs: JobTable, settle: Settlement, worker: UUID, columns: dict[str, str], kind: str | None, status: str
) -> None:
    (job,) = await jobs.running(worker, **columns)
    await settle.failed((job, 1), kind=kind)
    assert (await jobs.row(job))["status"] == status


async def test_a_retry_past_the_deadline_fails_instead(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(
        worker, retry_base="30", retry_jitter="0", schedule_to_close="clock_timestamp() + interval '29 seconds'"
    )
    await settle.failed((job, 1))
    row = await jobs.row(job)
    assert (row["status"], row["error_class"]) == ("failed", "DeadlineExceeded")
    assert row["error_message"] == "schedule_to_close reached before next dispatch"


async def test_success_past_the_deadline_is_success(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, schedule_to_close="clock_timestamp() + interval '1 hour'")
    await jobs.update([job], schedule_to_close="clock_timestamp() - interval '1 hour'")
    await settle.succeeded((job, 1))
    assert (await jobs.row(job))["status"] == "succeeded"


# -- snooze -----------------------------------------------------------------------------------------


async def test_a_snooze_gives_the_attempt_back_and_never_its_epoch(
    jobs: JobTable, settle: Settlement, worker: UUID
) -> None:
    (job,) = await jobs.running(worker, max_attempts="1", error_class="'Earlier'")
    await settle.snoozed((job, 1), delay=5.0)
    row = await jobs.row(job)
    assert (row["status"], row["attempt"], row["epoch"], row["snooze_count"]) == ("scheduled", 0, 2, 1)
    assert 4 < (row["scheduled_at"] - row["now"]).total_seconds() <= 5
    assert (row["worker_id"], row["claimed_at"], row["finished_at"]) == (None, None, None)
    (attempt,) = await jobs.attempts(job)
    assert (attempt["epoch"], attempt["attempt"], attempt["outcome"]) == (1, 1, "snoozed")
    assert row["error_class"] == "Earlier"


async def test_a_snooze_of_nothing_goes_straight_back(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker)
    await settle.snoozed((job, 1), delay=0.0)
    assert (await jobs.row(job))["status"] == "pending"
    assert settle.counts is not None
    assert settle.counts["repended"] == 1


async def test_a_snooze_past_the_deadline_fails(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, schedule_to_close="clock_timestamp() + interval '1 minute'")
    await settle.snoozed((job, 1), delay=61.0)
    row = await jobs.row(job)
    assert (row["status"], row["error_class"], row["attempt"], row["epoch"]) == ("failed", "DeadlineExceeded", 1, 1)
    assert await jobs.attempts(job) == []
    assert settle.counts is not None
    assert settle.counts["failed"] == 1


# -- release ----------------------------------------------------------------------------------------


async def test_an_unstarted_row_is_refunded_and_leaves_no_trace(
    jobs: JobTable, settle: Settlement, worker: UUID
) -> None:
    (job,) = await jobs.running(worker)
    await settle.released((job, 1), ran=None)
    row = await jobs.row(job)
    assert (row["status"], row["attempt"], row["epoch"], row["interrupt_count"]) == ("pending", 0, 2, 0)
    assert (row["worker_id"], row["claimed_at"], row["started_at"]) == (None, None, None)
    assert await jobs.attempts(job) == []


async def test_a_started_row_is_an_interrupt_and_never_the_end_of_a_job(
    jobs: JobTable, settle: Settlement, worker: UUID
) -> None:
    (job,) = await jobs.running(worker, max_attempts="1")
    for round_ in range(1, 4):
        assert await settle.released((job, 2 * round_ - 1)) == {job}
        row = await jobs.row(job)
        assert (row["status"], row["attempt"], row["interrupt_count"]) == ("pending", round_, round_)
        assert row["error_class"] is None
        await jobs.claim(worker)
    assert [(one["outcome"], one["cause"]) for one in await jobs.attempts(job)] == [
        ("interrupted", "worker_shutdown")
    ] * 3


async def test_a_release_wakes_the_others(jobs: JobTable, settle: Settlement, worker: UUID, dsn: str) -> None:
    (job,) = await jobs.running(worker)
    async with jobs.listening(dsn) as heard:
        await settle.released((job, 1))
        await eventually(lambda: heard)


# -- where a hand-back goes -------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["failed", "snoozed", "released"])
async def test_a_hand_back_goes_where_the_actor_is_served_now(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str
) -> None:
    await jobs.store_actor(queue="'elsewhere'")
    (moved,) = await jobs.running(worker, lane="''")
    (own,) = await jobs.plant(actor="'unheard of'", route="'odd'")
    assert [one["id"] for one in await jobs.claim(worker, routes=("odd",), known=("unheard of",))] == [own]
    await getattr(settle, verb)((moved, 1), (own, 1))
    assert ((await jobs.row(moved))["route"], (await jobs.row(moved))["queue"]) == ("elsewhere", "default")
    assert (await jobs.row(own))["route"] == "default"


async def test_attempts_never_exceed_epochs(jobs: JobTable, settle: Settlement, worker: UUID) -> None:
    (job,) = await jobs.running(worker, max_attempts="100")
    history = []
    for step in range(12):
        verb = VERBS[1 + step % 3]
        before = await jobs.row(job)
        await getattr(settle, verb)((job, before["epoch"]))
        after = await jobs.row(job)
        assert after["epoch"] == before["epoch"] + 1
        await jobs.update([job], status="'pending'", scheduled_at="clock_timestamp()")
        (again,) = await jobs.claim(worker)
        assert again["epoch"] == after["epoch"] + 1
        assert again["attempt"] <= again["epoch"]
        history.append(before["epoch"])
    assert history == sorted(set(history)), "no epoch was issued twice"


# -- what the caller is told about the rest ---------------------------------------------------------


async def _state(jobs: JobTable, job: UUID, epoch: int) -> asyncpg.Record:
    record = await jobs.conn.fetchrow(jobs.worker_sql.settle_state, [job], [epoch])
    assert record is not None
    return record


@pytest.mark.parametrize(
    ("verb", "same_epoch", "status", "outcome"),
    [
        ("succeeded", True, "succeeded", None),
        ("failed", False, "pending", "retried"),
        ("snoozed", False, "scheduled", "snoozed"),
        ("released", False, "pending", "interrupted"),
    ],
)
async def test_the_state_tells_a_replay_from_a_loss(
    jobs: JobTable, settle: Settlement, worker: UUID, verb: str, same_epoch: bool, status: str, outcome: str | None
) -> None:
    (job,) = await jobs.running(worker)
    assert (await _state(jobs, job, 1))["held"] is True
    await getattr(settle, verb)((job, 1))
    state = await _state(jobs, job, 1)
    assert (state["held"], state["same_epoch"], state["status"], state["outcome"]) == (
        False,
        same_epoch,
        status,
        outcome,
    )


async def test_the_history_of_an_earlier_attempt_is_no_answer_for_a_later_one(
    jobs: JobTable, settle: Settlement, worker: UUID
) -> None:
    (job,) = await jobs.running(worker)
    await settle.failed((job, 1))
    await jobs.claim(worker)
    state = await _state(jobs, job, 3)
    assert (state["held"], state["outcome"]) == (True, None)


async def test_the_state_of_a_job_that_is_gone(jobs: JobTable) -> None:
    state = await _state(jobs, new_uuid(), 1)
    assert (state["held"], state["same_epoch"], state["status"], state["outcome"]) == (False, False, None, None)
