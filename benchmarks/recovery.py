"""What the death of a worker costs its jobs: ``scripts/bench recovery``.

A group of two workers runs one job whose retry waits for nothing. Its worker is killed, and what follows is timed from
the SIGKILL: its row is settled as crashed; the job runs again, on the sibling. Beside it, in the same run, the round
trip of a no-op statement, which is what the machine allows at best.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from benchmarks.sleeper import Payload, sleeper
from taskqd import TaskQ
from taskqd.storage.migrate import migrate_up
from tests.postgres import embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
PATIENCE = 30.0
FILE = """\
actors = "benchmarks.sleeper:actors"
[supervisor]
runtime_dir = "run"
[[workers]]
name = "io"
replicas = 2
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench recovery", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = embedded(18)
    try:
        figures = [asyncio.run(recover(server.dsn())) for _ in range(options.rounds)]
    finally:
        server.remove()
    for name, values in zip(
        ("SIGKILL → settled as crashed", "SIGKILL → running again", "one statement"),
        zip(*figures, strict=True),
        strict=True,
    ):
        print(
            f"{name}: median of {options.rounds} {statistics.median(values):.1f} ms "
            f"({min(values):.1f} to {max(values):.1f})"
        )
    return 0


async def recover(dsn: str) -> tuple[float, float, float]:
    """Return the milliseconds until the row is settled, until the job runs again, and of one round trip."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(f"drop schema if exists {SCHEMA} cascade")
        await migrate_up(conn, SCHEMA)
        with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
            return await _recover(conn, dsn, Path(directory))
    finally:
        await conn.close()


async def _recover(conn: asyncpg.Connection, dsn: str, directory: Path) -> tuple[float, float, float]:
    (directory / "group.toml").write_text(FILE)
    starts = directory / "starts"
    env = os.environ | {
        "TASKQ_PG_DSN": dsn,
        "TASKQ_SCHEMA_NAME": SCHEMA,
        "PYTHONPATH": str(ROOT),
        "STARTS": str(starts),
    }
    with (directory / "log").open("wb") as log:
        group = subprocess.Popen(
            [sys.executable, "-P", "-m", "taskqd", "run", "group.toml"], cwd=directory, env=env, stderr=log
        )
    try:
        await _until(lambda: (directory / "log").read_text().count('"event": "ready"') == 3, "the group is ready")
        async with TaskQ(dsn=dsn, schema=SCHEMA) as queue:
            await queue.enqueue(sleeper, Payload())
        await _until(lambda: len(_lines(starts)) == 1, "the job runs")
        settled = f"select extract(epoch from finished_at)::float8 from {SCHEMA}.job_attempts where outcome = 'crashed'"
        await conn.fetchval(settled)
        killed = time.time()
        os.kill(int(_lines(starts)[0].split()[0]), signal.SIGKILL)
        await _until(lambda: len(_lines(starts)) == 2, "the job runs again")
        crashed = await conn.fetchval(settled)
        again = float(_lines(starts)[1].split()[1])
        began = time.perf_counter()
        await conn.fetchval(settled)
        trip = time.perf_counter() - began
        return (crashed - killed) * 1000, (again - killed) * 1000, trip * 1000
    finally:
        group.terminate()
        group.wait(PATIENCE)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def _until(condition: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
