"""What a real group holds is never more than its budget says: at rest, under load, in a rotation, in a roll."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from taskqd import EnqueueItem, TaskQ, actor
from taskqd.storage.groups import EXPIRES_AFTER
from tests.support import Command, child_environment, eventually, taskqd_argv

ACTORS = """\
import asyncio
from pydantic import BaseModel
from taskqd import JobContext, actor

class Work(BaseModel):
    children: int = 0

@actor(queue="io")
async def work(payload: Work, ctx: JobContext[Work]) -> None:
    # Each of a worker's slots asks for several sessions of the worker's pool at the same time.
    await asyncio.gather(*(ctx.jobs.enqueue(rest, Work()) for _ in range(payload.children)))
    await asyncio.sleep(0.01)

@actor(queue="rest")
async def rest(payload: Work) -> None:
    pass

registry = [work, rest]
"""
FILE = """\
actors = "group_actors:registry"
[supervisor]
runtime_dir = "run"
settle_after = 0.2
[credentials]
provider = "file"
path = "{path}"
refresh_interval = "300ms"
[[workers]]
name = "io"
replicas = 2
max_concurrency = 4
queues = ["io"]
notify_poll_interval = 1
"""
PER_ROLE = {"dispatch": 4, "heartbeat": 4, "notify": 1, "worker": 6}
"""What one of the workers may hold under each role, as the table says."""
IDLE = {"dispatch": 2, "heartbeat": 2, "notify": 2, "worker": 2, "scheduler": 2}
"""What the whole group holds at rest."""


class Work(BaseModel):
    children: int = 0


@actor(queue="io")
async def work(payload: Work) -> None:
    """Stands for the actor of that name in the group's own module."""


class Held:
    """Counts the group's sessions, each look by role, as often as the server answers."""

    def __init__(self, conn: asyncpg.Connection, prefix: str) -> None:
        self._conn = conn
        self._prefix = prefix
        self.now = Counter[str]()
        self.most = Counter[str]()
        self.together = 0
        self.looks = 0

    async def look(self) -> Counter[str]:
        rows = await self._conn.fetch(
            "select application_name as name, count(*) from pg_stat_activity"
            " where starts_with(application_name, $1) group by 1",
            self._prefix,
        )
        now = Counter({row["name"].rpartition("/")[2]: row["count"] for row in rows})
        self.now = now
        self.most |= now
        self.together = max(self.together, now.total())
        self.looks += 1
        return now

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look again and again, from nothing on, until the end of the block."""
        self.most, self.together, self.looks = Counter(), 0, 0

        async def watch() -> None:
            while True:
                await self.look()

        watching = asyncio.create_task(watch())
        try:
            yield
            assert not watching.done()
        finally:
            watching.cancel()
            await asyncio.wait([watching])


@pytest.fixture
async def looker(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    conn = await asyncpg.connect(dsn)
    yield conn
    await conn.close(timeout=10)


@pytest.fixture
async def role(conn: asyncpg.Connection) -> AsyncIterator[str]:
    name = f"held_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {name} login superuser")
    yield name
    await conn.execute(f"drop role {name}")


@pytest.fixture
def secret(short_dir: Path, role: str) -> Path:
    path = short_dir / "secret"
    put(path, role)
    return path


def put(path: Path, role: str) -> None:
    """Put a new password in the place of the old one. The server asks for none."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"username": role, "password": uuid.uuid4().hex}))
    new.rename(path)


@pytest.fixture
def env(dsn: str, schema: str) -> dict[str, str]:
    return child_environment(TASKQ_PG_DSN=dsn, TASKQ_SCHEMA_NAME=schema)


@pytest.fixture
def running(start: Callable[..., Command], short_dir: Path, secret: Path, env: dict[str, str]) -> Iterator[Command]:
    (short_dir / "group_actors.py").write_text(ACTORS)
    (short_dir / "group.toml").write_text(FILE.format(path=secret))
    command = start("run", "group.toml", env=env)
    yield command
    command.process.terminate()


def told(command: Command, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in command.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == event]


async def taskqd(short_dir: Path, env: dict[str, str], *args: str) -> str:
    """Run a command to its good end while the event loop goes on."""
    process = await asyncio.create_subprocess_exec(
        *taskqd_argv(*args), cwd=short_dir, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    return out.decode()


@asynccontextmanager
async def load(dsn: str, schema: str, conn: asyncpg.Connection) -> AsyncIterator[None]:
    """Keep every slot busy until the end of the block."""

    async def feed() -> None:
        async with TaskQ(dsn=dsn, schema=schema) as queue:
            while True:
                items = [EnqueueItem(actor_ref=work, payload=Work(children=8)) for _ in range(50)]
                await queue.enqueue_batch(items)
                await eventually(lambda: pending(conn, schema), 60)

    async def pending(conn: asyncpg.Connection, schema: str) -> bool:
        count = f"select count(*) < 20 from \"{schema}\".jobs where status = 'pending' and actor = 'work'"
        return bool(await conn.fetchval(count))

    feeding = asyncio.create_task(feed())
    try:
        yield
        assert not feeding.done(), "the load ended"
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])


async def test_a_group_never_holds_more_than_its_budget_says(
    running: Command,
    short_dir: Path,
    env: dict[str, str],
    dsn: str,
    schema: str,
    conn: asyncpg.Connection,
    looker: asyncpg.Connection,
    secret: Path,
    role: str,
) -> None:
    budget = json.loads(await taskqd(short_dir, env, "budget", "group.toml", "--json"))
    assert (budget["required"], budget["rotation"], budget["surge"], budget["peak"]) == (38, 16, 16, 70)
    (sessions,) = [worker["sessions"] for worker in budget["workers"]]
    assert {part["role"]: part["each"] for part in sessions} == {**PER_ROLE, "maintain": 1}
    held = Held(looker, f"taskqd/{schema}/group/")

    # At rest: what the table calls idle, role by role.
    await eventually(lambda: len(told(running, "ready")) == 3, 60, running.stderr)
    await eventually(lambda: _is(held, IDLE), 30)
    assert sum(IDLE.values()) == budget["idle"]

    # Under load: no more than steady, and the pools are really used.
    async with load(dsn, schema, conn):
        async with held.watched():
            await eventually(lambda: held.most["worker"] > IDLE["worker"] + 2, 60)
            await asyncio.sleep(0.5)
        assert held.together <= budget["required"], held.most
        for name, most in PER_ROLE.items():
            assert held.most[name] <= 2 * most, held.most

        # A new credential, which every process notices by itself at about the same time.
        async with held.watched():
            put(secret, role)
            await eventually(lambda: len(told(running, "credentials-reloaded")) >= 3, 60)
        check(held, budget, more=budget["rotation"], each_more=1)

        # A roll.
        async with held.watched():
            await taskqd(short_dir, env, "restart", "io", "--socket", "run/group.sock")
        check(held, budget, more=budget["surge"], each_more=1)

        # Both at once, by a reload of another size: sessions are renewed, then processes replaced.
        file = short_dir / "group.toml"
        file.write_text(file.read_text().replace("notify_poll_interval = 1", "notify_poll_interval = 2"))
        async with held.watched():
            put(secret, role)
            await taskqd(short_dir, env, "reload", "--socket", "run/group.sock")
        check(held, budget, more=budget["rotation"] + budget["surge"], each_more=2)
        assert held.looks > 50

    # Its row lives as long as the group does.
    row = await conn.fetchrow(
        f'select place, connections, expires_at > clock_timestamp() as alive from "{schema}".groups'
    )
    assert row is not None
    assert (row["place"], row["alive"]) == (f"{socket.gethostname()}:{short_dir}/run", True)
    await eventually(lambda: _declared(conn, schema, budget["required"] + budget["rotation"]), 60)
    # What is about to expire is renewed by whichever process looks next: here one that has just started.
    await conn.execute(f"update \"{schema}\".groups set expires_at = clock_timestamp() + interval '20 seconds'")
    os.kill(told(running, "ready")[-1]["pid"], signal.SIGKILL)
    await eventually(lambda: _lives_for(conn, schema, EXPIRES_AFTER - 30), 60)
    running.process.terminate()
    assert running.wait() == 0, running.stderr
    assert await conn.fetchval(f'select count(*) from "{schema}".groups') == 0


async def _is(held: Held, wanted: dict[str, int]) -> bool:
    """Two claims or renewals at the same moment have one more session of a worker's dispatch pool opened."""
    return _matches(await held.look(), wanted)


def _matches(now: Counter[str], wanted: dict[str, int]) -> bool:
    more = now["dispatch"] - wanted["dispatch"]
    return 0 <= more <= 2 and +now == +Counter({**wanted, "dispatch": now["dispatch"]})


async def _lives_for(conn: asyncpg.Connection, schema: str, seconds: float) -> bool:
    left = f'select extract(epoch from expires_at - clock_timestamp())::float8 from "{schema}".groups'
    return bool(await conn.fetchval(left) > seconds)


async def _declared(conn: asyncpg.Connection, schema: str, wanted: int) -> bool:
    return bool(await conn.fetchval(f'select connections = $1 from "{schema}".groups', wanted))


def check(held: Held, budget: dict[str, Any], *, more: int, each_more: int) -> None:
    """The printed maximum holds, for the group and for each role; ``each_more`` processes' worth are added.

    One more of each role: the server may still list sessions that were closed a moment ago.
    """
    assert held.together <= budget["required"] + more <= budget["peak"], held.most
    for name, most in PER_ROLE.items():
        assert held.most[name] <= (2 + each_more + 1) * most, held.most
    assert held.most["scheduler"] <= 2 * budget["scheduler"], held.most
    assert set(held.most) <= {*PER_ROLE, "maintain", "scheduler", "preflight"}


async def test_a_group_without_a_scheduler_holds_what_its_budget_says(
    start: Callable[..., Command],
    short_dir: Path,
    secret: Path,
    env: dict[str, str],
    schema: str,
    looker: asyncpg.Connection,
) -> None:
    (short_dir / "group_actors.py").write_text(ACTORS)
    file = FILE.format(path=secret) + "sweep_interval = 0.5\n[scheduler]\nenabled = false\n"
    (short_dir / "group.toml").write_text(file)
    budget = json.loads(await taskqd(short_dir, env, "budget", "group.toml", "--json"))
    assert (budget["required"], budget["scheduler"], budget["leader"], budget["leader_idle"]) == (35, 0, 2, 2)
    held = Held(looker, f"taskqd/{schema}/group/")
    async with held.watched():
        running = start("run", "group.toml", env=env)
        # One worker stands in, and it alone.
        await eventually(lambda: held.most["maintain"], 60)
        await eventually(lambda: _matches(held.now, {**IDLE, "scheduler": 0, "maintain": 2}), 60)
        assert sum(IDLE.values()) == budget["idle"]
        # A new credential reaches its connections too.
        put(secret, "postgres")
        await eventually(lambda: any("maintenance" in line["resources"] for line in reloads(running)), 60)
        # It is replaced: another one stands in.
        await taskqd(short_dir, env, "restart", "io", "--socket", "run/group.sock")
        await eventually(lambda: _matches(held.now, {**IDLE, "scheduler": 0, "maintain": 2}), 60)
    check(held, {**budget, "scheduler": 0}, more=budget["rotation"] + budget["surge"], each_more=2)
    assert held.most["maintain"] <= 2 + 2 + 2 + 1
    running.process.terminate()
    assert running.wait() == 0, running.stderr


def reloads(command: Command) -> list[dict[str, Any]]:
    return [line for line in told(command, "credentials-reloaded") if "resources" in line]
