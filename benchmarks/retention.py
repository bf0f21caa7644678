"""Retention beside its work: ``scripts/bench retention``. Jobs come, run and go, 2,000 a second; do drains notice?

One client enqueues 2,000 jobs a second, one worker runs them, and a scheduler archives them five seconds after their
ends. Every few seconds a batch of jobs with a higher priority comes on top: the drains. The scheduler is stopped
(``SIGSTOP``) during every second one, so that each drain has its like without retention right beside it, on the same
tables at the same load. Watched meanwhile: the size of the table of jobs, and how long ended rows have stayed in it.
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
from dataclasses import dataclass, field

import asyncpg

from benchmarks.ground import PATIENCE, ROOT, SCHEMA, Ground, fill, serving
from benchmarks.table import Table

RATE = 2_000
KEPT = 5.0
"""Seconds that a job stays in its table after its end."""
DRAIN = 10_000
EVERY = 10.0
"""Seconds from one drain to the next."""
LATE = 15.0
"""Seconds over its time that a job may have stayed: retention comes by once a minute until it finds much to do."""
_ENDS = f"""
select (payload ->> 'drain')::int as drain, count(*) as jobs,
    extract(epoch from max(finished_at) - min(finished_at))::float8 as seconds
from (select payload, finished_at from {SCHEMA}.jobs where priority = 1
      union all select payload, finished_at from {SCHEMA}.jobs_archive where priority = 1) drained
group by 1 order by 1
"""


@dataclass(slots=True)
class Kept:
    """What came of it."""

    archived: float = 0.0
    """Jobs archived per second."""
    beside: list[float] = field(default_factory=list)
    """Jobs per second of each drain while jobs were archived."""
    without: list[float] = field(default_factory=list)
    """The same while none were."""
    bytes: list[int] = field(default_factory=list)
    """The size of the table and its indexes, second by second."""
    rows: list[int] = field(default_factory=list)
    """How many rows were in it."""
    oldest: list[float] = field(default_factory=list)
    """Seconds since the oldest end in it."""

    @property
    def ratio(self) -> float:
        """What a drain keeps of its rate, by the medians of both kinds."""
        return statistics.median(self.beside) / statistics.median(self.without)

    @property
    def growth(self) -> float:
        """The largest size in the last quarter / in the second one."""
        quarter = len(self.bytes) // 4
        return max(self.bytes[-quarter:]) / max(self.bytes[quarter : 2 * quarter])


async def keep_up(ground: Ground, seconds: float, rate: int = RATE, drain: int = DRAIN) -> Kept:
    """Let jobs come, run and go for so long. Raises ``SystemExit`` when one is lost or runs twice."""
    kept = Kept()
    streamed = int(rate * seconds)
    # Numbers of jobs: those of the stream, then those of the drains.
    async with ground.schema() as conn, ground.workers(BENCH_TOTAL=10 * streamed) as processes:
        with ground.scheduler(TASKQ_PRUNE_RETENTION_SUCCEEDED=KEPT) as scheduler:
            command = [sys.executable, "-m", "benchmarks.stream", ground.server.dsn(), "0", str(streamed), str(rate)]
            with subprocess.Popen(command, cwd=ROOT) as client:
                try:
                    drains = await _watch(ground, conn, scheduler, client, kept, drain)
                finally:
                    client.kill()
            if client.returncode:
                raise SystemExit("the client failed")
            await _until(conn, f"select count(*) = 0 from {SCHEMA}.jobs where status <> 'succeeded'")
            began, ended, archived = await conn.fetchrow(
                f"select min(archived_at), max(archived_at), count(*) from {SCHEMA}.jobs_archive"
            )
            kept.archived = archived / (ended - began).total_seconds()
        (seen,) = await ground.finish(processes)
        found = await conn.fetch(_ENDS)
        if [record["jobs"] for record in found[:-1]] != [drain] * (drains - 1):
            raise SystemExit(f"wrong result: drains of {[record['jobs'] for record in found]} jobs")
        total = await conn.fetchval(
            f"select (select count(*) from {SCHEMA}.jobs) + (select count(*) from {SCHEMA}.jobs_archive)"
        )
        if not total == seen["count"] == streamed + drains * drain:
            raise SystemExit(f"wrong result: {total} jobs of {streamed + drains * drain}, {seen['count']} executions")
    for number, record in enumerate(found):
        (kept.beside, kept.without)[number % 2].append(record["jobs"] / record["seconds"])
    return kept


async def _watch(
    ground: Ground,
    conn: asyncpg.Connection,
    scheduler: subprocess.Popen[bytes],
    client: subprocess.Popen[bytes],
    kept: Kept,
    drain: int,
) -> int:
    """Drain and look, until the client has enqueued everything; return how many drains there were."""
    drains = 0
    due = time.monotonic() + EVERY
    while client.poll() is None:
        if time.monotonic() >= due:
            due += EVERY
            if drains % 2:
                scheduler.send_signal(signal.SIGSTOP)
            try:
                payload = f"jsonb_build_object('n', n, 'drain', {drains}, 'blob', repeat('x', 230))"
                await fill(conn, drain, first=10**9 + drains * drain, payload=payload, priority="1")
                drains += 1
                waiting = f"from {SCHEMA}.jobs where status in ('pending', 'running') and priority = 1"
                await _until(conn, f"select count(*) = 0 {waiting}")
            finally:
                scheduler.send_signal(signal.SIGCONT)
        size, rows, oldest = await conn.fetchrow(
            f"select pg_total_relation_size('{SCHEMA}.jobs'), count(*), "
            f"coalesce(extract(epoch from clock_timestamp() - min(finished_at)), 0)::float8 from {SCHEMA}.jobs"
        )
        kept.bytes.append(size)
        kept.rows.append(rows)
        kept.oldest.append(oldest)
        await asyncio.sleep(1)
    return drains


async def _until(conn: asyncpg.Connection, question: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await conn.fetchval(question):
            await asyncio.sleep(0.05)


async def measure(ground: Ground, minutes: float) -> Table:
    """Measure once."""
    kept = await keep_up(ground, minutes * 60)
    table = Table()
    note = f"{statistics.median(kept.beside):,.0f} and {statistics.median(kept.without):,.0f} jobs/s"
    half = len(kept.oldest) // 2
    table.add("jobs archived a second", [kept.archived], ",.0f", RATE, at_least=True)
    table.add("drains beside retention / without", [kept.ratio], ".2f", 0.9, 0.95, note, at_least=True)
    note = f"{max(kept.bytes) / 2**20:,.0f} MiB and {max(kept.rows):,} rows at most"
    table.add("size of the table, last quarter / second", [kept.growth], ".2f", 1.2, 1.05, note)
    table.add("longest stay after the time", [max(kept.oldest[half:]) - KEPT], ".1f s", LATE, 5)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench retention", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="default %(default)g; two is the least")
    options = parser.parse_args()
    if options.minutes < 2:
        parser.error("--minutes: two is the least, or there is nothing to compare")
    with serving(1, quick=False, deployed=False, concurrency=50) as ground:
        table = asyncio.run(measure(ground, options.minutes))
    print(f"\n{options.minutes:g} minutes on {os.cpu_count()} CPUs")
    table.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
