"""Transactional consume of one worker, beside pgbench that sends the same statements: ``scripts/bench consume``.

Each job is claimed, and a transaction then writes one row and settles it. The worker's rate is from its first claim to
its last settlement, by the database. pgbench claims each job by itself, and in another run finds them claimed. Rounds
alternate.
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
from uuid import UUID

import asyncpg

from benchmarks.noop import Payload
from benchmarks.writing import write
from taskqd.storage.migrate import migrate_up
from taskqd.storage.statements import load
from taskqd.worker.lane_claims import NO_CLAIM
from tests.postgres import Server, embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
PATIENCE = 300.0
JOB = "('00000000-0000-7000-8000-' || lpad(to_hex({}), 12, '0'))::uuid"
"""The id of the job with a number, as SQL."""
CLAIM = (
    *("1", JOB.format(1), "array['bench']", "array[0]::smallint[]"),
    *("array[:scheduled_at::timestamptz]", "array[:id::uuid]", f"array['{write.name}']", "3600"),
)
"""What pgbench claims with: one job, from where the client's last one stood."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench consume", description=__doc__)
    parser.add_argument("--jobs", type=int, default=16_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    jobs = options.jobs - options.jobs % options.concurrency
    server = embedded(18)
    try:
        rates: dict[str, list[float]] = {"taskqd": [], "pgbench": [], "pgbench without claims": []}
        for number in range(options.rounds):
            rates["taskqd"].append(asyncio.run(consume(server, jobs, options.concurrency)))
            rates["pgbench"].append(asyncio.run(pgbench(server, jobs, options.concurrency, claims=True)))
            rates["pgbench without claims"].append(
                asyncio.run(pgbench(server, jobs, options.concurrency, claims=False))
            )
            print(f"round {number + 1}: " + ", ".join(f"{who} {rate[-1]:,.0f}/s" for who, rate in rates.items()))
    finally:
        server.remove()
    print(f"median of {options.rounds}, {jobs} jobs, {options.concurrency} at once:")
    for who, rate in rates.items():
        ratios = [mine / theirs for mine, theirs in zip(rates["taskqd"], rate, strict=True)]
        spread = f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"  {who} {statistics.median(rate):,.0f}/s" + ("" if who == "taskqd" else f", {spread}"))
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


async def check(connection: asyncpg.Connection, jobs: int, *, missed: int = 0) -> None:
    """Stop when not every job has succeeded, but for ``missed``, or has not written its row once."""
    left = await connection.fetchval(f"select count(*) from {SCHEMA}.jobs where status <> 'succeeded'")
    written = await connection.fetchrow(f"select count(*), sum(n) from {SCHEMA}.ledger")
    if left > missed or tuple(written) != (jobs, jobs * (jobs - 1) // 2):
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


async def pgbench(server: Server, jobs: int, concurrency: int, *, claims: bool) -> float:
    """Return pgbench's transactions per second; with ``claims`` each client claims a job before its transaction."""
    connection = await asyncpg.connect(server.dsn())
    each = jobs // concurrency
    if claims:
        await prepare(connection, jobs)
        script = [f"{_with(load('worker', SCHEMA).claim, *CLAIM)} \\gset"]
        job, number = ":id::uuid", "('x' || right(:id, 12))::bit(48)::bigint::int"
        variables = ["--define=scheduled_at=0001-01-01", f"--define=id={UUID(int=0)}", "--define=i=0"]
    else:
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
        number = f":i::int + :client_id::int * {each}"
        job = JOB.format(number)
        script, variables = [], ["--define=i=0"]
    arguments = (f"array[{job}]", "array[1]", "array[0.001]", "array[null]", *("null" for _ in NO_CLAIM))
    settle = _with(load("worker", SCHEMA).settle_succeeded, *arguments)
    insert = f"insert into {SCHEMA}.ledger (n) values ({number})"
    script += ["begin;", f"{insert};", f"{settle};", "commit;", "\\set i :i + 1"]
    with tempfile.NamedTemporaryFile("w", suffix=".sql", dir="/tmp") as file:
        file.write("\n".join(script))
        file.flush()
        command = [
            *(str(server.bin_dir / "pgbench"), "--no-vacuum", "--protocol=prepared", f"--file={file.name}"),
            *(f"--client={concurrency}", "--jobs=2", f"--transactions={each}", *variables),
            *("--host", str(server.root), "--username=postgres", "postgres"),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    # Another client's claim may hold a row for a moment, which the settlement then passes over; a worker tries again.
    await check(connection, jobs, missed=jobs // 50 if claims else 0)
    await connection.close()
    found = re.search(r"tps = ([\d.]+) \(without initial", done.stdout)
    assert found is not None
    return float(found.group(1))


def _with(statement: str, *values: str) -> str:
    """Return the statement with SQL expressions in place of its parameters."""
    for number, value in enumerate(values, 1):
        statement = re.sub(rf"\${number}\b", lambda _match, value=value: value, statement)
    return statement


if __name__ == "__main__":
    raise SystemExit(main())
