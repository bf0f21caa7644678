"""Enqueue and drain at once: a client that enqueues 5,000 jobs a second, in a process of its own."""

from __future__ import annotations

import asyncio
import gc
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
CAUGHT_UP = 0.05
"""Seconds within which a job begins once those are done that came while there was a backlog."""
CALM = 1.0
"""Seconds after the first such job from which on the others are measured."""
MEASURED = 5.0
"""Seconds that must be left then."""


async def together(ground: Ground) -> tuple[float, float, float]:
    """Return jobs per second of a backlog while others are enqueued, then the pick-up p99 in seconds of those that come
    once it is gone and the worker has caught up, and how many were enqueued per second."""
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
        calm = await conn.fetchval(
            f"""select min(created_at) + interval '{CALM} seconds' from {jobs}
                where created_at > $1 and started_at < created_at + interval '{CAUGHT_UP} seconds'""",
            last,
        )
        if begun > first or calm is None or (ended - calm).total_seconds() < MEASURED / 2:
            raise SystemExit("the client did not enqueue throughout, or the worker did not catch up")
        late = await latencies(conn, seen["times"], f"created_at > '{calm.isoformat()}'")
        rate = jobs_done / (last - first).total_seconds()
        return rate, late[len(late) * 99 // 100], coming / (ended - begun).total_seconds()


async def enqueue(dsn: str, first: int, jobs: int, rate: int = RATE) -> None:
    """Enqueue at the rate, batch by batch."""
    gc.disable()  # what it collects holds it up for 60 ms; what is measured is the worker
    size = int(rate * BEAT)
    async with TaskQ(dsn=dsn, schema=SCHEMA) as tq:
        began = time.monotonic()
        for start in range(0, jobs, size):
            numbers = range(first + start, first + min(jobs, start + size))
            await tq.enqueue_batch([EnqueueItem(actor_ref=actors[0], payload=Payload(n=n)) for n in numbers])
            await asyncio.sleep(max(0.0, began + (start + size) / rate - time.monotonic()))


if __name__ == "__main__":
    uvloop.run(enqueue(sys.argv[1], *map(int, sys.argv[2:])))
