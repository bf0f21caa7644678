"""Enqueue and drain at once: a client that enqueues 5,000 jobs a second, in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import uvloop

from benchmarks.ground import ROOT, SCHEMA, Ground, fill
from benchmarks.noop import Payload
from benchmarks.pickup import latencies
from benchmarks.work import actors
from taskqd import EnqueueItem, TaskQ

BACKLOG = 200_000
RATE = 5_000
BEAT = 0.02
CALM = 1.0
"""Seconds after the end of the backlog from which on jobs are picked up as they come."""
MEASURED = 5.0
"""Seconds that must be left then."""


async def together(ground: Ground) -> tuple[float, float, float]:
    """Return jobs per second of a backlog while others are enqueued, then the pick-up p99 of those that come after it
    in seconds, and how many were enqueued per second."""
    backlog = ground.jobs(BACKLOG)
    coming = int(RATE * (MEASURED + 5 + backlog / 10_000))
    async with ground.schema() as conn:
        await fill(conn, backlog)
        async with ground.workers(BENCH_TOTAL=backlog + coming, BENCH_TIMES=1) as processes:
            command = [sys.executable, "-m", "benchmarks.stream", ground.server.dsn(), str(backlog), str(coming)]
            with subprocess.Popen(command, cwd=ROOT) as client:
                await ground.seen_all(processes[0])
                if client.wait(60):
                    raise SystemExit("the client failed")
            (seen,) = await ground.finish(processes)
        if seen["sum"] != (backlog + coming) * (backlog + coming - 1) // 2:
            raise SystemExit(f"wrong result: the sum is {seen['sum']}")
        jobs = f"{SCHEMA}.jobs"
        of_backlog = f"(payload ->> 'n')::int < {backlog}"
        first, last, jobs_done = await conn.fetchrow(
            f"select min(finished_at), max(finished_at), count(*) from {jobs} where {of_backlog}"
        )
        begun, ended = await conn.fetchrow(
            f"select min(created_at), max(created_at) from {jobs} where not {of_backlog}"
        )
        if begun > first or (ended - last).total_seconds() < CALM + MEASURED / 2:
            raise SystemExit("the client did not enqueue throughout")
        calm = f"not {of_backlog} and created_at > (select max(finished_at) from {jobs} where {of_backlog})"
        late = await latencies(conn, seen["times"], f"{calm} + interval '{CALM} seconds'")
        rate = jobs_done / (last - first).total_seconds()
        return rate, late[len(late) * 99 // 100], coming / (ended - begun).total_seconds()


async def enqueue(dsn: str, first: int, jobs: int, rate: int = RATE) -> None:
    """Enqueue at the rate, batch by batch."""
    size = int(rate * BEAT)
    async with TaskQ(dsn=dsn, schema=SCHEMA) as tq:
        began = time.monotonic()
        for start in range(0, jobs, size):
            numbers = range(first + start, first + min(jobs, start + size))
            await tq.enqueue_batch([EnqueueItem(actor_ref=actors[0], payload=Payload(n=n)) for n in numbers])
            await asyncio.sleep(max(0.0, began + (start + size) / rate - time.monotonic()))


if __name__ == "__main__":
    uvloop.run(enqueue(sys.argv[1], *map(int, sys.argv[2:])))
