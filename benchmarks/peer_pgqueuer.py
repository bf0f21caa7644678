"""pgqueuer on the same work: enqueue N no-op jobs, drain them with one worker, print jobs per second as JSON.

Run in a process of its own: ``python -m benchmarks.peer_pgqueuer DSN JOBS BATCH``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

CHUNK = 1000
PATIENCE = 300.0


async def drain(dsn: str, jobs: int, batch: int) -> float:
    """Return jobs per second from the first to the last handler call."""
    async with asyncpg.create_pool(dsn, min_size=2, max_size=10) as pool:
        driver = AsyncpgPoolDriver(pool)
        queries = Queries(driver)
        await queries.install()
        for start in range(0, jobs, CHUNK):
            size = min(CHUNK, jobs - start)
            await queries.enqueue(["bench"] * size, [b"x" * 250] * size, [0] * size)
        queuer = PgQueuer(driver)
        seen: list[float] = []
        finished = asyncio.Event()

        @queuer.entrypoint("bench")
        async def handle(job: Job) -> None:
            seen.append(time.perf_counter())
            if len(seen) == jobs:
                finished.set()

        running = asyncio.create_task(queuer.run(batch_size=batch))
        async with asyncio.timeout(PATIENCE):
            await finished.wait()
        queuer.shutdown.set()
        await asyncio.wait([running], timeout=30)
        await queries.uninstall()
    return (jobs - 1) / (seen[-1] - seen[0])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps({"jobs_per_second": uvloop.run(drain(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))}))
