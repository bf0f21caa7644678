"""Hooks: an actor is told of the ends of its jobs, once, and of those that no worker saw at least once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from taskqd import TaskQ
from taskqd.worker.hooks import HookRunner
from taskqd.worker.outcome import Failed
from tests.apps import basic
from tests.apps.basic import Work
from tests.fleet import Execution, Fleet, events
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.attempts import make_attempt

WAIT = 40


async def told(fleet: Fleet, hook: str, count: int = 1) -> list[Execution]:
    """Wait until a hook was called so often."""
    return await fleet.wait_for_executions(count, hook, WAIT)


async def untold(jobs: JobTable) -> int:
    return int(await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".unseen_ends'))


async def test_success_is_told_once_with_row_and_result(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    handle = await tq.enqueue(basic.tells, Work(key="a", times=1))
    assert await handle.wait(WAIT) == "a"
    (call,) = await told(fleet, "on_success")
    assert (call.job, call.key, call.attempt) == (str(handle.job_id), "a", 2)
    assert fleet.executions("on_retry_exhausted") == [], "a failure that is retried is no end"


async def test_the_last_failure_is_told_with_the_error_itself_on_a_thread(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker()
    await tq.enqueue(basic.tells, Work(key="a", times=2))
    (call,) = await told(fleet, "on_retry_exhausted")
    assert (call.key, call.attempt) == ("LookupError a True", 2)


async def test_a_job_cancelled_while_it_ran_is_told_and_one_that_waited_is_not(fleet: Fleet, tq: TaskQ) -> None:
    waiting = await tq.enqueue(basic.tells, Work(key="waits"))
    await waiting.cancel()
    fleet.worker(env={"TASKQ_CANCELLATION_GRACE_PERIOD": "0.1"})
    running = await tq.enqueue(basic.tells, Work(seconds=60))
    await fleet.wait_for_executions(1)
    await running.cancel()
    (call,) = await told(fleet, "on_cancel")
    assert (call.job, call.key) == (str(running.job_id), "cancelled")
    assert len(fleet.executions("on_cancel")) == 1


@pytest.mark.parametrize(("key", "error"), [("hook raises", "RuntimeError"), ("hook hangs", "TimeoutError")])
async def test_a_hook_that_fails_is_logged_and_changes_nothing(fleet: Fleet, tq: TaskQ, key: str, error: str) -> None:
    worker = fleet.worker()
    handle = await tq.enqueue(basic.tells, Work(key=key))
    assert await handle.wait(WAIT) == key
    failed = await eventually(lambda: next(events(worker, "hook-failed"), None), WAIT)
    assert failed is not None
    assert (failed["hook"], failed["actor"], failed["job_id"]) == ("on_success", "tells", str(handle.job_id))
    assert error in failed["error"]
    assert await (await tq.enqueue(basic.succeed, Work(key="next"))).wait(WAIT) == "next"


# -- ends that no worker saw ------------------------------------------------------------------------


async def test_a_crash_and_a_deadline_are_told_by_a_live_worker(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker()
    await tq.enqueue(basic.tells, Work(key="first"))
    await told(fleet, "on_success")  # from here on the database knows that this actor has hooks
    dead = await jobs.register()
    (crashed,) = await jobs.plant(actor="'tells'", status="'running'", attempt="2", max_attempts="2", epoch="3")
    await jobs.update([crashed], worker_id=f"'{dead}'", lock_expires_at="clock_timestamp() - interval '1 second'")
    (late,) = await jobs.plant(
        actor="'tells'", status="'scheduled'", scheduled_at="'2100-01-01'", schedule_to_close="clock_timestamp()"
    )
    assert (await jobs.tick())["reaped"] == 1
    calls = await told(fleet, "on_retry_exhausted", 2)
    assert {(call.job, call.key.rpartition(" ")[0]) for call in calls} == {
        (str(crashed), "RecordedError WorkerCrashed: the worker stopped renewing its lease"),
        (str(late), "RecordedError DeadlineExceeded: schedule_to_close reached before next dispatch"),
    }
    await eventually(lambda: _none(jobs), WAIT)


async def test_an_actor_without_hooks_leaves_nothing_to_be_told(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register(), max_attempts="1")
    await jobs.update([job], lock_expires_at="clock_timestamp() - interval '1 second'")
    await jobs.tick()
    assert (await jobs.row(job))["status"] == "crashed"
    assert await untold(jobs) == 0


async def test_what_a_stopping_worker_has_not_told_another_tells(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    first = fleet.worker(concurrency=1)
    handle = await tq.enqueue(basic.tells_at_length, Work(key="hook hangs"))
    await handle.wait(WAIT)
    await told(fleet, "hanging")
    first.process.terminate()
    assert first.process.wait(60) == 0
    assert await untold(jobs) == 1
    fleet.worker()
    await told(fleet, "hanging", 2)


async def test_an_end_that_was_taken_and_never_told_is_taken_again(jobs: JobTable) -> None:
    (job,) = await jobs.plant(status="'failed'", finished_at="now()")
    await jobs.conn.execute(jobs.worker_sql.defer_ends, [job], [1], ["tells"], ["failed"])
    await jobs.conn.execute(jobs.worker_sql.defer_ends, [job], [1], ["tells"], ["failed"])
    take: Any = (jobs.worker_sql.take_unseen_ends, ["tells"], 8)
    assert len(await jobs.conn.fetch(*take, 60.0)) == 1
    assert await jobs.conn.fetch(*take, 60.0) == []
    await jobs.conn.execute(f"update \"{jobs.schema}\".unseen_ends set taken_until = now() - interval '1 second'")
    assert len(await jobs.conn.fetch(*take, 60.0)) == 1
    await jobs.conn.execute(jobs.worker_sql.forget_unseen_end, job, 1)
    assert await untold(jobs) == 0


async def _none(jobs: JobTable) -> bool:
    await asyncio.sleep(0)
    return await untold(jobs) == 0


async def test_an_end_whose_row_cannot_be_read_is_told_when_it_can(
    jobs: JobTable, pool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EXECUTION_LOG", str(tmp_path / "executions"))
    failures: list[BaseException] = []
    runner = HookRunner(
        pool,
        jobs.schema,
        {"tells": basic.tells},
        command_timeout=5,
        on_failure=lambda name, error, streak: failures.append(error),
    )
    find, calls = runner._reader.find, []

    async def away_at_first(job_id: UUID) -> Any:
        calls.append(job_id)
        if len(calls) == 1:
            raise ConnectionError("away")
        return await find(job_id)

    monkeypatch.setattr(runner._reader, "find", away_at_first)
    attempt = make_attempt("tells")
    await jobs.plant(status="'failed'", finished_at="now()")
    await jobs.conn.execute(f'update "{jobs.schema}".jobs set id = $1, payload = \'{{"key": ""}}\'', attempt.job_id)
    runner.start()
    runner.ended(Failed(attempt, 0.1, "LookupError", "m", None), "failed")
    try:
        await eventually((tmp_path / "executions").exists, WAIT)
    finally:
        await runner.finish(5)
    assert [type(error) for error in failures] == [ConnectionError]
    assert calls == [attempt.job_id] * 2
