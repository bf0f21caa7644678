"""What the death of a worker costs its jobs.

A group of two workers runs one job whose retry waits for nothing. Its worker is killed, and what follows is timed from
the SIGKILL: its row is settled as crashed; the job runs again, on the sibling.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import asyncpg

from benchmarks.group import SCHEMA, running, until
from benchmarks.sleeper import Payload, sleeper
from taskqd import TaskQ

_FILE = """\
actors = "benchmarks.sleeper:actors"
workers = [{ name = "io", replicas = 2 }]
"""


async def measure_recovery(dsn: str, conn: asyncpg.Connection) -> tuple[float, float]:
    """Return the seconds from the SIGKILL until the row is settled, and until the job runs again."""
    with running(dsn, _FILE, env={"STARTS": "starts"}) as group:
        group.wait_ready(3)
        starts = group.directory / "starts"
        async with TaskQ(dsn=dsn, schema=SCHEMA) as queue:
            job = await queue.enqueue(sleeper, Payload())
        group.wait(lambda: len(_lines(starts)) == 1)
        killed = time.time()
        os.kill(int(_lines(starts)[0].split()[0]), signal.SIGKILL)
        group.give_up_unless(until(lambda: len(_lines(starts)) == 2, lambda: False))
        settled = await conn.fetchval(
            f"select extract(epoch from finished_at)::float8 from {SCHEMA}.job_attempts "
            "where job_id = $1 and outcome = 'crashed'",
            job.job_id,
        )
        return settled - killed, float(_lines(starts)[1].split()[1]) - killed


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
