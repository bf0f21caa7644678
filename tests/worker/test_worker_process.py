"""A real worker process runs jobs to the ends that their actors decide."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd import TaskQ
from taskqd.domain.errors import JobFailed, PayloadNotStorableError
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.support import eventually

WAIT = 30


async def failure(handle: Any) -> Any:
    with pytest.raises(JobFailed) as caught:
        await handle.wait(WAIT)
    return caught.value.row


async def test_async_and_plain_actors_run_and_return(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    worker = fleet.worker()
    assert await (await tq.enqueue(basic.succeed, Work(key="a"))).wait(WAIT) == "a"
    assert (await (await tq.enqueue(basic.plain, Work(key="b"))).wait(WAIT)).startswith("taskqd-actor")
    assert {(one.actor, one.pid) for one in fleet.executions()} == {("succeed", worker.pid), ("plain", worker.pid)}
    row = await jobs.row(UUID(fleet.executions()[0].job))
    assert row["created_at"] <= row["claimed_at"] <= row["finished_at"]
    assert row["started_at"] <= row["finished_at"]


async def test_a_burst_runs_each_job_once(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker(concurrency=8)
    ids = await jobs.plant(600)
    await jobs.conn.execute(jobs.scheduler_sql.wake)
    await eventually(lambda: _all_in(jobs, "succeeded", 600), WAIT)
    assert sorted(one.job for one in fleet.executions()) == sorted(map(str, ids))
    assert {(one.attempt, one.epoch) for one in fleet.executions()} == {(1, 1)}


async def test_no_more_handlers_run_at_once_than_allowed(fleet: Fleet, jobs: JobTable) -> None:
    fleet.worker(concurrency=3)
    await jobs.plant(12, payload="'{\"seconds\": 0.1}'")
    await jobs.conn.execute(jobs.scheduler_sql.wake)
    await eventually(lambda: _all_in(jobs, "succeeded", 12), WAIT)
    running = most = 0
    steps = sorted((one.at, step) for event, step in (("start", 1), ("end", -1)) for one in fleet.executions(event))
    for _, step in steps:
        running += step
        most = max(most, running)
    assert most == 3


async def test_a_failed_attempt_is_repeated_until_it_succeeds(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker()
    handle = await tq.enqueue(basic.fail, Work(key="a", times=2))
    assert await handle.wait(WAIT) == "at last"
    assert [(one.attempt, one.epoch) for one in fleet.executions()] == [(1, 1), (2, 3), (3, 5)]
    assert [one["outcome"] for one in await jobs.attempts(handle.job_id)] == ["retried", "retried"]


async def test_a_job_out_of_attempts_fails_with_its_last_error(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    row = await failure(await tq.enqueue(basic.fail, Work(key="a", times=9)))
    assert (row.status, row.error_class, row.error_message, row.attempt) == (
        "failed",
        "RuntimeError",
        "attempt 3 of a",
        3,
    )
    assert "in fail" in row.error_traceback
    assert len(fleet.executions()) == 3


@pytest.mark.parametrize("scheduled", [True, False], ids=["scheduler", "no-scheduler"])
async def test_a_retry_waits_its_backoff_and_comes_soon_after(fleet: Fleet, tq: TaskQ, scheduled: bool) -> None:
    fleet.worker()
    if scheduled:
        fleet.scheduler()
    handle = await tq.enqueue(basic.backs_off, Work())
    assert await handle.wait(WAIT) == "at last"
    first, second = fleet.executions()
    assert 1.4 < second.at - first.at < 1.5 + 10


async def test_a_classifier_may_give_a_job_more_attempts_than_its_policy(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    handle = await tq.enqueue(basic.classified, Work(key="for ever"))
    assert await handle.wait(WAIT) == "at last"
    assert len(fleet.executions()) == 3


async def test_an_error_that_is_never_retried(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    row = await failure(await tq.enqueue(basic.refuses, Work()))
    assert (row.error_class, row.attempt) == ("KeyError", 1)


@pytest.mark.parametrize("actor", [basic.snooze, basic.retry_after_free], ids=lambda ref: ref.name)
async def test_putting_a_job_off_costs_no_attempt(fleet: Fleet, tq: TaskQ, jobs: JobTable, actor: Any) -> None:
    fleet.worker()
    handle = await tq.enqueue(actor, Work(times=3))
    assert await handle.wait(WAIT) == 1
    row = await handle.row()
    assert (row.attempt, row.snooze_count, row.epoch) == (1, 3, 7)
    assert [one["outcome"] for one in await jobs.attempts(handle.job_id)] == ["snoozed"] * 3


async def test_a_snooze_waits_its_delay(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    fleet.scheduler()
    assert await (await tq.enqueue(basic.snooze, Work(times=1, seconds=1.0))).wait(WAIT) == 1
    first, second = fleet.executions()
    assert 0.9 < second.at - first.at < 11


async def test_a_retry_at_a_time_of_its_own_spends_attempts(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    assert await (await tq.enqueue(basic.retry_after, Work(times=1))).wait(WAIT) == 2
    row = await failure(await tq.enqueue(basic.retry_after, Work(times=2)))
    assert (row.error_class, row.attempt, row.snooze_count) == ("MaxAttemptsExceeded", 2, 0)


async def test_an_async_actor_past_its_time_is_cancelled(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    row = await failure(await tq.enqueue(basic.slow, Work(seconds=60)))
    assert (row.error_class, row.error_message, row.attempt) == ("TimeoutError", "start_to_close", 1)
    assert len(fleet.executions("cancelled")) == 1
    ran = (row.finished_at - row.started_at).total_seconds()
    assert 0.15 < ran < 5


async def test_a_plain_actor_past_its_time_is_recorded_then_and_keeps_its_slot(fleet: Fleet, tq: TaskQ) -> None:
    patient = {"TASKQ_CLEANUP_GRACE_PERIOD": "10", "TASKQ_LOCK_LEASE": "20"}  # or it makes way for one with a free slot
    fleet.worker(concurrency=1, env=patient)
    late = await tq.enqueue(basic.slow_plain, Work(seconds=2.0))
    row = await failure(late)
    assert (row.error_class, row.error_message) == ("TimeoutError", "start_to_close")
    assert fleet.executions("told") == [], "the thread still runs when the failure is on record"
    after = await tq.enqueue(basic.succeed, Work(key="next"))
    assert await after.wait(WAIT) == "next"
    (thread,), (following,) = fleet.executions("told"), fleet.executions("end")
    assert thread.at <= following.at, "one slot: the next job had to wait for the thread"


async def test_the_jobs_own_limit_counts(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    handle = await tq.enqueue(basic.succeed, Work(seconds=60), start_to_close=timedelta(milliseconds=100))
    await eventually(lambda: len(fleet.executions()) >= 2, WAIT)  # timed out and tried again
    assert (await handle.row()).error_message == "start_to_close"


async def test_context_variables_do_not_leak(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(concurrency=2)
    for actor in (basic.leaky, basic.leaky_plain):
        handles = [await tq.enqueue(actor, Work(key=f"k{n}")) for n in range(20)]
        assert {await handle.wait(WAIT) for handle in handles} == {""}


async def test_a_result_that_is_too_large_fails_the_job_for_good(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(env={"TASKQ_RESULT_MAX_BYTES": "2000"})
    assert len(await (await tq.enqueue(basic.big, Work(size=1900))).wait(WAIT)) == 1900
    row = await failure(await tq.enqueue(basic.big, Work(size=2000)))
    assert (row.error_class, row.attempt) == ("ResultTooLarge", 1)
    assert "2002 bytes, the limit is 2000 (TASKQ_RESULT_MAX_BYTES)" in row.error_message


async def test_a_payload_that_does_not_fit_fails_at_dispatch_for_good(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker()
    (job,) = await jobs.plant(actor="'strict'", payload='\'{"number": "hunter2"}\'')
    row = await failure(tq.handle(job, basic.strict))
    assert (row.error_class, row.attempt) == ("PayloadValidationError", 1)
    assert "number" in row.error_message
    assert "hunter2" not in json.dumps([row.error_message, row.error_traceback])
    assert fleet.executions() == []


async def test_a_payload_with_a_nul_is_refused_at_enqueue(tq: TaskQ, jobs: JobTable) -> None:
    with pytest.raises(PayloadNotStorableError, match="NUL"):
        await tq.enqueue(basic.succeed, Work(key="a\x00b"))
    assert await jobs.counts() == {}


async def test_what_cannot_be_stored_never_blocks_an_end(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    row = await failure(await tq.enqueue(basic.nul_message, Work()))
    assert row.error_message == "nul \\x00 and lone surrogate \\ud800"
    row = await failure(await tq.enqueue(basic.nul_result, Work()))
    assert row.error_class == "OutcomeNotStorable"


async def test_actors_that_misbehave_take_no_slot_with_them(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(concurrency=1)
    for actor, error in (
        (basic.unprintable, "Unprintable"),
        (basic.exhausted, "StopIteration"),
        (basic.exits, "SystemExit"),
    ):
        assert (await failure(await tq.enqueue(actor, Work()))).error_class == error
    assert await (await tq.enqueue(basic.cancels_itself, Work())).wait(WAIT) == "returned"
    assert await (await tq.enqueue(basic.succeed, Work(key="still here"))).wait(WAIT) == "still here"
    assert list(events(worker, "consumer-crashed")) == []


async def test_an_actor_enqueues_further_jobs(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    child = await (await tq.enqueue(basic.parent, Work(key="a"))).wait(WAIT)
    assert await tq.handle(UUID(child), basic.succeed).wait(WAIT) == "child of a"


# -- latency ----------------------------------------------------------------------------------------


async def test_a_notification_wakes_an_idle_worker_long_before_its_poll(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(env={"TASKQ_NOTIFY_POLL_INTERVAL": "60"})
    began = time.monotonic()
    for number in range(5):
        assert await (await tq.enqueue(basic.succeed, Work(key=str(number)))).wait(WAIT) == str(number)
    assert time.monotonic() - began < 10


async def test_without_notifications_it_polls(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker(env={"TASKQ_NOTIFY_ENABLED": "false", "TASKQ_POLL_INTERVAL": "0.2"})
    names = await jobs.conn.fetch(
        "select application_name from pg_stat_activity where application_name like $1", f"taskqd/{jobs.schema}/%"
    )
    assert not any(record[0].endswith("/notify") for record in names)
    (job,) = await jobs.plant()  # no notification is sent
    assert await tq.handle(job, basic.succeed).wait(10) == ""


async def test_a_lost_notification_costs_one_poll_interval(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker(env={"TASKQ_NOTIFY_POLL_INTERVAL": "0.5"})
    (job,) = await jobs.plant()
    assert await tq.handle(job, basic.succeed).wait(10) == ""


async def test_jobs_of_others_are_left_alone_and_cost_nothing(
    fleet: Fleet, tq: TaskQ, jobs: JobTable, conn: asyncpg.Connection
) -> None:
    """A worker that does not know an actor neither takes its jobs nor asks for them again and again."""
    worker = fleet.worker(actors="tests.apps.basic:few", env={"TASKQ_NOTIFY_POLL_INTERVAL": "30"})
    await jobs.plant(300, actor="'stranger'")
    assert await (await tq.enqueue(basic.succeed, Work(key="known"))).wait(WAIT) == "known"
    await tq.close()
    await asyncio.sleep(0.5)
    before = await _transactions(conn)
    await asyncio.sleep(1.5)
    used = await _transactions(conn) - before
    assert used < 30, "an idle worker beats twice a second and polls never"
    assert await jobs.counts() == {"pending": 300, "succeeded": 1}
    row = await jobs.conn.fetchrow(
        f"select max(epoch), max(attempt) from \"{jobs.schema}\".jobs where actor = 'stranger'"
    )
    assert tuple(row) == (0, 0)
    assert worker.process.poll() is None
    fleet.worker(actors="tests.apps.basic:actors")
    await jobs.update(
        [
            record["id"]
            for record in await jobs.conn.fetch(f"select id from \"{jobs.schema}\".jobs where actor = 'stranger'")
        ],
        actor="'plain'",
    )
    await jobs.conn.execute(jobs.scheduler_sql.wake)
    await eventually(lambda: _all_in(jobs, "succeeded", 301), WAIT)


async def _transactions(conn: asyncpg.Connection) -> int:
    """Transactions of the database so far, this session's own left out as far as they are known."""
    await conn.execute("select pg_stat_clear_snapshot()")
    return int(
        await conn.fetchval(
            "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
        )
    )


async def _all_in(jobs: JobTable, status: str, count: int) -> bool:
    return await jobs.counts() == {status: count}
