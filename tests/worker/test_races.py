"""Pairs of writers that meet at one job, choreographed with locks: who comes second passes the row by, or waits and
meets what the first one left; nothing is lost, ended twice or counted twice.

Cancels against claims, settlements and retries are in test_control.py.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd import JobStatus, TaskQ, new_uuid
from tests.jobs import JobTable
from tests.worker.test_control import ROUNDS, lock_held
from tests.worker.test_lanes import CAPPED, SERIAL, serial

LAPSED = "clock_timestamp() - interval '1 second'"


async def succeed(jobs: JobTable, conn: asyncpg.Connection, job: UUID, epoch: int = 1) -> bool:
    """Settle an attempt; answer whether that applied."""
    return bool(await jobs.succeed(job, epoch=epoch, conn=conn))


async def hand_back(jobs: JobTable, conn: asyncpg.Connection, job: UUID, epoch: int = 1) -> bool:
    """Release an attempt that had begun; answer whether that applied."""
    done = await conn.fetchrow(jobs.worker_sql.settle_released, [job], [epoch], [0.1], ["worker_shutdown"])
    return bool(done["ids"])


async def renew(jobs: JobTable, conn: asyncpg.Connection, job: UUID) -> bool:
    """Renew the lease of a first attempt; answer whether it is lost."""
    return bool(await conn.fetch(jobs.worker_sql.renew, [job], [1], [0.1], 60.0, 58.0))


async def reap(jobs: JobTable, conn: asyncpg.Connection) -> int:
    """Take back what has lapsed; answer how many rows that were."""
    return await conn.fetchval(f'select "{jobs.schema}".reap(100)')


async def release(jobs: JobTable, conn: Any, worker: UUID) -> int:
    """Tombstone a worker; answer how many rows were taken back."""
    return await conn.fetchval(f'select "{jobs.schema}".release($1, 100)', [worker])


async def ends(jobs: JobTable, job: UUID) -> tuple[str, int, list[str]]:
    """The status of a job, its epoch, and how its earlier attempts ended."""
    row = await jobs.row(job)
    return row["status"], row["epoch"], [one["outcome"] for one in await jobs.attempts(job)]


class Gated:
    """Two running jobs of a capped actor in a batch, round by round: one for the race, one that shows a gate given back
    twice, or a batch counted twice."""

    def __init__(self, jobs: JobTable) -> None:
        self.jobs = jobs
        self.worker = new_uuid()
        self.batch = new_uuid()

    async def begin(self, **columns: Any) -> UUID:
        self.batch = new_uuid()
        await self.jobs.register(self.worker)
        await self.jobs.gate("a:succeed", 2)
        await self.jobs.conn.execute(f'insert into "{self.jobs.schema}".batches (id, total) values ($1, 2)', self.batch)
        first, self.neighbour = await self.jobs.plant(
            2, lane="'a:succeed'", batch_id=f"'{self.batch}'", **{"max_attempts": "1", **columns}
        )
        claimed, _ = await self.jobs.claim_lanes(self.worker, 2, CAPPED)
        assert [job["id"] for job in claimed] == [first, self.neighbour]
        return first

    async def check(self, **counted: int) -> None:
        """What the race left: the neighbour alone is in the gate, and the batch has counted so much."""
        assert await self.jobs.held() == {"a:succeed": 1}
        row = await self.jobs.conn.fetchrow(f'select * from "{self.jobs.schema}".batches where id = $1', self.batch)
        found = {end: row[end] for end in ("succeeded", "failed", "cancelled", "crashed") if row[end]}
        assert (found, row["completed_at"]) == (counted, None)
        assert await succeed(self.jobs, self.jobs.conn, self.neighbour)
        assert await self.jobs.held() == {"a:succeed": 0}
        await self.jobs.conn.execute(f'delete from "{self.jobs.schema}".workers')
        await self.jobs.conn.execute(f'delete from "{self.jobs.schema}".jobs')


@pytest.fixture
def gated(jobs: JobTable) -> Gated:
    return Gated(jobs)


# -- a settlement and the reaper --------------------------------------------------------------------


async def test_a_reaper_passes_what_is_being_settled(jobs: JobTable, gated: Gated, other: asyncpg.Connection) -> None:
    for _ in range(ROUNDS):
        job = await gated.begin()
        await jobs.update([job], lock_expires_at=LAPSED)
        async with other.transaction():
            assert await succeed(jobs, other, job)
            assert await reap(jobs, jobs.conn) == 0
        assert await reap(jobs, jobs.conn) == 0
        assert await ends(jobs, job) == ("succeeded", 1, [])
        await gated.check(succeeded=1)


async def test_a_settlement_passes_what_is_being_reaped_and_is_lost(
    jobs: JobTable, gated: Gated, other: asyncpg.Connection
) -> None:
    for _ in range(ROUNDS):
        job = await gated.begin()
        await jobs.update([job], lock_expires_at=LAPSED)
        async with other.transaction():
            assert await reap(jobs, other) == 1
            assert not await succeed(jobs, jobs.conn, job)
        assert not await succeed(jobs, jobs.conn, job)
        assert await ends(jobs, job) == ("crashed", 2, ["crashed"])
        await gated.check(crashed=1)


async def test_a_reap_that_breaks_off_leaves_the_settlement_its_row(
    jobs: JobTable, gated: Gated, other: asyncpg.Connection
) -> None:
    for _ in range(ROUNDS):
        job = await gated.begin()
        await jobs.update([job], lock_expires_at=LAPSED)
        transaction = other.transaction()
        await transaction.start()
        assert await reap(jobs, other) == 1
        await transaction.rollback()
        assert await succeed(jobs, jobs.conn, job)
        await gated.check(succeeded=1)


# -- a renewal and the reaper, or a settlement ------------------------------------------------------


async def test_a_reaper_passes_a_lapsed_lease_that_is_being_renewed(jobs: JobTable, other: asyncpg.Connection) -> None:
    worker = await jobs.register()
    for _ in range(ROUNDS):
        (job,) = await jobs.running(worker)
        await jobs.update([job], lock_expires_at=LAPSED)
        async with other.transaction():
            assert not await renew(jobs, other, job)
            assert await reap(jobs, jobs.conn) == 0
        assert await reap(jobs, jobs.conn) == 0
        assert await succeed(jobs, jobs.conn, job)


async def test_a_renewal_passes_what_is_being_reaped_and_hears_of_it_then(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    worker = await jobs.register()
    for _ in range(ROUNDS):
        (job,) = await jobs.running(worker, max_attempts="1")
        await jobs.update([job], lock_expires_at=LAPSED)
        async with other.transaction():
            assert await reap(jobs, other) == 1
            assert not await renew(jobs, jobs.conn, job), "who reaps may yet break off"
        assert await renew(jobs, jobs.conn, job)
        row = await jobs.row(job)
        assert (row["status"], row["lock_expires_at"]) == ("crashed", None)


async def test_a_settlement_passes_what_is_being_renewed_and_applies_then(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    worker = await jobs.register()
    for _ in range(ROUNDS):
        (job,) = await jobs.running(worker)
        async with other.transaction():
            await renew(jobs, other, job)
            assert not await succeed(jobs, jobs.conn, job)
            (state,) = await jobs.conn.fetch(jobs.worker_sql.settle_state, [job], [1])
            assert state["held"], "still this attempt's"
        assert await succeed(jobs, jobs.conn, job)


# -- a release and a settlement of the same attempt -------------------------------------------------


@pytest.mark.parametrize("first", [succeed, hand_back])
async def test_of_an_end_and_a_release_the_first_applies(
    jobs: JobTable, gated: Gated, other: asyncpg.Connection, first: Any
) -> None:
    second = hand_back if first is succeed else succeed
    for _ in range(ROUNDS):
        job = await gated.begin()
        async with other.transaction():
            assert await first(jobs, other, job)
            assert not await second(jobs, jobs.conn, job)
        assert not await second(jobs, jobs.conn, job)
        assert not await first(jobs, jobs.conn, job), "a replay of the first neither"
        expected = ("succeeded", 1, []) if first is succeed else ("pending", 2, ["interrupted"])
        assert await ends(jobs, job) == expected
        await gated.check(**({"succeeded": 1} if first is succeed else {}))


# -- claimers ---------------------------------------------------------------------------------------


async def test_a_second_claimer_passes_what_the_first_is_claiming(jobs: JobTable, other: asyncpg.Connection) -> None:
    mine, yours = new_uuid(), new_uuid()
    for round_ in range(ROUNDS):
        one, two, three = await jobs.plant(3)
        transaction = other.transaction()
        await transaction.start()
        assert [job["id"] for job in await jobs.claim(mine, 2, conn=other)] == [one, two]
        assert [job["id"] for job in await jobs.claim(yours, 2)] == [three]
        if round_ % 2:
            await transaction.commit()
            assert await jobs.claim(yours, 2) == []
        else:
            await transaction.rollback()
            assert [(job["id"], job["epoch"]) for job in await jobs.claim(yours, 2)] == [(one, 1), (two, 1)]
        await jobs.conn.execute(f'delete from "{jobs.schema}".jobs')


async def test_a_second_claimer_passes_a_gate_that_the_first_goes_through(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    await jobs.gate("a:succeed", 3)
    for _ in range(ROUNDS):
        await jobs.plant(5, lane="'a:succeed'")
        async with other.transaction():
            assert len((await jobs.claim_lanes(new_uuid(), 2, CAPPED, conn=other))[0]) == 2
            assert await jobs.claim_lanes(new_uuid(), 2, CAPPED) == ([], [("contended", None)])
        assert len((await jobs.claim_lanes(new_uuid(), 2, CAPPED))[0]) == 1
        assert await jobs.held() == {"a:succeed": 3}
        await jobs.conn.execute(f'delete from "{jobs.schema}".jobs')
        await jobs.conn.execute(f'update "{jobs.schema}".gates set held = 0')


async def test_a_second_claimer_leaves_an_identity_to_the_first(jobs: JobTable, other: asyncpg.Connection) -> None:
    for _ in range(ROUNDS):
        first, second = await jobs.plant(2, **serial("x"))
        async with other.transaction():
            assert [job["id"] for job in (await jobs.claim_lanes(new_uuid(), 2, SERIAL, conn=other))[0]] == [first]
            assert (await jobs.claim_lanes(new_uuid(), 2, SERIAL))[0] == []
        assert (await jobs.claim_lanes(new_uuid(), 2, SERIAL))[0] == []
        assert await succeed(jobs, jobs.conn, first)
        assert [job["id"] for job in (await jobs.claim_lanes(new_uuid(), 2, SERIAL))[0]] == [second]
        await jobs.conn.execute(f'delete from "{jobs.schema}".jobs')


# -- a dead worker's claim, and its release ---------------------------------------------------------


@pytest.mark.parametrize("first", ["claim", "release"])
async def test_a_claim_of_a_dead_worker_that_commits_beside_its_release_is_taken_back(
    jobs: JobTable, other: asyncpg.Connection, first: str
) -> None:
    for _ in range(ROUNDS):
        dead = await jobs.register()
        (job,) = await jobs.plant()
        async with other.transaction():
            if first == "claim":
                await jobs.claim(dead, conn=other, lease=3600)
                assert await release(jobs, jobs.conn, dead) == 0, "the claim is not visible yet"
            else:
                assert await release(jobs, other, dead) == 0
                await jobs.claim(dead, lease=3600)
        assert await ends(jobs, job) == ("running", 1, [])
        assert await reap(jobs, jobs.conn) == 1, "with an hour of its lease left"
        assert await ends(jobs, job) == ("pending", 2, ["crashed"])
        assert not await succeed(jobs, jobs.conn, job)
        await jobs.update([job], status="'succeeded'")  # out of the next round's way


async def test_releases_of_one_worker_wait_for_each_other_and_take_its_rows_once(
    jobs: JobTable, gated: Gated, other: asyncpg.Connection, pool: Any
) -> None:
    for _ in range(ROUNDS):
        gated.worker = new_uuid()
        job = await gated.begin(max_attempts="2")
        async with other.transaction():
            assert await release(jobs, other, gated.worker) == 2
            second = asyncio.ensure_future(release(jobs, pool, gated.worker))
            await lock_held(jobs.conn)
        assert await second == 0
        assert await ends(jobs, job) == ("pending", 2, ["crashed"])
        assert await jobs.held() == {"a:succeed": 0}
        await jobs.conn.execute(f'delete from "{jobs.schema}".jobs')


# -- cancels of gated jobs and of identities --------------------------------------------------------


async def test_a_cancel_beside_a_settlement_of_a_gated_job_gives_its_gate_back_once(
    tq: TaskQ, jobs: JobTable, gated: Gated, other: asyncpg.Connection
) -> None:
    for round_ in range(ROUNDS):
        job = await gated.begin()
        async with other.transaction():
            if round_ % 2:
                await tq.cancel(job, connection=other)
                assert not await hand_back(jobs, jobs.conn, job)
            else:
                assert await succeed(jobs, other, job)
                cancelling = asyncio.ensure_future(tq.cancel(job))
                await lock_held(jobs.conn)
        if round_ % 2:
            assert await hand_back(jobs, jobs.conn, job)
            await gated.check(cancelled=1)
        else:
            assert (await cancelling).cancellation_initiated is False
            await gated.check(succeeded=1)


async def test_a_cancel_beside_the_reap_of_a_gated_job_gives_its_gate_back_once(
    tq: TaskQ, jobs: JobTable, gated: Gated, other: asyncpg.Connection
) -> None:
    for round_ in range(ROUNDS):
        job = await gated.begin(max_attempts="2")
        await jobs.update([job], lock_expires_at=LAPSED)
        async with other.transaction():
            if round_ % 2:
                await tq.cancel(job, connection=other)
                assert await reap(jobs, jobs.conn) == 0
            else:
                assert await reap(jobs, other) == 1
                cancelling = asyncio.ensure_future(tq.cancel(job))
                await lock_held(jobs.conn)
        if round_ % 2:
            assert await reap(jobs, jobs.conn) == 1
        else:
            assert (await cancelling).previous_status == JobStatus.PENDING
        assert (await jobs.row(job))["status"] == "cancelled"
        await gated.check(cancelled=1)


async def test_a_cancel_beside_a_claim_of_an_identity(tq: TaskQ, jobs: JobTable, other: asyncpg.Connection) -> None:
    for round_ in range(ROUNDS):
        first, second = await jobs.plant(2, **serial("x"))
        async with other.transaction():
            if round_ % 2:
                await tq.cancel(first, connection=other)
                assert (await jobs.claim_lanes(new_uuid(), 2, SERIAL))[0] == [], (
                    "its identity waits for what comes of it"
                )
            else:
                assert len((await jobs.claim_lanes(new_uuid(), 2, SERIAL, conn=other))[0]) == 1
                cancelling = asyncio.ensure_future(tq.cancel(first))
                await lock_held(jobs.conn)
        if not round_ % 2:
            assert (await cancelling).new_status == JobStatus.RUNNING
            assert (await jobs.claim_lanes(new_uuid(), 2, SERIAL))[0] == []
            assert await hand_back(jobs, jobs.conn, first)
        assert (await jobs.row(first))["status"] == "cancelled"
        assert [job["id"] for job in (await jobs.claim_lanes(new_uuid(), 2, SERIAL))[0]] == [second]
        await jobs.conn.execute(f'delete from "{jobs.schema}".jobs')
