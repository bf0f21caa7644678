"""What a new password costs a group under load.

Eight workers run short jobs; the role gets a new password, the mounted secret is swapped, and the group reloads. Timed:
from the first process that is asked to the last one's answer, when every pool and connection is a new one, drained.
Checked: no process restarted, no job failed, and as many executions as attempts.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import asyncpg

from benchmarks.counted import Payload, counted
from benchmarks.group import PATIENCE, SCHEMA, Group, running
from taskqd import EnqueueItem, TaskQ
from tests.postgres import PASSWORD_ROLE

WORKERS = 8
_BATCH, _BACKLOG = 500, 2000
"""Jobs that are enqueued at a time, and how many wait at any time."""
_FILE = """\
actors = "benchmarks.counted:actors"
workers = [{{ name = "io", replicas = {workers} }}]
credentials = {{ provider = "file", path = "{secret}", refresh_interval = 0 }}
"""


async def measure_rotation(admin_dsn: str, dsn: str, conn: asyncpg.Connection, rounds: int) -> list[float]:
    """Return the seconds that each rotation took."""
    await conn.execute(f"create role {PASSWORD_ROLE} login superuser password 'first'")
    await conn.execute(f"truncate {SCHEMA}.jobs cascade")
    with (
        tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory,
        _group(dsn, secret := Path(directory, "secret")) as group,
    ):
        group.wait_ready(WORKERS + 1)
        enough = asyncio.Event()
        feeding = asyncio.create_task(_feed(admin_dsn, enough))
        for number in range(rounds):
            await asyncio.sleep(0.5)
            await _rotate(group, conn, secret, number + 1)
        enough.set()
        await _check(group, conn, await feeding)
        return [event["ms"] / 1000 for event in _rotations(group)]


def _group(dsn: str, secret: Path) -> AbstractContextManager[Group]:
    secret.write_text("first")
    return running(dsn, _FILE.format(workers=WORKERS, secret=secret), env={"EXECUTIONS": "executions"})


async def _rotate(group: Group, conn: asyncpg.Connection, secret: Path, number: int) -> None:
    """Change the password and wait until everything uses the new one."""
    password = secrets.token_urlsafe(16)
    await conn.execute(f"alter role {PASSWORD_ROLE} password '{password}'")
    secret.with_name("new").write_text(password)
    secret.with_name("new").rename(secret)
    group.process.send_signal(signal.SIGHUP)
    await asyncio.to_thread(group.wait, lambda: len(_rotations(group)) == number)
    left = await conn.fetchval(f"select exists (select from {SCHEMA}.jobs where status = 'pending')")
    group.give_up_unless(left)  # else there was no load


async def _feed(dsn: str, enough: asyncio.Event) -> int:
    """Keep the workers busy until there was ``enough``; return how many jobs that took."""
    jobs, conn = 0, await asyncpg.connect(dsn)
    async with TaskQ(dsn=dsn, schema=SCHEMA) as queue:
        while not enough.is_set():
            waiting = await conn.fetchval(f"select count(*) from {SCHEMA}.jobs where status = 'pending'")
            if waiting < _BACKLOG:
                await queue.enqueue_batch([EnqueueItem(actor_ref=counted, payload=Payload())] * _BATCH)
                jobs += _BATCH
            else:
                await asyncio.sleep(0.05)
    await conn.close()
    return jobs


async def _check(group: Group, conn: asyncpg.Connection, jobs: int) -> None:
    """See that everything ran, once, and that no process ended."""
    count = f"select count(*) from {SCHEMA}.jobs where status in ('pending', 'running')"
    deadline = time.monotonic() + PATIENCE
    while await conn.fetchval(count) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    succeeded, attempts = await conn.fetchrow(
        f"select count(*) filter (where status = 'succeeded'), sum(attempt) from {SCHEMA}.jobs"
    )
    executions = (group.directory / "executions").stat().st_size
    failed = [event for event in _rotations(group) if "failed" in event]
    if (succeeded, attempts, executions) != (jobs,) * 3 or failed or group.events("child-exit"):
        raise SystemExit(
            f"{jobs} jobs, {succeeded} succeeded, {attempts} attempts, {executions} executions, failed {failed}, "
            f"ended {group.events('child-exit')}"
        )


def _rotations(group: Group) -> list[dict[str, Any]]:
    return [event for event in group.events("credentials-reloaded") if "children" in event]
