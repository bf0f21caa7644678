"""A new password for a running group: taken in place, with nothing restarted and nothing lost."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd.domain.errors import DatabaseAuthError
from tests.postgres import PASSWORD_ROLE, Server
from tests.rotating import ACTORS, ROTATION_WITHIN, Secret, admin, locked, schema, secret
from tests.support import Command, child_environment, eventually, wait_until

__all__ = ["admin", "locked", "schema", "secret"]


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

    def pids(self) -> set[int]:
        return {child.pid for child in self.command.children()}

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
    locked: Server,
    admin: asyncpg.Connection,
    schema: str,
    secret: Secret,
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
    own.write_text(json.dumps({"username": role, "password": "pw"}))
    refused = start("run", "group.toml", env=env)
    assert refused.wait() == DatabaseAuthError.exit_code
    assert re.search(r"^error: as io would: .*permission denied for schema", refused.stderr, re.MULTILINE)
    await admin.execute(f'grant usage on schema "{schema}" to {role}')
    await admin.execute(f'grant select on all tables in schema "{schema}" to {role}')
    refused = start("run", "group.toml", env=env)
    assert refused.wait() == 78, refused.stderr
    assert f"io: up to 47 connections as role {role}, which may have 30" in refused.stderr
    looked = start("budget", "group.toml", env=env)
    assert looked.wait() == 0, looked.stderr
    assert f"warning: io: up to 47 connections as role {role}, which may have 30" in looked.stderr

    # The limit of the group's own role counts what logs in as that role: its scheduler and its other worker.
    await admin.execute(f"alter role {role} connection limit 60")
    await admin.execute(f"alter role {PASSWORD_ROLE} nosuperuser connection limit 40")
    try:
        await admin.execute(f'grant usage on schema "{schema}" to {PASSWORD_ROLE}')
        await admin.execute(f'grant select on all tables in schema "{schema}" to {PASSWORD_ROLE}')
        fits = start("budget", "group.toml", "--json", env=env)
        assert fits.wait() == 0, fits.stderr
        budget = json.loads(fits.stdout)
        assert (budget["verdict"], budget["required"], budget["elsewhere"]) == ("fits", 72, 44)
        assert (budget["limits"]["limited_by"], budget["available"]) == (f"role {PASSWORD_ROLE}", 40)
        await admin.execute(f"alter role {PASSWORD_ROLE} connection limit 27")
        refused = start("run", "group.toml", env=env)
        assert refused.wait() == 78, refused.stderr
        assert f"needs 28 connections and can have 27, the connection limit of role {PASSWORD_ROLE}" in refused.stderr
        assert "io." not in refused.stderr.partition("what would fit")[2]
    finally:
        await admin.execute(f"alter role {PASSWORD_ROLE} superuser connection limit -1")


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
