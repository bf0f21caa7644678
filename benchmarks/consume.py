"""Transactional consume of one worker, beside pgbench that sends the same statements: ``scripts/bench consume``.

Each job is a transaction that writes one row and settles its job. The worker's rate is from its first claim to its last
settlement, by the database, claims included; pgbench settles rows that were claimed before. Rounds alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from benchmarks.noop import Payload
from benchmarks.writing import write
from taskqd.storage.migrate import migrate_up
from taskqd.storage.statements import load
from tests.postgres import Server, embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
PATIENCE = 300.0
JOB = "('00000000-0000-7000-8000-' || lpad(to_hex({}), 12, '0'))::uuid"
"""The id of the job with a number, as SQL."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench consume", description=__doc__)
    parser.add_argument("--jobs", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    jobs = options.jobs - options.jobs % options.concurrency
    server = embedded(18)
    try:
        ours, theirs = [], []
        for number in range(options.rounds):
            ours.append(asyncio.run(consume(server, jobs, options.concurrency)))
            theirs.append(asyncio.run(pgbench(server, jobs, options.concurrency)))
            print(f"round {number + 1}: taskqd {ours[-1]:,.0f} jobs/s, pgbench {theirs[-1]:,.0f} transactions/s")
    finally:
        server.remove()
    ratios = [mine / peer for mine, peer in zip(ours, theirs, strict=True)]
    print(
        f"median of {options.rounds}, {jobs} jobs, {options.concurrency} at once: "
        f"taskqd {statistics.median(ours):,.0f} jobs/s, pgbench {statistics.median(theirs):,.0f} transactions/s, "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return 0


async def prepare(connection: asyncpg.Connection, jobs: int, **columns: str) -> None:
    """Make the schema anew, with a ledger and that many jobs, numbered from 0; ``columns`` are SQL expressions."""
    await connection.execute(f'drop schema if exists "{SCHEMA}" cascade')
    await migrate_up(connection, SCHEMA)
    await connection.execute(f'create table "{SCHEMA}".ledger (id bigserial primary key, n int not null)')
    values = {
        "id": JOB.format("n"),
        "queue": "'bench'",
        "route": "'bench'",
        "actor": f"'{write.name}'",
        "payload": f"jsonb_set('{write.encode_payload(Payload(n=0))}', '{{n}}', to_jsonb(n))",
        **columns,
    }
    names, expressions = ", ".join(values), ", ".join(values.values())
    await connection.execute(
        f'insert into "{SCHEMA}".jobs ({names}) select {expressions} from generate_series(0, {jobs - 1}) n'
    )
    await connection.execute(f'analyze "{SCHEMA}".jobs')


async def check(connection: asyncpg.Connection, jobs: int) -> None:
    """Stop when not every job has succeeded and written its row once."""
    left = await connection.fetchval(f"select count(*) from {SCHEMA}.jobs where status <> 'succeeded'")
    written = await connection.fetchrow(f"select count(*), sum(n) from {SCHEMA}.ledger")
    if left or tuple(written) != (jobs, jobs * (jobs - 1) // 2):
        raise SystemExit(f"wrong result: {left} jobs did not succeed, the ledger holds {tuple(written)}")


async def consume(server: Server, jobs: int, concurrency: int) -> float:
    """Return the worker's jobs per second."""
    connection = await asyncpg.connect(server.dsn())
    await prepare(connection, jobs)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        environment = {
            **os.environ,
            "TASKQ_PG_DSN": server.dsn(),
            "TASKQ_SCHEMA_NAME": SCHEMA,
            "TASKQ_QUEUES": "bench",
            "TASKQ_MAX_CONCURRENCY": str(concurrency),
            "TASKQ_LOG_LEVEL": "WARNING",
            "TASKQ_HEALTH_SOCKET_PATH": str(Path(directory) / "worker.sock"),
        }
        command = [sys.executable, "-m", "taskqd", "worker", "--actors", "benchmarks.writing:registry"]
        with subprocess.Popen(command, env=environment, cwd=ROOT) as worker:
            deadline = time.monotonic() + PATIENCE
            while await connection.fetchval(
                f"select exists (select from {SCHEMA}.jobs where status in ('pending', 'running', 'scheduled'))"
            ):
                if worker.poll() is not None or time.monotonic() > deadline:
                    worker.kill()
                    raise SystemExit(f"the worker did not finish (exit code {worker.returncode})")
                await asyncio.sleep(0.25)
            worker.send_signal(signal.SIGTERM)
            worker.wait(timeout=60)
    await check(connection, jobs)
    seconds = await connection.fetchval(
        f"select extract(epoch from max(finished_at) - min(claimed_at))::float8 from {SCHEMA}.jobs"
    )
    await connection.close()
    return jobs / float(seconds)


async def pgbench(server: Server, jobs: int, concurrency: int) -> float:
    """Return pgbench's transactions per second."""
    connection = await asyncpg.connect(server.dsn())
    await prepare(
        connection,
        jobs,
        status="'running'",
        epoch="1",
        attempt="1",
        claimed_at="now()",
        lock_expires_at="now() + interval '1 hour'",
        worker_id=JOB.format(1),
    )
    each = jobs // concurrency
    number = f":i::int + :client_id::int * {each}"
    settle = load("worker", SCHEMA).settle_succeeded
    for place, value in (
        ("$1", f"array[{JOB.format(number)}]"),
        ("$2", "array[1]"),
        ("$3", "array[0.001]"),
        ("$4", "array[null]"),
    ):
        settle = settle.replace(place, value)
    script = "\n".join(
        ["begin;", f"insert into {SCHEMA}.ledger (n) values ({number});", f"{settle};", "commit;", "\\set i :i + 1"]
    )
    with tempfile.NamedTemporaryFile("w", suffix=".sql", dir="/tmp") as file:
        file.write(script)
        file.flush()
        command = [
            *(str(server.bin_dir / "pgbench"), "--no-vacuum", "--protocol=prepared", f"--file={file.name}"),
            *(f"--client={concurrency}", "--jobs=2", f"--transactions={each}", "--define=i=0"),
            *("--host", str(server.root), "--username=postgres", "postgres"),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    await check(connection, jobs)
    await connection.close()
    found = re.search(r"tps = ([\d.]+) \(without initial", done.stdout)
    assert found is not None
    return float(found.group(1))


if __name__ == "__main__":
    raise SystemExit(main())
