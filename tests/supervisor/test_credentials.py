"""A new password for a running group: taken in place, with nothing restarted and nothing lost."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import stat
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

from taskqd import EnqueueItem, TaskQ, actor
from taskqd.storage.migrate import migrate_up
from tests.postgres import PASSWORD_ROLE, Server, embedded
from tests.support import Command, child_environment, eventually, wait_until

ACTORS = """\
import asyncio, os
from pydantic import BaseModel
from taskqd import JobContext, actor

class Work(BaseModel):
    number: int = 0

@actor
async def work(payload: Work, ctx: JobContext[Work]) -> None:
    file = os.open("executions", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{payload.number}\\n".encode())
    os.close(file)
    await asyncio.sleep(0.02)

registry = [work]
"""
ROTATION_WITHIN = 20.0
"""Ten times the target of two seconds."""


class Work(BaseModel):
    number: int = 0


@actor
async def work(payload: Work) -> None:
    """Stands for the actor of that name in the group's own module."""


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    """A server of this module's own, as its role's password changes."""
    server = embedded(18)
    try:
        yield server
    finally:
        server.remove()


class Secret:
    """A password of the role, mounted as Kubernetes does: the file is a link into ``..data``, itself a link."""

    def __init__(self, directory: Path, admin: asyncpg.Connection) -> None:
        self.directory = directory
        self.admin = admin
        self.path = directory / "password"
        self.values: list[str] = []
        directory.mkdir()
        self.path.symlink_to("..data/password")

    async def rotate(self, *, mount: bool = True) -> str:
        """Give the role a new password, and swap the mounted directory."""
        value = secrets.token_urlsafe(16) + "'\"%/ {"
        literal = value.replace("'", "''")
        await self.admin.execute(f"alter role {PASSWORD_ROLE} password '{literal}'")
        self.values.append(value)
        if mount:
            self.mount(value)
        return value

    def mount(self, value: str) -> None:
        new = self.directory / f"..{uuid.uuid4().hex}"
        new.mkdir()
        (new / "password").write_text(value + "\n")
        link = self.directory / "..new"
        link.symlink_to(new.name)
        link.rename(self.directory / "..data")


@pytest.fixture
async def admin(locked: Server) -> AsyncIterator[asyncpg.Connection]:
    conn = await asyncpg.connect(locked.dsn())
    try:
        yield conn
    finally:
        await conn.close()


@pytest.fixture
async def schema(admin: asyncpg.Connection) -> str:
    """A migrated schema whose role must give a password."""
    name = f"t_{uuid.uuid4().hex[:12]}"
    await migrate_up(admin, name)
    if not await admin.fetchval("select exists (select from pg_roles where rolname = $1)", PASSWORD_ROLE):
        await admin.execute(f"create role {PASSWORD_ROLE} login superuser password 'x'")
    return name


@pytest.fixture
async def secret(admin: asyncpg.Connection, short_dir: Path) -> Secret:
    made = Secret(short_dir / "mount", admin)
    await made.rotate()
    return made


class Group:
    """A running group whose sessions log in with the mounted password."""

    def __init__(self, command: Command, directory: Path, admin: asyncpg.Connection, schema: str) -> None:
        self.command = command
        self.directory = directory
        self.admin = admin
        self.schema = schema

    def events(self, name: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.command.stderr.splitlines() if line.startswith("{")]
        return [event for event in found if event.get("event") == name]

    def reloads(self) -> list[dict[str, Any]]:
        """What the supervisor told of rotations; its children's own lines name resources instead."""
        return [event for event in self.events("credentials-reloaded") if "children" in event]

    def metrics(self) -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(self.directory / "run" / "group.sock"))
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = b""
            while part := sock.recv(65536):
                answer += part
        return answer.decode()

    def pids(self) -> set[int]:
        return {child.pid for child in self.command.children()}

    def executions(self) -> list[int]:
        path = self.directory / "executions"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    async def sessions(self) -> dict[int, str]:
        """The group's sessions: pid of the backend and what it is for."""
        rows = await self.admin.fetch(
            "select pid, application_name from pg_stat_activity where starts_with(application_name, $1)",
            f"taskqd/{self.schema}/group/",
        )
        return {row["pid"]: row["application_name"].rpartition("/")[2] for row in rows}

    async def terminate(self, sessions: list[int]) -> None:
        await self.admin.execute("select pg_terminate_backend(pid) from unnest($1::int[]) pid", sessions)


StartGroup = Callable[..., Group]


@pytest.fixture
def group(
    start: Callable[..., Command], short_dir: Path, locked: Server, schema: str, admin: asyncpg.Connection
) -> StartGroup:
    def run(credentials: str, *, workers: int = 2, own: str = "", env: dict[str, str] | None = None) -> Group:
        (short_dir / "group.toml").write_text(
            f'actors = "group_actors:registry"\n[supervisor]\nruntime_dir = "run"\n[credentials]\n{credentials}\n'
            f'[[workers]]\nname = "io"\nreplicas = {workers}\nmax_concurrency = 4\nnotify_poll_interval = 1\n{own}\n'
        )
        (short_dir / "group_actors.py").write_text(ACTORS)
        environ = child_environment(TASKQ_PG_DSN=locked.dsn(PASSWORD_ROLE), TASKQ_SCHEMA_NAME=schema, **(env or {}))
        made = Group(start("run", "group.toml", env=environ), short_dir, admin, schema)
        wait_until(lambda: len(made.events("ready")) >= workers + 1, 60, made.command.stderr)
        return made

    return run


async def test_a_rotation_under_load_restarts_nothing_and_loses_nothing(
    group: StartGroup, secret: Secret, locked: Server, schema: str, short_dir: Path
) -> None:
    running = group(f'provider = "file"\npath = "{secret.path}"\nrefresh_interval = 0')
    pids = running.pids()
    before = await running.sessions()
    total = 0

    async def enqueue(count: int) -> None:
        nonlocal total
        async with TaskQ(dsn=locked.dsn(), schema=schema) as queue:
            items = [EnqueueItem(actor_ref=work, payload=Work(number=total + n)) for n in range(count)]
            await queue.enqueue_batch(items)
        total += count

    await enqueue(300)
    await eventually(running.executions, 30)
    await secret.rotate()
    running.command.signal(signal.SIGHUP)
    (told,) = await eventually(running.reloads, ROTATION_WITHIN, running.command.stderr)
    assert (told["children"], told.get("failed")) == (3, None)
    await enqueue(300)
    after = await running.sessions()
    old = sorted(set(before) & set(after))
    assert old == [], f"sessions from before the rotation: {[before[pid] for pid in old]}"
    assert set(before.values()) <= set(after.values()) | {"boot", "preflight"}
    # The new password holds: whatever is ended comes back with it.
    await running.terminate(list(after))
    await enqueue(200)
    count = f"select count(*) from \"{schema}\".jobs where status = 'succeeded'"
    await eventually(lambda: _reached(running.admin, count, total), 60, running.command.stderr)
    assert sorted(set(running.executions())) == list(range(total))
    attempts = await running.admin.fetchval(f'select sum(attempt) from "{schema}".jobs')
    assert attempts == len(running.executions())
    assert running.pids() == pids
    assert running.events("child-exit") == []
    running.command.process.terminate()
    assert running.command.wait() == 0, running.command.stderr
    for value in secret.values:
        assert value not in running.command.stderr + running.command.stdout
        assert json.dumps(value)[1:-1] not in running.command.stderr


async def _reached(conn: asyncpg.Connection, query: str, wanted: int) -> bool:
    return bool(await conn.fetchval(query) == wanted)


async def test_a_credential_that_does_not_work_leaves_the_old_sessions_in_use(
    group: StartGroup, secret: Secret, locked: Server, schema: str
) -> None:
    running = group(
        f'provider = "file"\npath = "{secret.path}"\nrefresh_interval = 0', env={"TASKQ_DATABASE_BOOT_TIMEOUT": "1"}
    )
    before = await running.sessions()
    secret.mount("wrong")
    running.command.signal(signal.SIGHUP)
    await eventually(lambda: running.reloads() or running.events("reload-failed"), ROTATION_WITHIN)
    assert "wrong" not in json.dumps(running.reloads())
    assert set(before) <= set(await running.sessions()) | {
        pid for pid, role in before.items() if role in ("boot", "preflight")
    }
    async with TaskQ(dsn=locked.dsn(), schema=schema) as queue:
        handle = await queue.enqueue(work, Work())
        await handle.wait(timeout=20)
    assert running.events("child-exit") == []
    secret.mount(secret.values[-1])
    running.command.signal(signal.SIGHUP)
    await eventually(lambda: any("failed" not in event for event in running.reloads()), ROTATION_WITHIN)


async def test_a_worker_whose_own_credential_is_broken_is_named_and_goes_on(
    group: StartGroup, secret: Secret, short_dir: Path
) -> None:
    own = short_dir / "own"
    own.write_text(secret.values[-1])
    running = group(
        f'provider = "file"\npath = "{secret.path}"\nrefresh_interval = 0',
        own=f'pg_credential_path = "{own}"',
        workers=1,
    )
    before = await running.sessions()
    own.write_text("")
    running.command.signal(signal.SIGHUP)
    (told,) = await eventually(running.reloads, ROTATION_WITHIN, running.command.stderr)
    assert list(told["failed"]) == ["io.0"]
    assert "the password must be one line of text" in told["failed"]["io.0"]
    kept = await running.sessions()
    roles = {role for pid, role in kept.items() if pid in before}
    assert {"dispatch", "worker", "heartbeat", "notify"} <= roles
    assert "scheduler" not in roles
    await eventually(lambda: 'taskqd_child_credentials_stale{name="io",index="0"} 1' in running.metrics())
    own.write_text(secret.values[-1])
    running.command.signal(signal.SIGHUP)
    await eventually(lambda: len(running.reloads()) == 2 and "failed" not in running.reloads()[-1], ROTATION_WITHIN)
    await eventually(lambda: 'taskqd_child_credentials_stale{name="io",index="0"} 0' in running.metrics())
    assert running.events("child-exit") == []


async def test_another_source_is_taken_in_place_and_one_that_has_nothing_leaves_the_old_one(
    group: StartGroup, secret: Secret, short_dir: Path
) -> None:
    first, second, group_second = short_dir / "first", short_dir / "second", short_dir / "group"
    first.write_text(secret.values[-1])
    running = group(
        f'provider = "file"\npath = "{secret.path}"\nrefresh_interval = 0',
        own=f'[workers.credentials]\npath = "{first}"',
        workers=1,
    )
    pids, before = running.pids(), await running.sessions()
    file = short_dir / "group.toml"
    file.write_text(file.read_text().replace(str(first), str(second)))
    running.command.signal(signal.SIGHUP)
    (told,) = await eventually(running.reloads, ROTATION_WITHIN, running.command.stderr)
    assert list(told["failed"]) == ["io.0"]
    assert f"the credential file '{second}': No such file" in told["failed"]["io.0"]
    await eventually(lambda: running.events("reload-failed"), ROTATION_WITHIN)
    assert {"dispatch", "worker"} <= {role for pid, role in (await running.sessions()).items() if pid in before}

    second.write_text(secret.values[-1])
    group_second.write_text(json.dumps({"username": PASSWORD_ROLE, "password": secret.values[-1]}))
    file.write_text(file.read_text().replace(str(secret.path), str(group_second)))
    running.command.signal(signal.SIGHUP)
    await eventually(lambda: running.events("reload-done"), ROTATION_WITHIN, running.command.stderr)
    assert "failed" not in running.reloads()[-1]

    async def all_new() -> bool:
        return not set(before) & set(await running.sessions())

    await eventually(all_new, ROTATION_WITHIN)
    assert pids <= running.pids()
    assert running.events("child-exit") == []
    first.unlink()
    secret.path.unlink()
    await running.terminate(list(await running.sessions()))  # what comes back asks the new sources
    await eventually(lambda: _roles(running, {"dispatch", "worker", "heartbeat", "scheduler"}), 60)
    assert pids <= running.pids()


async def _roles(running: Group, wanted: set[str]) -> bool:
    return wanted <= set((await running.sessions()).values())


async def test_a_start_logs_in_as_each_worker_will_and_minds_the_limit_of_its_role(
    start: Callable[..., Command],
    secret: Secret,
    admin: asyncpg.Connection,
    locked: Server,
    schema: str,
    short_dir: Path,
) -> None:
    own = short_dir / "own"
    (short_dir / "group_actors.py").write_text(ACTORS)
    (short_dir / "group.toml").write_text(
        f'actors = "group_actors:registry"\n[supervisor]\nruntime_dir = "run"\n[credentials]\nprovider = "file"\n'
        f'path = "{secret.path}"\n[[workers]]\nname = "plain"\n[[workers]]\nname = "io"\nreplicas = 2\n'
        f'[workers.credentials]\npath = "{own}"\n'
    )
    env = child_environment(
        TASKQ_PG_DSN=locked.dsn(PASSWORD_ROLE), TASKQ_SCHEMA_NAME=schema, TASKQ_DATABASE_BOOT_TIMEOUT="0.5"
    )
    own.write_text("wrong")
    refused = start("run", "group.toml", env=env)
    assert refused.wait() == 69
    assert "error: as io would: database " in refused.stderr
    assert "password authentication failed" in refused.stderr
    assert '"spawn"' not in refused.stderr

    role = f"limited_{schema}"
    await admin.execute(f"create role {role} login password 'pw' connection limit 30")
    await admin.execute(f'grant usage on schema "{schema}" to {role}')
    await admin.execute(f'grant select on all tables in schema "{schema}" to {role}')
    own.write_text(json.dumps({"username": role, "password": "pw"}))
    refused = start("run", "group.toml", env=env)
    assert refused.wait() == 78, refused.stderr
    assert f"io: up to 47 connections as role {role}, which may have 30" in refused.stderr
    looked = start("budget", "group.toml", env=env)
    assert looked.wait() == 0, looked.stderr
    assert f"warning: io: up to 47 connections as role {role}, which may have 30" in looked.stderr
    secret.path.unlink()
    released = start("budget", "group.toml", env=env)
    assert released.wait() == 0
    assert "warning: not compared with the server: " in released.stderr


async def test_every_process_notices_a_swapped_secret_by_itself(group: StartGroup, secret: Secret) -> None:
    running = group(f'provider = "file"\npath = "{secret.path}"\nrefresh_interval = "500ms"')
    before = await running.sessions()
    await secret.rotate()

    async def all_new() -> bool:
        return not set(before) & set(await running.sessions())

    await eventually(all_new, 30, running.command.stderr)
    assert running.events("child-exit") == []
    assert running.reloads() == []


async def test_a_command_hands_out_user_and_password_and_its_end_is_minded(
    group: StartGroup, secret: Secret, short_dir: Path
) -> None:
    program = short_dir / "credential"
    runs = short_dir / "runs"
    program.write_text(
        f"#!{sys.executable}\nimport json, time\nopen({str(runs)!r}, 'a').write('x')\n"
        f"print(json.dumps({{'username': {PASSWORD_ROLE!r}, 'password': open({str(secret.path)!r}).read().strip(),"
        " 'expires_at': time.time() + 34}))\n"
    )
    program.chmod(stat.S_IRWXU)
    running = group(f'provider = "exec"\ncommand = ["{program}"]\nrefresh_interval = "1h"', workers=1)
    # One run for each process at its start, however many sessions it opens: preflight, worker, scheduler.
    booted = len(runs.read_text())
    assert booted <= 4
    before = await running.sessions()
    await secret.rotate()
    await eventually(lambda: len(runs.read_text()) > booted, 30)

    async def all_new() -> bool:
        return not set(before) & set(await running.sessions())

    await eventually(all_new, 60, running.command.stderr)


async def test_migrate_and_budget_use_the_same_provider(
    start: Callable[..., Command], secret: Secret, locked: Server, schema: str, short_dir: Path
) -> None:
    env = child_environment(
        TASKQ_PG_DSN=locked.dsn(PASSWORD_ROLE),
        TASKQ_SCHEMA_NAME=schema,
        TASKQ_PG_CREDENTIAL_PROVIDER="file",
        TASKQ_PG_CREDENTIAL_PATH=str(secret.path),
    )
    status = start("migrate", "status", env=env)
    assert status.wait() == 0, status.stderr
    (short_dir / "group.toml").write_text('actors = "a:b"\n[[workers]]\nname = "io"\n')
    budget = start("budget", "group.toml", "--json", env=env)
    assert budget.wait() == 0, budget.stderr
    assert json.loads(budget.stdout)["limits"]["max_connections"] == 300
    refused = start(
        "migrate", "status", env=env | {"TASKQ_PG_CREDENTIAL_PATH": "/nowhere", "TASKQ_DATABASE_BOOT_TIMEOUT": "0"}
    )
    assert refused.wait() == 69
    assert "the credential file '/nowhere': No such file or directory" in refused.stderr


async def test_what_boots_while_a_rotation_is_half_done_waits_for_the_rest(
    start: Callable[..., Command], secret: Secret, locked: Server, schema: str
) -> None:
    value = await secret.rotate(mount=False)
    env = child_environment(
        TASKQ_PG_DSN=locked.dsn(PASSWORD_ROLE),
        TASKQ_SCHEMA_NAME=schema,
        TASKQ_PG_CREDENTIAL_PROVIDER="file",
        TASKQ_PG_CREDENTIAL_PATH=str(secret.path),
    )
    command = start("migrate", "status", env=env)
    await eventually(lambda: "refused the connection" in command.stderr, 30)
    await asyncio.sleep(0)
    secret.mount(value)
    assert command.wait() == 0, command.stderr


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('provider = "file"', "group.toml:5:credentials.provider = 'file': must be accompanied by pg_credential_path"),
        ('provider = "exec"', "credentials.provider = 'exec': must be accompanied by pg_credential_command"),
        ('provider = "vault"', "must be one of env, file, exec"),
        ('path = "/x"', "must be empty unless the provider is 'file'"),
        ('provider = "file"\npath = "x"', "must be an absolute path"),
        (
            'provider = "file"\npath = "/x"\nrefresh = 5',
            "credentials.refresh: unknown key (did you mean 'refresh_interval'?)",
        ),
        ('provider = "exec"\ncommand = "a \'b"', "must be a command whose quotes are closed"),
    ],
)
def test_a_wrong_table_is_refused_in_one_message(
    start: Callable[..., Command], short_dir: Path, table: str, problem: str
) -> None:
    (short_dir / "group.toml").write_text(f'actors = "a:b"\n[[workers]]\nname = "io"\n[credentials]\n{table}\n')
    command = start("check", "group.toml")
    assert command.wait() == 78
    assert problem in command.stderr
