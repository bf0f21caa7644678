"""A role whose password changes, a server that asks for it, and a group's own actors that note what they ran."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from pydantic import BaseModel

from taskqd import actor
from taskqd.storage.migrate import migrate_up
from tests.postgres import PASSWORD_ROLE, Server, embedded

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
