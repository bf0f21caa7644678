"""The right command on the wrong database: who is turned away, and by whom; drills with clones and backups."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from taskqd import TargetMismatchError, TaskQ
from taskqd.domain.exit_codes import ExitCode
from taskqd.storage.migrate import migrate_up
from taskqd.storage.target import Identity, attest, bind, read_identity, rotate
from tests.apps.basic import Work, succeed
from tests.postgres import Server
from tests.support import Command, child_environment

Start = Callable[..., Command]
SCHEMA = "taskq"


@dataclass
class Meant:
    """What a process was configured for."""

    environment: str | None = None
    installation_id: uuid.UUID | None = None


class Databases:
    """Databases of one test on the session's server, dropped after it."""

    def __init__(self, server: Server, admin: asyncpg.Connection) -> None:
        self.server = server
        self._admin = admin
        self._names: list[str] = []

    async def create(self, template: str = "template1") -> str:
        """Create a database, as a copy of another one where that is named."""
        name = f"d_{uuid.uuid4().hex[:12]}"
        await self._admin.execute(f"create database {name} template {template}")
        self._names.append(name)
        return name

    async def open(self, name: str) -> asyncpg.Connection:
        """Connect to one."""
        return await asyncpg.connect(self.server.dsn(database=name), timeout=30)

    async def drop(self) -> None:
        """Drop them all."""
        for name in self._names:
            await self._admin.execute(f"drop database {name} with (force)")


@pytest.fixture
async def databases(server: Server, conn: asyncpg.Connection) -> AsyncIterator[Databases]:
    made = Databases(server, conn)
    yield made
    await made.drop()


@pytest.fixture
async def production(databases: Databases) -> str:
    """A database that is bound to production."""
    name = await databases.create()
    conn = await databases.open(name)
    await migrate_up(conn, SCHEMA)
    await bind(conn, SCHEMA, "production", "the first one")
    await conn.close(timeout=10)
    return name


async def test_an_unbound_schema_admits_everybody_but_who_expects_another(
    conn: asyncpg.Connection, schema: str
) -> None:
    identity = await read_identity(conn, schema)
    assert (identity.environment, identity.version) == (None, 0)
    for meant in (Meant(), Meant("staging"), Meant("staging", identity.installation_id)):
        assert await attest(conn, schema, meant) == identity.installation_id
    with pytest.raises(TargetMismatchError, match=r"it is installation …[0-9a-f]{8}, the one expected is …"):
        await attest(conn, schema, Meant(installation_id=uuid.uuid4()))


async def test_a_bound_schema_admits_its_environment_alone(conn: asyncpg.Connection, schema: str) -> None:
    installation = (await read_identity(conn, schema)).installation_id
    assert await bind(conn, schema, "production", None)
    assert not await bind(conn, schema, "production", None)  # nothing new
    with pytest.raises(TargetMismatchError, match="is bound to environment 'production': `taskqd target rotate`"):
        await bind(conn, schema, "staging", None)
    bound = await read_identity(conn, schema)
    assert (bound.installation_id, bound.environment, bound.version) == (installation, "production", 1)
    for meant in (Meant("production"), Meant("production", installation)):
        assert await attest(conn, schema, meant) == installation
    for meant in (Meant(), Meant("staging"), Meant("Production"), Meant("production", uuid.uuid4())):
        with pytest.raises(TargetMismatchError):
            await attest(conn, schema, meant)


async def test_two_that_bind_at_once_agree(server: Server, conn: asyncpg.Connection, schema: str) -> None:
    other = await asyncpg.connect(server.dsn(), timeout=30)
    try:
        transaction = conn.transaction()
        await transaction.start()
        assert await bind(conn, schema, "production", None)
        await other.execute("set lock_timeout = '60s'")
        second = asyncio.create_task(bind(other, schema, "staging", None))
        await asyncio.sleep(0)
        await transaction.commit()
        with pytest.raises(TargetMismatchError, match="is bound to environment 'production'"):
            await second
    finally:
        await other.close(timeout=10)


async def test_a_rotation_makes_another_installation_of_it(conn: asyncpg.Connection, schema: str) -> None:
    was = (await read_identity(conn, schema)).installation_id
    with pytest.raises(TargetMismatchError, match="is not bound yet: `taskqd target bind staging` is enough"):
        await rotate(conn, schema, "staging", was, "a clone")
    await bind(conn, schema, "production", None)
    with pytest.raises(TargetMismatchError, match="is not installation"):
        await rotate(conn, schema, "staging", uuid.uuid4(), "a clone")
    new = await rotate(conn, schema, "staging", was, "a clone")
    identity: Identity = await read_identity(conn, schema)
    assert (identity.installation_id, identity.environment, identity.version) == (new, "staging", 2)
    assert new != was
    audit = await conn.fetch(f'select action, reason, target_id, detail from "{schema}".admin_audit order by id')
    assert [(row["action"], row["reason"], row["target_id"]) for row in audit] == [
        ("bind", None, str(was)),
        ("rotate", "a clone", str(new)),
    ]
    assert json.loads(audit[1]["detail"]) == {"environment": "staging", "was": "production", "was_id": str(was)}


async def test_an_identity_that_is_lost_admits_nobody(conn: asyncpg.Connection, schema: str) -> None:
    await conn.execute(f'delete from "{schema}".target_identity')
    with pytest.raises(TargetMismatchError, match="it has lost its identity"):
        await attest(conn, schema, Meant())


async def test_a_role_that_may_not_read_the_identity_may_ask(
    server: Server, conn: asyncpg.Connection, schema: str
) -> None:
    role = f"r_{uuid.uuid4().hex[:12]}"
    await conn.execute(f'create role {role} login; grant usage on schema "{schema}" to {role}')
    theirs = await asyncpg.connect(server.dsn(user=role), timeout=30)
    try:
        assert await attest(theirs, schema, Meant()) == (await read_identity(conn, schema)).installation_id
    finally:
        await theirs.close(timeout=10)
        await conn.execute(f"drop owned by {role}; drop role {role}")


@pytest.mark.parametrize("pooled", [False, True])
async def test_a_client_is_turned_away_at_its_opening(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch, pooled: bool
) -> None:
    await bind(conn, schema, "production", None)
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=2)
    how = {"pool": pool} if pooled else {"dsn": dsn}
    try:
        for environment in (None, "staging"):
            if environment:
                monkeypatch.setenv("TASKQ_ENVIRONMENT", environment)
            with pytest.raises(TargetMismatchError, match="is bound to environment 'production'"):
                async with TaskQ(schema=schema, **how):
                    pass
        monkeypatch.setenv("TASKQ_ENVIRONMENT", "production")
        async with TaskQ(schema=schema, **how) as tq:
            await tq.enqueue(succeed, Work(key="x"))
    finally:
        await pool.close()
    assert await conn.fetchval(f'select count(*) from "{schema}".jobs') == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker", "--actors", "tests.apps.basic:actors"],
        ["scheduler", "run"],
        ["scheduler", "run", "--once"],
        ["queue", "pause", "default"],
        ["schedule", "list"],
        ["migrate", "up"],
        ["target", "attest"],
    ],
    ids=" ".join,
)
async def test_a_process_meant_for_another_environment_ends_with_78_and_writes_nothing(
    start: Start, child_env: dict[str, str], conn: asyncpg.Connection, schema: str, arguments: list[str]
) -> None:
    await bind(conn, schema, "production", None)
    command = start(*arguments, env=child_env | {"TASKQ_ENVIRONMENT": "staging"})
    assert command.wait(60) == ExitCode.REFUSED
    assert "is bound to environment 'production', the one expected is 'staging'" in command.stderr
    for table in ("workers", "maintenance_hosts", "queues", "actor_config", "maintenance"):
        assert await conn.fetchval(f'select count(*) from "{schema}".{table}') == 0


async def test_a_group_meant_for_another_environment_starts_nothing(
    start: Start, child_env: dict[str, str], conn: asyncpg.Connection, schema: str, short_dir: Path
) -> None:
    await bind(conn, schema, "production", None)
    (short_dir / "w.toml").write_text('actors = "tests.apps.basic:actors"\n\n[[workers]]\nname = "main"\n')
    env = child_env | {"TASKQ_ENVIRONMENT": "staging", "XDG_RUNTIME_DIR": str(short_dir)}
    command = start("run", "w.toml", env=env)
    assert command.wait(60) == ExitCode.REFUSED
    assert "is bound to environment 'production'" in command.stderr
    assert await conn.fetchval(f'select count(*) from "{schema}".groups') == 0


async def test_the_command_shows_binds_and_rotates(start: Start, child_env: dict[str, str], schema: str) -> None:
    def target(*arguments: str) -> tuple[int, str, str]:
        command = start("target", *arguments, env=child_env)
        return command.wait(60), command.stdout, command.stderr

    code, out, _ = target("show")
    assert code == 0
    assert "bound to no environment: it admits everybody" in out
    assert target("bind", "../etc")[0] == ExitCode.USAGE
    assert target("bind", "production")[1] == f"schema {schema} is now bound to environment production\n"
    assert target("bind", "production")[1] == f"schema {schema} was already bound to environment production\n"
    shown = json.loads(target("show", "--json")[1])
    assert (shown["environment"], shown["version"], shown["bound_by"]) == ("production", 1, "postgres")
    code, _, err = target("rotate", "staging", "--from", str(uuid.uuid4()), "--reason", "a clone")
    assert (code, "is not installation" in err) == (ExitCode.REFUSED, True)
    code, out, _ = target("rotate", "staging", "--from", shown["installation_id"], "--reason", "a clone")
    assert code == 0
    assert shown["installation_id"] not in out
    assert target("attest")[0] == ExitCode.REFUSED
    child_env["TASKQ_ENVIRONMENT"] = "staging"
    code, out, _ = target("attest")
    assert (code, "admits these settings" in out) == (0, True)
    child_env["TASKQ_INSTALLATION_ID"] = shown["installation_id"]
    assert target("attest")[0] == ExitCode.REFUSED


async def test_a_clone_admits_nobody_but_production_until_it_is_rotated(databases: Databases, production: str) -> None:
    clone = await databases.open(await databases.create(template=production))
    try:
        was = (await read_identity(clone, SCHEMA)).installation_id
        with pytest.raises(TargetMismatchError):
            await attest(clone, SCHEMA, Meant("staging"))
        new = await rotate(clone, SCHEMA, "staging", was, "refreshed from production")
        assert await attest(clone, SCHEMA, Meant("staging", new)) == new
        # What is configured for production and led here by a wrong DSN finds a door that is shut, by either name.
        for meant in (Meant("production"), Meant("staging", was)):
            with pytest.raises(TargetMismatchError):
                await attest(clone, SCHEMA, meant)
    finally:
        await clone.close(timeout=10)
    conn = await databases.open(production)
    try:
        assert await attest(conn, SCHEMA, Meant("production", was)) == was  # the original is as it was
    finally:
        await conn.close(timeout=10)


async def test_a_backup_that_is_restored_is_the_same_installation(
    databases: Databases, production: str, server: Server, start: Start
) -> None:
    conn = await databases.open(production)
    was = (await read_identity(conn, SCHEMA)).installation_id
    await conn.close(timeout=10)
    restored = await databases.create()
    file = str(server.root / f"{restored}.dump")
    server.run("pg_dump", "-Fc", "-f", file, server.dsn(database=production))
    server.run("pg_restore", "-d", server.dsn(database=restored), file)
    env = child_environment(TASKQ_PG_DSN=server.dsn(database=restored), TASKQ_INSTALLATION_ID=str(was))
    once = start("scheduler", "run", "--once", env=env | {"TASKQ_ENVIRONMENT": "production"})
    assert once.wait(60) == ExitCode.DONE
    once = start("scheduler", "run", "--once", env=env | {"TASKQ_ENVIRONMENT": "staging"})
    assert once.wait(60) == ExitCode.REFUSED
