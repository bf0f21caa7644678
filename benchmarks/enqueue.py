"""Enqueue of one client process, beside pgqueuer in the same run: ``scripts/bench enqueue``.

Jobs of 250 bytes; one call after the other, eight callers at once, batches of 1,000, and one COPY of 50,000. Rounds
alternate between the two, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import asyncpg
import uvloop

from benchmarks.ground import PATIENCE, ROOT, SCHEMA
from benchmarks.noop import Payload, noop
from taskqd import EnqueueItem, TaskQ
from taskqd.storage.migrate import migrate_up
from tests.postgres import embedded

SINGLES, BATCH, BATCHES, FAST, CALLERS = 2_000, 1_000, 20, 50_000, 8
WAYS = ("one by one", "eight callers", "batches of 1,000", "COPY of 50,000")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench enqueue", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = embedded(18)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    try:
        for _ in range(options.rounds):
            ours.append(uvloop.run(enqueue_taskqd(server.dsn())))
            theirs.append(enqueue_pgqueuer(server.dsn()))
    finally:
        server.remove()
    for way in WAYS:
        # pgqueuer has nothing faster than its batches.
        peers = [one.get(way) or one["batches of 1,000"] for one in theirs]
        ratios = [mine[way] / peer for mine, peer in zip(ours, peers, strict=True)]
        print(
            f"{way}: taskqd {statistics.median(one[way] for one in ours):,.0f} jobs/s, "
            f"pgqueuer {statistics.median(peers):,.0f} jobs/s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    return 0


async def rates(one: Callable[[], Awaitable[object]], batch: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """Return jobs per second of single calls, of concurrent ones, and of batches."""

    async def several(calls: int) -> None:
        for _ in range(calls):
            await one()

    await several(100)
    figures: dict[str, float] = {}
    begun = time.perf_counter()
    await several(SINGLES)
    figures["one by one"] = SINGLES / (time.perf_counter() - begun)
    begun = time.perf_counter()
    await asyncio.gather(*(several(SINGLES // CALLERS) for _ in range(CALLERS)))
    figures["eight callers"] = SINGLES / (time.perf_counter() - begun)
    begun = time.perf_counter()
    for _ in range(BATCHES):
        await batch()
    figures["batches of 1,000"] = BATCHES * BATCH / (time.perf_counter() - begun)
    return figures


async def enqueue_taskqd(dsn: str) -> dict[str, float]:
    """Return jobs per second of each way."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f'drop schema if exists "{SCHEMA}" cascade')
    await migrate_up(connection, SCHEMA)
    async with TaskQ(dsn=dsn, schema=SCHEMA, max_pool_size=CALLERS) as tq:
        figures = await rates(
            lambda: tq.enqueue(noop, Payload(n=1)),
            lambda: tq.enqueue_batch([EnqueueItem(actor_ref=noop, payload=Payload(n=n)) for n in range(BATCH)]),
        )
        begun = time.perf_counter()
        await tq.enqueue_batch_fast([EnqueueItem(actor_ref=noop, payload=Payload(n=n)) for n in range(FAST)])
        figures["COPY of 50,000"] = FAST / (time.perf_counter() - begun)
    stored = await connection.fetchval(f"select count(*) from {SCHEMA}.jobs")
    await connection.close()
    if stored != 100 + 2 * SINGLES + BATCHES * BATCH + FAST:
        raise SystemExit(f"wrong result: {stored} jobs are stored")
    return figures


def enqueue_pgqueuer(dsn: str) -> dict[str, float]:
    """Return the same of pgqueuer, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.enqueue", "pgqueuer", dsn]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE)
    figures: dict[str, float] = json.loads(answer.stdout)
    return figures


async def pgqueuer(dsn: str) -> dict[str, float]:
    """Measure pgqueuer."""
    from pgqueuer.db import AsyncpgPoolDriver
    from pgqueuer.queries import Queries

    async with asyncpg.create_pool(dsn, min_size=1, max_size=CALLERS) as pool:
        queries = Queries(AsyncpgPoolDriver(pool))
        await queries.install()
        figures = await rates(
            lambda: queries.enqueue("bench", b"x" * 250, 0),
            lambda: queries.enqueue(["bench"] * BATCH, [b"x" * 250] * BATCH, [0] * BATCH),
        )
        await queries.uninstall()
    return figures


if __name__ == "__main__":
    if sys.argv[1:2] == ["pgqueuer"]:
        print(json.dumps(uvloop.run(pgqueuer(sys.argv[2]))))
    else:
        raise SystemExit(main())
