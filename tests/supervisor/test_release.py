"""Jobs of a dead worker come back at once, whoever is left to do it. Leases are a minute, so it is not they."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from taskqd import RetryPolicy, TaskQ, actor
from tests.support import Command, eventually, wait_until

SETTLED_WITHIN = 2.0
"""Ten times the target from the SIGKILL to the settled row."""
ACTORS = """\
import asyncio, os, time
from datetime import timedelta
from pydantic import BaseModel
from taskqd import RetryPolicy, actor

class Work(BaseModel):
    how: str = ""

def note():
    with open("started", "a") as file:
        file.write(f"{os.getpid()}\\n")

@actor(retry=RetryPolicy(base=timedelta(0), max_attempts=5))
async def waits(payload: Work) -> None:
    note()
    if len(open("started").readlines()) <= 1:
        await asyncio.sleep(1000)

@actor(retry=RetryPolicy(base=timedelta(0), max_attempts=1))
def keeps_a_thread(payload: Work) -> None:
    note()
    time.sleep(1000)

registry = [waits, keeps_a_thread]
"""


class Work(BaseModel):
    how: str = ""


@actor(retry=RetryPolicy(base=timedelta(0), max_attempts=5))
async def waits(payload: Work) -> None:
    """Stands for the actor of that name in the group's own module."""


@actor(retry=RetryPolicy(base=timedelta(0), max_attempts=1))
def keeps_a_thread(payload: Work) -> None:
    """The same."""


class Running:
    """A group at work on one job, and what is to be known of it."""

    def __init__(self, command: Command, directory: Path, conn: asyncpg.Connection, schema: str) -> None:
        self.command = command
        self.directory = directory
        self.conn = conn
        self.schema = schema

    def events(self, name: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.command.stderr.splitlines() if line.startswith("{")]
        return [event for event in found if event.get("event") == name]

    @property
    def record(self) -> Path:
        return self.directory / "run" / "group.state.json"

    def executors(self) -> list[int]:
        path = self.directory / "started"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    async def job(self, actor_ref: Any, dsn: str) -> None:
        """Enqueue one job and wait until it runs."""
        async with TaskQ(dsn=dsn, schema=self.schema) as queue:
            await queue.enqueue(actor_ref, Work())
        await eventually(self.executors, 30)

    async def attempts(self) -> list[tuple[str, str]]:
        rows = await self.conn.fetch(f'select outcome, cause from "{self.schema}".job_attempts order by epoch')
        return [tuple(row) for row in rows]

    async def status(self) -> str:
        return str(await self.conn.fetchval(f'select status::text from "{self.schema}".jobs'))


StartGroup = Callable[..., Running]


@pytest.fixture
def running(
    start: Callable[..., Command],
    short_dir: Path,
    child_env: dict[str, str],
    conn: asyncpg.Connection,
    schema: str,
) -> StartGroup:
    def run(workers: int, *, scheduler: bool = False, grace: int = 85, extra: str = "") -> Running:
        (short_dir / "group.toml").write_text(
            f'actors = "group_actors:registry"\n[supervisor]\nruntime_dir = "run"\n'
            f"termination_grace_period = {grace}\n[scheduler]\nenabled = {str(scheduler).lower()}\n"
            f'[[workers]]\nname = "io"\nreplicas = {workers}\n{extra}'
        )
        (short_dir / "group_actors.py").write_text(ACTORS)
        group = Running(start("run", "group.toml", env=child_env), short_dir, conn, schema)
        wait_until(lambda: len(group.events("ready")) >= workers + scheduler, 60, group.command.stderr)
        return group

    return run


@pytest.mark.parametrize(
    ("workers", "scheduler", "by"),
    [(2, False, "io."), (1, True, "scheduler.0"), (1, False, "helper")],
    ids=["a sibling", "the scheduler", "a helper process"],
)
async def test_the_jobs_of_a_killed_worker_run_again_at_once(
    running: StartGroup, dsn: str, workers: int, scheduler: bool, by: str
) -> None:
    group = running(workers, scheduler=scheduler)
    await group.job(waits, dsn)
    (victim,) = group.executors()
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    await eventually(group.attempts, 20, group.command.stderr)
    took = time.monotonic() - began
    assert await group.attempts() == [("crashed", "worker_dead")]
    (told,) = await eventually(lambda: group.events("jobs-released"), 10)
    assert told["by"].startswith(by)
    assert told["jobs"] == 1
    if by != "helper":  # which has to start first
        assert took < SETTLED_WITHIN
    await eventually(lambda: len(group.executors()) == 2, 20)
    await eventually(lambda: _is(group, "succeeded"), 20)
    group.command.process.terminate()
    assert group.command.wait() == 0, group.command.stderr
    assert not group.record.exists()


async def _is(group: Running, status: str) -> bool:
    return await group.status() == status


async def test_a_row_that_a_stop_had_to_leave_is_an_interrupt_before_the_group_has_ended(
    running: StartGroup, dsn: str
) -> None:
    group = running(1, grace=12, extra="cancellation_grace_period = 0\ncleanup_grace_period = 0\n")
    await group.job(keeps_a_thread, dsn)
    group.command.process.terminate()
    assert group.command.wait() in (0, 3), group.command.stderr
    assert await group.attempts() == [("interrupted", "worker_shutdown")]
    assert await group.status() == "pending"
    assert not group.record.exists()


async def test_while_the_database_is_away_it_is_tried_until_it_works(
    running: StartGroup, dsn: str, server: Any, conn: asyncpg.Connection, schema: str
) -> None:
    group = running(2)
    await group.job(waits, dsn)
    (victim,) = group.executors()
    server.stop()
    try:
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: group.events("release-failed"), 30)
    finally:
        server.start()
    await eventually(lambda: group.events("jobs-released"), 60, group.command.stderr)
    group.conn = await asyncpg.connect(dsn)
    try:
        assert await group.attempts() == [("crashed", "worker_dead")]
    finally:
        await group.conn.close()
