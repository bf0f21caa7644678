"""The claim statement: what may be claimed, in which order, by how many at once."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.worker.floors import BEGINNING
from tests.jobs import JobTable


async def test_a_claim_spends_an_attempt_and_raises_the_epoch(jobs: JobTable) -> None:
    (job,) = await jobs.plant(attempt="4", epoch="9", started_at="clock_timestamp()", start_to_close="'90 s'")
    worker = new_uuid()
    (claimed,) = await jobs.claim(worker, lease=30.0)
    assert (claimed["id"], claimed["attempt"], claimed["epoch"], claimed["start_to_close"]) == (job, 5, 10, 90.0)
    row = await jobs.row(job)
    assert (row["status"], row["worker_id"], row["started_at"], row["last_heartbeat_at"]) == (
        "running",
        worker,
        None,
        None,
    )
    assert 29 < (row["lock_expires_at"] - row["claimed_at"]).total_seconds() <= 30.1


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "'scheduled'"},
        {"status": "'succeeded'"},
        {"status": "'cancelled'"},
        {"scheduled_at": "clock_timestamp() + interval '1 hour'"},
        {"schedule_to_close": "clock_timestamp() - interval '1 second'"},
        {"route": "'other'"},
        {"lane": "'a:succeed'"},
        {"actor": "'stranger'"},
        {"priority": "3"},
    ],
    ids=lambda columns: next(iter(columns)) + "-" + next(iter(columns.values())).strip("'")[:10],
)
async def test_what_a_claim_leaves_alone(jobs: JobTable, columns: dict[str, str]) -> None:
    await jobs.plant(**columns)
    before = await jobs.image()
    assert await jobs.claim(new_uuid(), 10) == []
    assert await jobs.image() == before


async def test_the_order_is_time_then_id_from_the_floor_on(jobs: JobTable) -> None:
    late = await jobs.plant(3, scheduled_at="now() - interval '1 minute'")
    early = await jobs.plant(3, scheduled_at="now() - interval '1 hour'")
    floor = await jobs.row(early[1])
    claimed = await jobs.conn.fetch(
        jobs.worker_sql.claim,
        4,
        new_uuid(),
        ["default"],
        [0],
        [floor["scheduled_at"]],
        [early[1]],
        ["succeed"],
        60.0,
    )
    assert [one["id"] for one in claimed] == [early[1], early[2], *late[:2]], "the floor's own row is not passed"


async def test_segments_are_served_in_their_order(jobs: JobTable) -> None:
    low = await jobs.plant(3, scheduled_at="now() - interval '1 hour'")
    high = await jobs.plant(3, priority="5")
    claimed = await jobs.conn.fetch(
        jobs.worker_sql.claim,
        4,
        new_uuid(),
        ["default"] * 2,
        [5, 0],
        [BEGINNING[0]] * 2,
        [BEGINNING[1]] * 2,
        ["succeed"],
        60.0,
    )
    assert [one["id"] for one in claimed] == [*high, low[0]]
    assert await jobs.counts() == {"running": 4, "pending": 2}


async def test_heads_name_each_queue_and_priority_that_has_rows(jobs: JobTable) -> None:
    for priority in ("-3", "0", "1", "7"):
        await jobs.plant(5, priority=priority)
    await jobs.plant(2, route="'mail'")
    await jobs.plant(2, route="'not served'")
    await jobs.plant(2, priority="99", status="'scheduled'")
    heads = await jobs.conn.fetch(jobs.worker_sql.heads, ["default", "mail", "empty"], ["succeed"])
    assert sorted((head["route"], head["priority"]) for head in heads) == [
        ("default", -3),
        ("default", 0),
        ("default", 1),
        ("default", 7),
        ("mail", 0),
    ]


async def test_claimers_at_once_share_the_rows_and_none_is_claimed_twice(jobs: JobTable, dsn: str) -> None:
    ids = await jobs.plant(900)
    connections = [await asyncpg.connect(dsn) for _ in range(6)]

    async def drain(conn: asyncpg.Connection) -> list[object]:
        taken: list[object] = []
        misses = 0
        while misses < 5:
            records = await jobs.claim(new_uuid(), 7, conn=conn)
            misses = 0 if records else misses + 1
            taken.extend(record["id"] for record in records)
        return taken

    try:
        taken = [job for part in await asyncio.gather(*map(drain, connections)) for job in part]
    finally:
        for connection in connections:
            await connection.close()
    assert sorted(taken) == sorted(ids)
    row = await jobs.conn.fetchrow(f'select min(epoch), max(epoch), max(attempt) from "{jobs.schema}".jobs')
    assert tuple(row) == (1, 1, 1)


async def test_a_locked_row_is_passed_and_the_limit_still_filled(jobs: JobTable, dsn: str) -> None:
    ids = await jobs.plant(5)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', ids[0])
            claimed = await jobs.claim(new_uuid(), 3)
        assert [one["id"] for one in claimed] == ids[1:4]
    finally:
        await other.close()
