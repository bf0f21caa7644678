"""How soon a job begins: on an idle queue, and when several workers have room."""

from __future__ import annotations

import asyncio
import random
import time

import asyncpg

from benchmarks.ground import SCHEMA, Ground
from benchmarks.noop import Payload
from benchmarks.work import actors
from taskqd import EnqueueItem, TaskQ

ENQUEUED = 300
PLAIN, LONG = actors[0], actors[3]
SETTLE = 1.0
"""Seconds until workers that are up are idle."""


async def idle_latencies(ground: Ground) -> list[float]:
    """Return the sorted seconds from the rows of single jobs to their handlers, one job after the other."""
    jobs = max(100, ground.jobs(ENQUEUED))
    async with ground.schema() as conn, TaskQ(dsn=ground.server.dsn(), schema=SCHEMA) as tq:
        async with ground.workers(BENCH_TOTAL=jobs, BENCH_TIMES=1, TASKQ_QUEUES="bench") as processes:
            await registered(conn, 1)
            for n in range(jobs):
                await tq.enqueue(PLAIN, Payload(n=n))
                await asyncio.sleep(random.uniform(0.03, 0.07))
            await ground.seen_all(processes[0])
            (seen,) = await ground.finish(processes)
        return await latencies(conn, seen["times"])


async def latencies(conn: asyncpg.Connection, times: list[tuple[int, float]], of: str = "true") -> list[float]:
    """Return the sorted seconds from the insertion of rows to their handlers, of those that ``of`` selects."""
    inserted = dict(
        await conn.fetch(
            f"select (payload ->> 'n')::int, extract(epoch from created_at)::float8 from {SCHEMA}.jobs where {of}"
        )
    )
    return sorted(began - inserted[n] for n, began in times if n in inserted)


async def last_start(ground: Ground) -> float:
    """Return the seconds from eight jobs of two seconds to the last start, on two idle workers with four slots."""
    async with (
        ground.schema() as conn,
        TaskQ(dsn=ground.server.dsn(), schema=SCHEMA) as tq,
        ground.workers(2, BENCH_TOTAL=8, BENCH_TIMES=1, TASKQ_MAX_CONCURRENCY=4) as processes,
    ):
        await registered(conn, 2)
        began = time.time()
        await tq.enqueue_batch([EnqueueItem(actor_ref=LONG, payload=Payload(n=n)) for n in range(8)])
        await settled(conn, 8)
        seen = await ground.finish(processes)
    return max(at for each in seen for _, at in each["times"]) - began


async def registered(conn: asyncpg.Connection, workers: int) -> None:
    """Wait until so many workers are there, and idle."""
    await _until(conn, f"select count(*) >= {workers} from {SCHEMA}.workers")
    await asyncio.sleep(SETTLE)


async def settled(conn: asyncpg.Connection, jobs: int) -> None:
    """Wait until so many jobs have succeeded."""
    await _until(conn, f"select count(*) >= {jobs} from {SCHEMA}.jobs where status = 'succeeded'")


async def _until(conn: asyncpg.Connection, question: str, patience: float = 120.0) -> None:
    async with asyncio.timeout(patience):
        while not await conn.fetchval(question):
            await asyncio.sleep(0.05)
