"""The tick: any number of callers, one works; no pass can take another down."""

from __future__ import annotations

import asyncpg
import pytest

from taskqd import ResultUnavailable, TaskQ
from taskqd.domain.ids import new_uuid
from taskqd.storage.migrate import migrate_up
from tests.apps import basic
from tests.apps.basic import Work
from tests.jobs import JobTable
from tests.support import eventually

EXPIRED = "clock_timestamp() - interval '1 second'"


async def duty(jobs: JobTable) -> asyncpg.Record:
    record = await jobs.conn.fetchrow(f"select * from \"{jobs.schema}\".maintenance where duty = 'tick'")
    assert record is not None
    return record


async def test_a_tick_with_nothing_to_do(jobs: JobTable) -> None:
    assert await jobs.tick() == {
        "reaped": 0,
        "deadline_exceeded": 0,
        "batch_cancelled": 0,
        "batches_counted": 0,
        "workers_forgotten": 0,
        "results_expired": 0,
        "gates_repaired": 0,
    }
    done = await duty(jobs)
    assert done["last_started_at"] <= done["last_finished_at"]
    assert done["last_error"] is None


async def test_of_two_at_once_one_works_and_the_other_says_so_at_once(jobs: JobTable, dsn: str) -> None:
    other = await asyncpg.connect(dsn, command_timeout=10)
    try:
        async with other.transaction():
            assert (await JobTable(other, jobs.schema).tick())["reaped"] == 0
            assert await jobs.tick() == {"skipped": True}
        assert "reaped" in await jobs.tick()
    finally:
        await other.close()


async def test_the_lock_dies_with_its_caller(jobs: JobTable, dsn: str) -> None:
    other = await asyncpg.connect(dsn)
    await other.execute("begin")
    await JobTable(other, jobs.schema).tick()
    other.terminate()

    async def works() -> bool:
        return "reaped" in await jobs.tick()

    await eventually(works)


async def test_a_pass_that_fails_loses_only_its_own_work(jobs: JobTable) -> None:
    ids = await jobs.running(await jobs.register(), 3)
    await jobs.update(ids, lock_expires_at=EXPIRED)
    source = await jobs.conn.fetchval("select pg_get_functiondef($1::regproc)", f'"{jobs.schema}".expire_deadlines')
    await jobs.conn.execute(
        f'create or replace function "{jobs.schema}".expire_deadlines(max_rows integer) returns integer '
        "language plpgsql as $$ begin raise exception 'broken on purpose'; end $$"
    )
    assert await jobs.tick() == {
        "reaped": 3,
        "batch_cancelled": 0,
        "batches_counted": 0,
        "workers_forgotten": 0,
        "results_expired": 0,
        "gates_repaired": 0,
    }
    assert (await jobs.counts()) == {"pending": 3}
    assert (await duty(jobs))["last_error"] == "expire_deadlines: broken on purpose"
    assert (await duty(jobs))["last_error_at"] is not None
    await jobs.conn.execute(source)
    await jobs.tick()
    done = await duty(jobs)
    assert (done["last_error"], done["last_error_at"]) == (None, None), "an error that is over is not shown for ever"


@pytest.mark.parametrize("status", ["scheduled", "pending"])
async def test_a_queued_job_past_its_deadline_fails(jobs: JobTable, status: str) -> None:
    (late,) = await jobs.plant(status=f"'{status}'", schedule_to_close=EXPIRED, idempotency_key="'a'")
    (fine,) = await jobs.plant(status=f"'{status}'", schedule_to_close="clock_timestamp() + interval '1 hour'")
    assert (await jobs.tick())["deadline_exceeded"] == 1
    row = await jobs.row(late)
    assert (row["status"], row["error_class"], row["epoch"], row["attempt"]) == ("failed", "DeadlineExceeded", 1, 0)
    assert row["error_message"] == "schedule_to_close reached before next dispatch"
    assert row["finished_at"] is not None
    (event,) = await jobs.events(late)
    assert (event["from_state"], event["to_state"]) == (status, "failed")
    assert (await jobs.row(fine))["status"] == status


async def test_a_running_job_past_its_deadline_goes_on(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    await jobs.update([job], schedule_to_close=EXPIRED)
    assert (await jobs.tick())["deadline_exceeded"] == 0
    assert (await jobs.row(job))["status"] == "running"


async def test_workers_silent_for_a_day_are_forgotten_unless_they_hold_a_row(jobs: JobTable) -> None:
    long_ago = "clock_timestamp() - interval '25 hours'"
    await jobs.register(last_seen_at=long_ago)
    holding = await jobs.register(last_seen_at=long_ago)
    seen = await jobs.register()
    await jobs.running(holding)
    assert (await jobs.tick())["workers_forgotten"] == 1
    left = await jobs.conn.fetch(f'select id from "{jobs.schema}".workers')
    assert {record["id"] for record in left} == {holding, seen}


@pytest.mark.parametrize("limit", ["0", "10001", "null"])
async def test_a_limit_out_of_range_is_refused_and_named(jobs: JobTable, limit: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"reap_limit = .* must be between 1 and 10000"):
        await jobs.conn.fetchval(f'select "{jobs.schema}".tick({limit})')


async def test_anybody_may_call_it_from_sql(jobs: JobTable) -> None:
    assert await jobs.conn.fetchval(f"select \"{jobs.schema}\".tick() ? 'reaped'")


async def test_two_schemas_do_not_touch(jobs: JobTable, dsn: str) -> None:
    other_conn = await asyncpg.connect(dsn)
    name = f"{jobs.schema}_b"
    try:
        await migrate_up(other_conn, name)
        other = JobTable(other_conn, name)
        for one in (jobs, other):
            worker = await one.register()
            await one.update(await one.running(worker, 2), lock_expires_at=EXPIRED)
            await one.plant(status="'scheduled'")
            await one.plant(status="'cancelled'", idempotency_key="'the same'")
        untouched = await other.image()
        async with other.listening(dsn) as heard:
            async with jobs.conn.transaction():
                assert (await jobs.tick())["reaped"] == 2
                assert (await jobs.promote())["promoted"] == 1
                assert await other.image() == untouched
                async with other_conn.transaction():
                    assert (await other.tick())["reaped"] == 2, "the lock is this schema's own"
            await eventually(lambda: heard)
            assert len(heard) == 1, "the wake-up of its own reap and no other"
        assert await jobs.counts() == {"pending": 3, "cancelled": 1}
        assert await other.counts() == {"pending": 2, "scheduled": 1, "cancelled": 1}
    finally:
        await other_conn.execute(f'drop schema if exists "{name}" cascade')
        await other_conn.close()


async def test_results_are_forgotten_after_their_time(jobs: JobTable, tq: TaskQ) -> None:
    await jobs.store_actor(result_ttl="interval '1 hour'")
    worker = new_uuid()
    (kept,) = await jobs.running(worker)
    await jobs.update([kept], actor="'other'")
    handle = await tq.enqueue(basic.succeed, Work())
    await jobs.claim(worker)
    for job in (kept, handle.job_id):
        await jobs.succeed(job, result='"told"')
    assert await handle.wait(10) == "told"
    assert (await jobs.row(kept))["result_expires_at"] is None
    assert (await jobs.tick())["results_expired"] == 0
    await jobs.update([handle.job_id], result_expires_at="result_expires_at - interval '1 hour'")
    assert (await jobs.tick())["results_expired"] == 1
    with pytest.raises(ResultUnavailable, match="no longer kept"):
        await handle.wait(10)
    assert (await jobs.row(kept))["result"] == '"told"'
