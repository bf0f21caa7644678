"""What a new password costs a group under load: ``scripts/bench rotation``.

Eight workers run short jobs; the role gets a new password, the mounted secret is swapped, and the group reloads. Timed:
from the first process that is asked to the last one's answer, when every pool and connection is a new one, drained.
Checked: no process restarted, no job failed, and as many executions as attempts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.counted import Payload, counted
from taskqd import EnqueueItem, TaskQ
from taskqd.storage.migrate import migrate_up
from tests.postgres import PASSWORD_ROLE, embedded

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = "bench"
WORKERS = 8
JOBS = 10_000
BATCH = 1000
PATIENCE = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench rotation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server = embedded(18)
    try:
        figures = asyncio.run(rotate(server.dsn(), server.dsn(PASSWORD_ROLE), options.rounds))
    finally:
        server.remove()
    print(
        f"rotation of {WORKERS} workers and a scheduler under load: median of {options.rounds} "
        f"{statistics.median(figures):.0f} ms ({min(figures):.0f} to {max(figures):.0f}), 0 restarts, 0 failed jobs"
    )
    return 0


async def rotate(admin_dsn: str, dsn: str, rounds: int) -> list[float]:
    """Return the milliseconds that each rotation took."""
    conn = await asyncpg.connect(admin_dsn)
    try:
        await migrate_up(conn, SCHEMA)
        await conn.execute(f"create role {PASSWORD_ROLE} login superuser password 'first'")
        with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
            return await _rotate(conn, admin_dsn, dsn, Path(directory), rounds)
    finally:
        await conn.close()


async def _rotate(conn: asyncpg.Connection, admin_dsn: str, dsn: str, directory: Path, rounds: int) -> list[float]:
    secret = directory / "password"
    secret.write_text("first")
    (directory / "group.toml").write_text(
        'actors = "benchmarks.counted:actors"\n[supervisor]\nruntime_dir = "run"\n[credentials]\nprovider = "file"\n'
        f'path = "{secret}"\nrefresh_interval = 0\n[[workers]]\nname = "io"\nreplicas = {WORKERS}\n'
    )
    executions = directory / "executions"
    env = os.environ | {
        "TASKQ_PG_DSN": dsn,
        "TASKQ_SCHEMA_NAME": SCHEMA,
        "PYTHONPATH": str(ROOT),
        "EXECUTIONS": str(executions),
    }
    log = directory / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-P", "-m", "taskqd", "run", "group.toml"]
        group = subprocess.Popen(command, cwd=directory, env=env, stderr=output)
    try:
        await _until(lambda: len(_events(log, "ready")) == WORKERS + 1, "the group is ready")
        async with TaskQ(dsn=admin_dsn, schema=SCHEMA) as queue:
            for number in range(rounds):
                for _ in range(JOBS // BATCH):
                    await queue.enqueue_batch([EnqueueItem(actor_ref=counted, payload=Payload()) for _ in range(BATCH)])
                password = secrets.token_urlsafe(16)
                await conn.execute(f"alter role {PASSWORD_ROLE} password '{password}'")
                (directory / "new").write_text(password)
                (directory / "new").rename(secret)
                group.send_signal(signal.SIGHUP)
                await _until(lambda number=number: len(_rotations(log)) > number, "the rotation ends")
                if not await conn.fetchval(f"select exists (select from {SCHEMA}.jobs where status = 'pending')"):
                    raise RuntimeError("the load ended before the rotation: give it more jobs")
        done = f"select count(*) from {SCHEMA}.jobs where status = 'succeeded'"
        for _ in range(int(PATIENCE / 0.1)):
            if await conn.fetchval(done) == JOBS * rounds:
                break
            await asyncio.sleep(0.1)
        attempts = await conn.fetchval(f"select sum(attempt) from {SCHEMA}.jobs")
        runs, exits = executions.stat().st_size, _events(log, "child-exit")
        failed = [event["failed"] for event in _rotations(log) if "failed" in event]
        if (await conn.fetchval(done), attempts, runs) != (JOBS * rounds,) * 3 or exits or failed:
            raise RuntimeError(f"{runs} executions, {attempts} attempts, exits {exits}, failed {failed}")
        return [event["ms"] for event in _rotations(log)]
    finally:
        group.terminate()
        group.wait(PATIENCE)


def _events(log: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return [event for event in found if event.get("event") == name]


def _rotations(log: Path) -> list[dict[str, Any]]:
    return [event for event in _events(log, "credentials-reloaded") if "children" in event]


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
