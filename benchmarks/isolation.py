"""What a process of its own costs each attempt: ``scripts/bench isolation``.

No-op jobs of an isolated actor, one after the other and two at a time, beside jobs that each start an interpreter
(``python3 -c pass``), which is what an application would do without it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import asyncpg
from pydantic import BaseModel

from benchmarks.table import Table
from taskqd import EnqueueItem, TaskQ, actor
from taskqd.storage.migrate import migrate_up
from tests.postgres import embedded

SCHEMA = "bench"
JOBS = 100
PATIENCE = 300.0


class Nothing(BaseModel):
    """No payload."""


@actor(isolation="process")
async def isolated(payload: Nothing) -> None:
    """Do nothing, in a process of its own."""


@actor
async def interpreter(payload: Nothing) -> None:
    """Do nothing, in an interpreter of its own."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    await process.wait()


actors = [isolated, interpreter]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench isolation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = embedded(18)
    table = Table()
    try:
        for slots in (1, 2):
            rounds = [asyncio.run(_round(server.dsn(), slots)) for _ in range(options.rounds)]
            ours, theirs = zip(*rounds, strict=True)
            table.add(f"an isolated no-op job, {slots} at a time", ours, ".1f ms")
            table.add("an interpreter instead", theirs, ".1f ms")
            table.add("ratio", [mine / other for mine, other in rounds], ".2f", 1.0)
    finally:
        server.remove()
    table.show()
    return 0


async def _round(dsn: str, slots: int) -> tuple[float, float]:
    return await _milliseconds(dsn, isolated.name, slots), await _milliseconds(dsn, interpreter.name, slots)


async def _milliseconds(dsn: str, name: str, slots: int) -> float:
    """Return how long one job takes, of many by one worker with ``slots``."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f'drop schema if exists "{SCHEMA}" cascade')
    await migrate_up(connection, SCHEMA)
    (ref,) = [one for one in actors if one.name == name]
    async with TaskQ(dsn=dsn, schema=SCHEMA) as tq:
        await tq.enqueue_batch([EnqueueItem(actor_ref=ref, payload=Nothing()) for _ in range(JOBS)])
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        environment = {
            **os.environ,
            "TASKQ_PG_DSN": dsn,
            "TASKQ_SCHEMA_NAME": SCHEMA,
            "TASKQ_MAX_CONCURRENCY": str(slots),
            "TASKQ_LOG_LEVEL": "WARNING",
            "TASKQ_HEALTH_SOCKET_PATH": str(Path(directory) / "worker.sock"),
        }
        command = [sys.executable, "-m", "taskqd", "worker", "--actors", "benchmarks.isolation:actors"]
        with subprocess.Popen(command, env=environment) as worker:
            try:
                async with asyncio.timeout(PATIENCE):
                    while await connection.fetchval(f"select count(*) from {SCHEMA}.jobs where status <> 'succeeded'"):
                        await asyncio.sleep(0.1)
            finally:
                worker.send_signal(signal.SIGTERM)
                worker.wait(timeout=60)
    # From the end of the first: what the worker needs to start is none of theirs.
    seconds = await connection.fetchval(
        f"select extract(epoch from max(finished_at) - min(finished_at))::float8 from {SCHEMA}.jobs"
    )
    await connection.close()
    return float(seconds) * 1000 / (JOBS - 1)


if __name__ == "__main__":
    sys.exit(main())
