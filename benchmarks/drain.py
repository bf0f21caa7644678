"""No-op drain of one worker process, beside pgqueuer in the same run: ``scripts/bench drain``.

All jobs are enqueued before the start; the drain is timed from the first to the last handler call. Rounds alternate
between the two, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from benchmarks.noop import Payload, noop
from taskqd import EnqueueItem, TaskQ
from taskqd.storage.migrate import migrate_up
from tests.postgres import embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
CHUNK = 1000
PATIENCE = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench drain", description=__doc__)
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=50)
    options = parser.parse_args()
    server = embedded(18)
    try:
        ours, theirs = [], []
        for number in range(options.rounds):
            ours.append(asyncio.run(drain_taskqd(server.dsn(), options.jobs, options.concurrency)))
            theirs.append(drain_pgqueuer(server.dsn(), options.jobs))
            print(f"round {number + 1}: taskqd {ours[-1]:,.0f} jobs/s, pgqueuer {theirs[-1]:,.0f} jobs/s")
    finally:
        server.remove()
    ratios = [mine / peer for mine, peer in zip(ours, theirs, strict=True)]
    print(
        f"median of {options.rounds}, {options.jobs} jobs: taskqd {statistics.median(ours):,.0f} jobs/s, "
        f"pgqueuer {statistics.median(theirs):,.0f} jobs/s, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return 0


async def drain_taskqd(dsn: str, jobs: int, concurrency: int) -> float:
    """Return jobs per second; checks the sum of what the handlers saw."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(f'drop schema if exists "{SCHEMA}" cascade')
    await migrate_up(connection, SCHEMA)
    async with TaskQ(dsn=dsn, schema=SCHEMA) as tq:
        for start in range(0, jobs, CHUNK):
            numbers = range(start, min(jobs, start + CHUNK))
            await tq.enqueue_batch([EnqueueItem(actor_ref=noop, payload=Payload(n=n)) for n in numbers])
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        seen = await asyncio.to_thread(run_worker, dsn, jobs, concurrency, Path(directory))
    left = await connection.fetchval(f"select count(*) from {SCHEMA}.jobs where status <> 'succeeded'")
    await connection.close()
    if left or seen["sum"] != jobs * (jobs - 1) // 2:
        raise SystemExit(f"wrong result: {left} jobs did not succeed, the sum is {seen['sum']}")
    return float(seen["jobs_per_second"])


def run_worker(dsn: str, jobs: int, concurrency: int, directory: Path) -> dict[str, float]:
    """Run one worker until its handlers have seen every job, stop it, and return what they saw."""
    output = directory / "tally.json"
    environment = {
        **os.environ,
        "TASKQ_PG_DSN": dsn,
        "TASKQ_SCHEMA_NAME": SCHEMA,
        "TASKQ_QUEUES": "bench",
        "TASKQ_MAX_CONCURRENCY": str(concurrency),
        "TASKQ_LOG_LEVEL": "WARNING",
        "TASKQ_HEALTH_SOCKET_PATH": str(directory / "worker.sock"),
        "BENCH_TOTAL": str(jobs),
        "BENCH_OUTPUT": str(output),
    }
    command = [sys.executable, "-m", "taskqd", "worker", "--actors", "benchmarks.noop:registry"]
    with subprocess.Popen(command, env=environment, cwd=ROOT) as worker:
        deadline = time.monotonic() + PATIENCE
        while not (output.exists() and output.stat().st_size):
            if worker.poll() is not None or time.monotonic() > deadline:
                worker.kill()
                raise SystemExit(f"the worker did not finish (exit code {worker.returncode})")
            time.sleep(0.05)
        worker.send_signal(signal.SIGTERM)
        worker.wait(timeout=60)
    tally: dict[str, float] = json.loads(output.read_text())
    return tally


def drain_pgqueuer(dsn: str, jobs: int) -> float:
    """Return pgqueuer's jobs per second, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.peer_pgqueuer", dsn, str(jobs), "100"]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE)
    return float(json.loads(answer.stdout)["jobs_per_second"])


if __name__ == "__main__":
    raise SystemExit(main())
