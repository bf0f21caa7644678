"""Promotion of scheduled jobs: ``scripts/bench promotion``. How fast a due backlog, beside which claims, how soon.

The first part promotes a million due rows with nothing beside it. The second has a worker that drains pending jobs,
alone, then while ``taskqd scheduler run`` promotes a million due rows in the same queue: what it ends in a second, and
what is promoted in a second meanwhile. Rounds alternate between all of them. The third enqueues a stream of jobs that
are due within seconds, and asks the handlers how long after that they began.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from datetime import UTC, datetime, timedelta

import asyncpg

from benchmarks.ground import PATIENCE, SCHEMA, Ground, fill, serving
from benchmarks.noop import Payload
from benchmarks.pickup import registered
from benchmarks.table import Table
from benchmarks.work import actors
from taskqd import TaskQ

BACKLOG = 1_000_000
DRAINED = 200_000
STREAM, SECONDS = 200, 10
"""Jobs of the stream a second, and how long it lasts."""
EARLIEST, LATEST = 0.5, 4.0
"""Seconds until a job of the stream is due."""
_LEFT = f"select from {SCHEMA}.jobs where status = 'scheduled' order by scheduled_at desc limit 1"
_DUE = {
    "status": "'scheduled'",
    "created_at": "clock_timestamp() - interval '1 day'",
    "scheduled_at": "clock_timestamp() - interval '1 hour' + n * interval '1 ms'",
}


async def promoted(ground: Ground, conn: asyncpg.Connection) -> float:
    """Return the seconds that a scheduler takes from its first promoted row to its last."""
    first = f"select from {SCHEMA}.jobs where status = 'scheduled' order by scheduled_at limit 1"
    oldest = await conn.fetchval(first.replace("select", "select id"))
    with ground.scheduler():
        status = f"select status <> 'scheduled' from {SCHEMA}.jobs where id = $1"
        async with asyncio.timeout(PATIENCE):
            while not await conn.fetchval(status, oldest):
                await asyncio.sleep(0.005)
            began = time.perf_counter()
            # They go from the oldest to the newest, so the other end tells without a walk over what has gone.
            while await conn.fetchrow(_LEFT) is not None:
                await asyncio.sleep(0.02)
    return time.perf_counter() - began


async def alone(ground: Ground) -> float:
    """Return rows per second of a promotion with nothing beside it."""
    rows = ground.jobs(BACKLOG)
    async with ground.schema() as conn:
        await fill(conn, rows, **_DUE)
        await conn.execute(f"vacuum analyze {SCHEMA}.jobs")
        return rows / await promoted(ground, conn)


async def beside(ground: Ground) -> tuple[float, float]:
    """Return rows promoted per second while a worker drains, and the jobs that the worker ends per second then."""
    rows = ground.jobs(BACKLOG)
    async with ground.schema() as conn:
        await fill(conn, ground.jobs(2 * DRAINED))
        await fill(conn, rows, first=2 * DRAINED, **_DUE)
        await conn.execute(f"vacuum analyze {SCHEMA}.jobs")
        async with ground.workers(BENCH_TOTAL=10 * BACKLOG):
            ended = f"select count(*) from {SCHEMA}.jobs where status = 'succeeded'"
            async with asyncio.timeout(PATIENCE):
                while not await conn.fetchval(ended):
                    await asyncio.sleep(0.05)
            before, began = await conn.fetchrow(f"select ({ended}), statement_timestamp()")
            seconds = await promoted(ground, conn)
            after, over = await conn.fetchrow(f"select ({ended}), statement_timestamp()")
    return rows / seconds, (after - before) / (over - began).total_seconds()


async def drain(ground: Ground) -> float:
    """Return the jobs per second of the worker alone."""
    async with ground.schema() as conn:
        await fill(conn, ground.jobs(DRAINED))
        await conn.execute(f"vacuum analyze {SCHEMA}.jobs")
        return (await ground.drain(conn, ground.jobs(DRAINED))).rate


async def lateness(ground: Ground) -> list[float]:
    """Return the sorted seconds from when jobs of a stream were due to their handlers."""
    total = STREAM * (SECONDS // 2 if ground.quick else SECONDS)
    async with ground.schema() as conn, TaskQ(dsn=ground.server.dsn(), schema=SCHEMA) as tq:
        async with ground.workers(BENCH_TOTAL=total, BENCH_TIMES=1) as processes, asyncio.timeout(PATIENCE):
            with ground.scheduler():
                await registered(conn, 1)
                for n in range(total):
                    when = datetime.now(UTC) + timedelta(seconds=random.uniform(EARLIEST, LATEST))
                    await tq.enqueue(actors[0], Payload(n=n), scheduled_at=when)
                    await asyncio.sleep(1 / STREAM)
                await ground.seen_all(processes[0])
            (seen,) = await ground.finish(processes)
        due: dict[int, float] = dict(
            await conn.fetch(
                f"select (payload ->> 'n')::int, extract(epoch from scheduled_at)::float8 from {SCHEMA}.jobs"
            )
        )
    return sorted(began - due[n] for n, began in seen["times"])


async def measure(ground: Ground) -> Table:
    """Measure each part, in turns."""
    free, busy, ends, drains, late = [], [], [], [], []
    for _ in range(ground.rounds):
        free.append(await alone(ground))
        drains.append(await drain(ground))
        rate, ended = await beside(ground)
        busy.append(rate)
        ends.append(ended)
        late.append(await lateness(ground))
    table = Table()
    table.add("rows promoted a second, nothing beside", free, ",.0f", 20_000, 50_000, at_least=True)
    table.add("rows promoted a second while a worker drains", busy, ",.0f", 10_000, 20_000, at_least=True)
    ratios = [one / other for one, other in zip(ends, drains, strict=True)]
    note = f"{statistics.median(ends):,.0f} and {statistics.median(drains):,.0f} jobs/s"
    table.add("jobs that the worker ends meanwhile / alone", ratios, ".2f", 0.3, 0.5, note, at_least=True)
    middle = [one[len(one) // 2] * 1000 for one in late]
    slow = [one[len(one) * 99 // 100] * 1000 for one in late]
    table.add(f"{STREAM} jobs a second, due to handler: p50", middle, ".0f ms")
    table.add("the same: p99", slow, ".0f ms", 1000, 250)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench promotion", description=__doc__)
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    with serving(rounds, quick=options.quick, deployed=False, concurrency=50) as ground:
        table = asyncio.run(measure(ground))
    print(f"\nmedians of {rounds} rounds on {os.cpu_count()} CPUs")
    table.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
