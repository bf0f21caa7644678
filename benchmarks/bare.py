"""The two statements that a job needs, claim and settle, with no worker around them."""

from __future__ import annotations

import asyncpg

from benchmarks.ground import SCHEMA, Ground, fill
from benchmarks.work import QUEUE
from taskqd import new_uuid
from taskqd.storage.connect import connect
from taskqd.storage.statements import load
from taskqd.worker.completer import GROUP
from taskqd.worker.floors import BEGINNING
from taskqd.worker.lane_claims import NO_CLAIM

JOBS = 50_000


async def wal_of_worker(ground: Ground) -> float:
    """Return the bytes of WAL per job that a worker drains."""
    jobs = ground.jobs(JOBS)
    async with ground.schema() as conn:
        await _prepare(conn, jobs)
        before = await _written(conn)
        await ground.drain(conn, jobs)
        return (await _written(conn) - before) / jobs


async def wal_of_statements(ground: Ground) -> float:
    """Return the bytes of WAL per job of the statements alone."""
    jobs = ground.jobs(JOBS)
    sql = load("worker", SCHEMA)
    async with ground.schema() as conn:
        await _prepare(conn, jobs)
        session = await connect(ground.server.dsn(), role="bench", schema=SCHEMA, group="", timeout=10, pinned=True)
        before = await _written(conn)
        key, worker, done = BEGINNING, new_uuid(), 0
        while rows := await session.fetch(
            sql.claim, GROUP, worker, [QUEUE], [0], [key[0]], [key[1]], ["bench.plain"], 60.0
        ):
            ids = sorted(row["id"] for row in rows)
            last = rows[-1]
            key = (last["scheduled_at"], last["id"])
            count = len(ids)
            await session.fetch(sql.settle_succeeded, ids, [1] * count, [0.0] * count, [None] * count, *NO_CLAIM)
            done += count
        written = await _written(conn) - before
        await session.close()
        if done != jobs:
            raise SystemExit(f"wrong result: {done} of {jobs} jobs were claimed")
        return written / jobs


async def _prepare(conn: asyncpg.Connection, jobs: int) -> None:
    """Fill, and keep out what writes WAL of its own accord; each page is written whole once after a checkpoint."""
    await conn.execute(f"alter table {SCHEMA}.jobs set (autovacuum_enabled = false)")
    await fill(conn, jobs)
    await conn.execute("checkpoint")


async def _written(conn: asyncpg.Connection) -> int:
    return int(await conn.fetchval("select pg_current_wal_insert_lsn() - '0/0'"))
