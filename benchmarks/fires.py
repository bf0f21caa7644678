"""Fires of one scheduler: ``scripts/bench fires``. What is due at once, how fast; what is due in one second, how late.

The first part fires schedules that are all due now, in a fresh schema each round, and beside it enqueues as many jobs,
1,000 at a time, as the measure of the machine. The second runs ``taskqd scheduler run`` with schedules that are due
together, each second, and asks the database how long after their slots the jobs were there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time

import asyncpg

from benchmarks.noop import Payload, noop
from taskqd import EnqueueItem, TaskQ, new_uuid
from taskqd.domain.schedule import Schedule
from taskqd.maintenance.firing import Firing
from taskqd.storage.connect import create_pool
from taskqd.storage.migrate import migrate_up
from taskqd.storage.schedules import create_schedule
from tests.postgres import embedded

SCHEMA = "bench"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench fires", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=15)
    options = parser.parse_args()
    server = embedded(18)
    try:
        fires, inserts = [], []
        for number in range(options.rounds):
            fired, inserted = asyncio.run(burst(server.dsn(), options.schedules))
            fires.append(fired)
            inserts.append(inserted)
            print(f"round {number + 1}: {fired:,.0f} fires/s, {inserted:,.0f} jobs/s enqueued in batches")
        print(
            f"median of {options.rounds}, {options.schedules} due schedules: {statistics.median(fires):,.0f} fires/s, "
            f"{statistics.median(a / b for a, b in zip(fires, inserts, strict=True)):.2f} of enqueue"
        )
        late = asyncio.run(lateness(server.dsn(), options.together, options.seconds))
        print(
            f"{options.together} schedules of the same second for {options.seconds} s, {len(late)} fires: "
            f"lateness p50 {late[len(late) // 2] * 1000:.0f} ms, p99 {late[len(late) * 99 // 100] * 1000:.0f} ms, "
            f"max {late[-1] * 1000:.0f} ms"
        )
    finally:
        server.remove()
    return 0


async def burst(dsn: str, schedules: int) -> tuple[float, float]:
    """Return fires per second of schedules that are all due, and jobs per second that enqueue inserts."""
    connection = await fresh(dsn, schedules, "0 3 * * *")
    await connection.execute(f"update {SCHEMA}.schedules set next_fire_at = clock_timestamp() - interval '1 second'")
    await connection.execute(f"vacuum analyze {SCHEMA}.schedules")
    pool = await create_pool(
        dsn, role="bench", schema=SCHEMA, group="", min_size=1, max_size=2, command_timeout=60, pinned=True
    )
    firing = Firing(pool, SCHEMA, new_uuid(), statement_timeout=60)
    began = time.perf_counter()
    counts, _ = await firing.fire_due(lambda: False, 600.0)
    fired = counts.fired / (time.perf_counter() - began)
    assert counts.fired == schedules
    assert await connection.fetchval(f"select count(*) from {SCHEMA}.jobs") == schedules
    await pool.close()
    async with TaskQ(dsn=dsn, schema=SCHEMA) as tq:
        began = time.perf_counter()
        for _ in range(schedules // 1000):
            await tq.enqueue_batch([EnqueueItem(actor_ref=noop, payload=Payload(n=n)) for n in range(1000)])
        inserted = schedules // 1000 * 1000 / (time.perf_counter() - began)
    await connection.close()
    return fired, inserted


async def lateness(dsn: str, schedules: int, seconds: int) -> list[float]:
    """Return the sorted seconds from each slot to its job, without the first three seconds."""
    connection = await fresh(dsn, schedules, "* * * * * *")
    env = os.environ | {"TASKQ_PG_DSN": dsn, "TASKQ_SCHEMA_NAME": SCHEMA}
    scheduler = subprocess.Popen(
        [sys.executable, "-m", "taskqd", "scheduler", "run"], env=env, stderr=subprocess.DEVNULL
    )
    try:
        await asyncio.sleep(seconds + 4)
    finally:
        scheduler.send_signal(signal.SIGTERM)
        scheduler.wait(30)
    rows = await connection.fetch(
        f"""
        select extract(epoch from j.created_at - o.due_at)::float8 as late
        from {SCHEMA}.schedule_occurrences o join {SCHEMA}.jobs j on j.id = o.job_id
        where o.due_at > (select min(due_at) from {SCHEMA}.schedule_occurrences) + interval '3 seconds'
        """
    )
    await connection.close()
    return sorted(row["late"] for row in rows)


async def fresh(dsn: str, schedules: int, expression: str) -> asyncpg.Connection:
    """Return a connection to a fresh schema with schedules."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f"drop schema if exists {SCHEMA} cascade")
    await migrate_up(connection, SCHEMA)
    async with connection.transaction():
        for n in range(schedules):
            one = Schedule(name=f"s-{n}", actor="noop", kind="cron", expression=expression, timezone="Europe/Berlin")
            await create_schedule(connection, SCHEMA, one, "api")
    return connection


if __name__ == "__main__":
    raise SystemExit(main())
