"""What stands beside the jobs of a drain: other actors, priorities and queues, rows that wait, an old snapshot."""

from __future__ import annotations

import asyncpg

from benchmarks.ground import Drained, Ground, fill, lane
from benchmarks.work import ACTORS, QUEUE

JOBS = 200_000
CROWD = 1_000_000
FEW = 10_000
SHORT, LONG = 400_000, 1_200_000
QUEUES = [f"bench-{number}" for number in range(4)]
PRIORITIES = 5


async def plain(ground: Ground, jobs: int = JOBS) -> Drained:
    """Drain jobs of one actor with nothing beside them."""
    async with ground.schema() as conn:
        await fill(conn, ground.jobs(jobs))
        return await ground.drain(conn, ground.jobs(jobs))


async def spread(ground: Ground) -> Drained:
    """Drain jobs of 50 actors with five priorities in four queues."""
    jobs = ground.jobs(JOBS)
    async with ground.schema() as conn:
        await fill(
            conn,
            jobs,
            actor=f"'bench.spread-' || (n % {ACTORS})",
            priority=f"n / {ACTORS} % {PRIORITIES}",
            queue=f"'bench-' || (n / {ACTORS * PRIORITIES} % {len(QUEUES)})",
        )
        # What is retried goes to the queue of its actor.
        return await ground.drain(conn, jobs, TASKQ_QUEUES=",".join([*QUEUES, QUEUE]))


async def behind_drained(ground: Ground) -> Drained:
    """Drain jobs that a million rows stand in front of, of an actor that may not run."""
    jobs = ground.jobs(JOBS)
    async with ground.schema() as conn:
        stuck = {"actor": "'bench.drained'", "lane": lane("bench.drained"), "priority": "1"}
        await fill(conn, ground.jobs(CROWD), first=jobs, **stuck)
        await fill(conn, jobs)
        return await ground.drain(conn, jobs)


async def in_a_crowd(ground: Ground) -> Drained:
    """Drain some of a million pending jobs beside a million that have finished and a million in the future."""
    crowd = ground.jobs(CROWD)
    async with ground.schema() as conn:
        past = "clock_timestamp() - interval '1 day'"
        await fill(
            conn,
            crowd,
            status="'succeeded'",
            epoch="1",
            attempt="1",
            created_at=past,
            scheduled_at=past,
            claimed_at=past,
            started_at=past,
            finished_at=past,
        )
        await fill(conn, crowd, status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 day'")
        await fill(conn, crowd)
        return await ground.drain(conn, ground.jobs(JOBS))


async def under_snapshot(ground: Ground, jobs: int) -> Drained:
    """Drain while a transaction that was there before keeps every dead row version."""
    async with ground.schema() as conn:
        await fill(conn, ground.jobs(jobs))
        holder = await asyncpg.connect(ground.server.dsn())
        try:
            await holder.execute("begin isolation level repeatable read")
            await holder.fetchval(f"select count(*) from bench.queues where name = '{QUEUE}'")
            return await ground.drain(conn, ground.jobs(jobs))
        finally:
            await holder.close()
