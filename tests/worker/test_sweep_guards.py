"""What single guards of the statements that sweep are for, where no other test tells."""

from __future__ import annotations

import json
from uuid import UUID

import asyncpg
import pytest

from tests.jobs import JobTable
from tests.scheduler.test_batch_counters import Batches
from tests.worker.test_lanes import CAPPED, capped

PAST = "clock_timestamp() - interval '1 second'"
AHEAD = "clock_timestamp() + interval '1 hour'"


async def idle(jobs: JobTable) -> tuple[int, int]:
    """What an idle worker does: how many rows it takes back, and how many it makes claimable."""
    row = await jobs.conn.fetchrow(jobs.worker_sql.micro_maintenance)
    return row["reaped"], row["promoted"]


async def known(jobs: JobTable, *, has_hooks: bool) -> None:
    """Let the database know the actor."""
    await jobs.store_actor(has_hooks=has_hooks)


async def untold(jobs: JobTable) -> list[tuple[UUID, int, str]]:
    """The ends that nobody has been told of."""
    rows = await jobs.conn.fetch(f'select job_id, epoch, status::text from "{jobs.schema}".unseen_ends')
    return [tuple(row) for row in rows]


async def expire(jobs: JobTable, limit: int = 10) -> int:
    return await jobs.conn.fetchval(f'select "{jobs.schema}".expire_deadlines($1)', limit)


# -- idle workers -----------------------------------------------------------------------------------


async def test_an_idle_worker_makes_claimable_what_is_due_and_nothing_else(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    due, held = await jobs.plant(2, status="'scheduled'", scheduled_at=PAST)
    (early,) = await jobs.plant(1, status="'scheduled'", scheduled_at=AHEAD)
    (ended,) = await jobs.plant(1, status="'succeeded'", scheduled_at=PAST)
    async with other.transaction():
        await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', held)
        assert await idle(jobs) == (0, 1)
    found = [(await jobs.row(job))["status"] for job in (due, held, early, ended)]
    assert found == ["pending", "scheduled", "scheduled", "succeeded"]
    assert await idle(jobs) == (0, 1)


async def test_a_worker_that_holds_a_row_is_not_forgotten_at_its_end(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker)
    workers = f'select count(*) from "{jobs.schema}".workers'
    await jobs.conn.execute(jobs.worker_sql.unregister_worker, worker)
    assert await jobs.conn.fetchval(workers) == 1
    await jobs.succeed(job)
    await jobs.conn.execute(jobs.worker_sql.unregister_worker, worker)
    assert await jobs.conn.fetchval(workers) == 0


async def test_ends_are_told_to_their_own_actors_by_one_teller(jobs: JobTable, other: asyncpg.Connection) -> None:
    ids = await jobs.plant(3, status="'failed'")
    await jobs.conn.execute(jobs.worker_sql.defer_ends, ids, [1] * 3, ["tells", "tells", "others"], ["failed"] * 3)
    take = (jobs.worker_sql.take_unseen_ends, ["tells"], 1, 60.0)
    async with other.transaction():
        assert [row["job_id"] for row in await other.fetch(*take)] == ids[:1]
        assert [row["job_id"] for row in await jobs.conn.fetch(*take)] == ids[1:2]
    assert await jobs.conn.fetch(*take) == []


# -- the reaper, and the release of dead workers ----------------------------------------------------


async def test_what_is_taken_back_holds_nothing_and_keeps_its_key(jobs: JobTable) -> None:
    await jobs.gate("a:succeed", 3)
    columns = {"lane": "'a:succeed'", "unique_while_active": "true", "idempotency_key": "'k'"}
    (job,) = await jobs.plant(1, **columns)
    await jobs.claim_lanes(await jobs.register(), 1, CAPPED)
    await jobs.update([job], lock_expires_at=PAST)
    assert (await jobs.tick())["reaped"] == 1
    row = await jobs.row(job)
    assert (row["status"], row["held_gates"], row["lock_expires_at"]) == ("pending", None, None)
    assert row["idempotency_freed"] is False


@pytest.mark.parametrize("has_hooks", [True, False])
async def test_of_what_is_taken_back_ends_are_kept_for_actors_with_hooks(jobs: JobTable, has_hooks: bool) -> None:
    await known(jobs, has_hooks=has_hooks)
    worker = await jobs.register()
    (again,) = await jobs.running(worker)
    (ended,) = await jobs.running(worker, max_attempts="1")
    await jobs.update([again, ended], lock_expires_at=PAST)
    assert (await jobs.tick())["reaped"] == 2
    assert await untold(jobs) == ([(ended, 2, "crashed")] if has_hooks else [])
    assert (await jobs.row(ended))["epoch"] == 2


async def test_a_job_whose_heart_never_beat_is_missed_from_its_claim_on(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register(), heartbeat_timeout="interval '30 minutes'")
    assert (await jobs.tick())["reaped"] == 0
    await jobs.update([job], claimed_at="clock_timestamp() - interval '1 hour'")
    assert (await jobs.tick())["reaped"] == 1


async def test_a_cancelled_job_of_a_stopping_worker_is_no_interrupt(jobs: JobTable) -> None:
    worker = await jobs.register(stopping_at="clock_timestamp()")
    (job,) = await jobs.running(worker)
    await jobs.update([job], lock_expires_at=PAST, cancel_requested_at="clock_timestamp()", cancel_phase="1")
    assert (await jobs.tick())["reaped"] == 1
    row = await jobs.row(job)
    assert (row["status"], row["interrupt_count"]) == ("cancelled", 0)
    assert [one["outcome"] for one in await jobs.attempts(job)] == ["crashed"]


async def test_a_release_of_nobody_takes_nothing_back(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    await jobs.update([job], lock_expires_at=PAST)
    assert await jobs.conn.fetchval(f'select "{jobs.schema}".release(null, 10)') == 0
    assert (await jobs.row(job))["status"] == "running"


async def test_only_the_workers_that_are_named_are_declared_dead(jobs: JobTable) -> None:
    dead, alive = await jobs.register(), await jobs.register()
    await jobs.conn.fetchval(f'select "{jobs.schema}".release($1, 10)', [dead])
    assert await jobs.conn.fetchval(jobs.worker_sql.beat_worker, dead) is True
    assert await jobs.conn.fetchval(jobs.worker_sql.beat_worker, alive) is False


async def test_the_end_of_a_cancelled_job_that_goes_back_is_no_interrupt(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    await jobs.update([job], cancel_requested_at="clock_timestamp()", cancel_phase="1")
    await jobs.conn.fetchrow(jobs.worker_sql.settle_released, [job], [1], [0.1], ["worker_shutdown"])
    row = await jobs.row(job)
    assert (row["status"], row["interrupt_count"]) == ("cancelled", 0)


# -- gates ------------------------------------------------------------------------------------------


async def test_a_count_that_is_too_low_stops_no_settlement(jobs: JobTable) -> None:
    (job,) = await capped(jobs, 3, 1)
    await jobs.claim_lanes(await jobs.register(), 1, CAPPED)
    await jobs.conn.execute(f'update "{jobs.schema}".gates set held = 0')
    assert await jobs.succeed(job) == [job]
    assert await jobs.held() == {"a:succeed": 0}


async def test_a_gate_that_somebody_goes_through_is_counted_by_the_next_tick(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    await jobs.gate("a:succeed", 3)
    await jobs.conn.execute(f'update "{jobs.schema}".gates set held = 2')
    async with other.transaction():
        await other.execute(f'select from "{jobs.schema}".gates for update')
        assert (await jobs.tick())["gates_repaired"] == 0
    assert (await jobs.tick())["gates_repaired"] == 1


# -- deadlines --------------------------------------------------------------------------------------


async def test_deadlines_that_have_passed_end_what_waits_a_bounded_number_at_once(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    ids = await jobs.plant(4, schedule_to_close=PAST)
    await jobs.plant(1, schedule_to_close=AHEAD)
    async with other.transaction():
        await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', ids[0])
        assert await expire(jobs, 2) == 2
        assert await expire(jobs) == 1
    assert await expire(jobs) == 1
    assert await jobs.counts() == {"failed": 4, "pending": 1}
    assert {(await jobs.row(job))["epoch"] for job in ids} == {1}


@pytest.mark.parametrize("has_hooks", [True, False])
async def test_a_deadline_that_has_passed_is_kept_for_actors_with_hooks(jobs: JobTable, has_hooks: bool) -> None:
    await known(jobs, has_hooks=has_hooks)
    (job,) = await jobs.plant(1, schedule_to_close=PAST)
    assert await expire(jobs) == 1
    assert await untold(jobs) == ([(job, 1, "failed")] if has_hooks else [])


async def test_a_deadline_does_not_wait_for_a_batch(jobs: JobTable, other: asyncpg.Connection) -> None:
    batch = UUID(int=1)
    await jobs.conn.execute(f'insert into "{jobs.schema}".batches (id, total) values ($1, 1)', batch)
    await jobs.plant(1, schedule_to_close=PAST, batch_id=f"'{batch}'")
    await jobs.conn.execute("set lock_timeout = '3s'")
    async with other.transaction():
        await other.execute(f'select from "{jobs.schema}".batches for update')
        assert await expire(jobs) == 1
    assert json.loads(await jobs.conn.fetchval(f'select to_json("{jobs.schema}".tick())'))["batches_counted"] == 1


# -- batches ----------------------------------------------------------------------------------------


async def test_a_finalizer_that_waits_for_a_time_of_its_own_is_left_to_it(jobs: JobTable) -> None:
    (finalizer,) = await jobs.plant(1, status="'scheduled'", scheduled_at=AHEAD)
    batches = Batches(jobs)
    batch, ids = await batches.open(1, finalizer_job_id=f"'{finalizer}'")
    await batches.end(ids, "succeeded")
    assert (await batches.row(batch))["status"] == "complete"
    row = await jobs.row(finalizer)
    assert (row["status"], row["scheduled_at"] > row["now"]) == ("scheduled", True)
