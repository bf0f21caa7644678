"""Renewal of leases: only what is this attempt's, only what is near its end, and cheap."""

from __future__ import annotations

from uuid import UUID

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from tests.jobs import JobTable
from tests.support import eventually

LEASE, THRESHOLD = 60.0, 58.0


async def renew(
    jobs: JobTable,
    *pairs: tuple[UUID, int],
    ran: float | None = None,
    threshold: float = THRESHOLD,
    conn: asyncpg.Connection | None = None,
) -> list[tuple[UUID, int]]:
    """Renew and return the pairs that are reported lost."""
    records = await (conn or jobs.conn).fetch(
        jobs.worker_sql.renew,
        [job for job, _ in pairs],
        [epoch for _, epoch in pairs],
        [ran] * len(pairs),
        LEASE,
        threshold,
    )
    return [(record["id"], record["epoch"]) for record in records]


async def left(jobs: JobTable, job: UUID) -> float:
    """Seconds until the lease ends."""
    row = await jobs.row(job)
    return float((row["lock_expires_at"] - row["now"]).total_seconds())


async def near_end(jobs: JobTable, count: int = 1, *, seconds: float = 10, **columns: str) -> list[UUID]:
    ids = await jobs.running(new_uuid(), count, **columns)
    await jobs.update(ids, lock_expires_at=f"clock_timestamp() + interval '{seconds} seconds'")
    return ids


async def test_a_lease_near_its_end_is_extended(jobs: JobTable) -> None:
    (job,) = await near_end(jobs)
    assert await renew(jobs, (job, 1)) == []
    assert 59 < await left(jobs, job) <= 60
    row = await jobs.row(job)
    assert row["last_heartbeat_at"] is not None
    assert row["started_at"] is None, "it has not begun"


async def test_a_lapsed_lease_that_nobody_took_is_revived(jobs: JobTable) -> None:
    (job,) = await near_end(jobs, seconds=-30)
    assert await renew(jobs, (job, 1)) == []
    assert await left(jobs, job) > 59


async def test_a_lease_with_more_left_than_the_threshold_is_not_written(jobs: JobTable) -> None:
    ids = await near_end(jobs, 3, seconds=40)
    before = await jobs.image()
    assert await renew(jobs, *((job, 1) for job in ids), threshold=39) == []
    assert await jobs.image() == before
    assert await renew(jobs, *((job, 1) for job in ids), threshold=41) == []
    assert await left(jobs, ids[0]) > 59


async def test_the_start_is_stamped_once(jobs: JobTable) -> None:
    (job,) = await jobs.running(new_uuid())
    await renew(jobs, (job, 1), ran=2.0, threshold=1)
    row = await jobs.row(job)
    assert 1.9 < (row["now"] - row["started_at"]).total_seconds() < 2.5
    await jobs.update([job], lock_expires_at="clock_timestamp()")
    await renew(jobs, (job, 1), ran=3.0)
    assert (await jobs.row(job))["started_at"] == row["started_at"]


async def test_a_heartbeat_timeout_is_stamped_at_every_beat(jobs: JobTable) -> None:
    (job,) = await jobs.running(new_uuid(), heartbeat_timeout="interval '5 seconds'")
    await renew(jobs, (job, 1), threshold=1)
    first = (await jobs.row(job))["last_heartbeat_at"]
    await renew(jobs, (job, 1), threshold=1)
    assert (await jobs.row(job))["last_heartbeat_at"] > first


@pytest.mark.parametrize("epoch", [0, 2], ids=["older", "never-issued"])
async def test_another_epoch_renews_nothing_and_is_reported(jobs: JobTable, epoch: int) -> None:
    (job,) = await near_end(jobs)
    before = await jobs.image()
    assert await renew(jobs, (job, epoch)) == [(job, epoch)]
    assert await jobs.image() == before


async def test_what_has_ended_or_was_handed_back_or_is_gone_is_reported(jobs: JobTable) -> None:
    ended, back, mine = await near_end(jobs, 3, heartbeat_timeout="interval '1 hour'")
    await jobs.succeed(ended)
    await jobs.conn.fetchrow(jobs.worker_sql.settle_released, [back], [1], [None], ["unstarted"])
    gone = new_uuid()
    before = [dict(await jobs.row(job)) for job in (ended, back)]
    lost = await renew(jobs, (ended, 1), (back, 1), (mine, 1), (gone, 1))
    assert sorted(lost) == sorted([(ended, 1), (back, 1), (gone, 1)])
    after = [dict(await jobs.row(job)) for job in (ended, back)]
    for row in (*before, *after):
        del row["now"]
    assert after == before
    assert await left(jobs, mine) > 59


async def test_a_locked_row_is_left_for_the_next_beat_and_not_reported(jobs: JobTable, dsn: str) -> None:
    ids = await near_end(jobs, 3)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', ids[1])
            assert await renew(jobs, *((job, 1) for job in ids)) == []
        assert [await left(jobs, job) > 59 for job in ids] == [True, False, True]
    finally:
        await other.close()


async def test_renewals_stay_hot(jobs: JobTable, dsn: str) -> None:
    """An update is HOT only where no indexed column changes and the page has room for the new version.

    A snapshot that somebody holds elsewhere in the server, such as autovacuum's, keeps old versions in the way for as
    long as it lives. So the best of several beats counts.
    """
    ids = await jobs.running(new_uuid(), 300)
    conn = await asyncpg.connect(dsn)

    async def beat() -> float:
        before = await _updates(conn, jobs.schema)
        await renew(jobs, *((job, 1) for job in ids), ran=1.0, threshold=LEASE + 1, conn=conn)
        await conn.execute("select pg_stat_force_next_flush()")

        async def counted() -> tuple[int, int] | None:
            updates, hot = await _updates(conn, jobs.schema)
            return (updates - before[0], hot - before[1]) if updates >= before[0] + len(ids) else None

        updates, hot = await eventually(counted)
        assert updates == len(ids)
        return hot / updates

    try:
        await jobs.conn.execute("select pg_stat_force_next_flush()")
        await jobs.conn.execute("select 1")
        shares = []
        while not shares or (max(shares) < 0.9 and len(shares) < 20):
            shares.append(await beat())
    finally:
        await conn.close()
    assert max(shares) > 0.9, shares


async def test_no_index_holds_a_column_that_a_beat_writes(jobs: JobTable) -> None:
    indexed = await jobs.conn.fetchval(
        """
        select array_agg(distinct pg_get_indexdef(i.indexrelid))
          from pg_index i where i.indrelid = $1::regclass
        """,
        f'"{jobs.schema}".jobs',
    )
    written = ("lock_expires_at", "last_heartbeat_at", "started_at")
    assert [text for text in indexed if any(column in text for column in written)] == []


async def _updates(conn: asyncpg.Connection, schema: str) -> tuple[int, int]:
    await conn.execute("select pg_stat_clear_snapshot()")
    record = await conn.fetchrow(
        "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname = $1 and relname = 'jobs'", schema
    )
    assert record is not None
    return record["n_tup_upd"], record["n_tup_hot_upd"]
