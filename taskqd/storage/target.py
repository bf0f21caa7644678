"""Which installation a schema is, and whether this process was meant for it.

A schema has an id from its first migration. Once an operator has bound an environment to it, the database itself turns
away whoever was configured for another one: a clone that still is "production" admits no process of staging, and a
wrong DSN is an error before anything is written.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

import asyncpg

from taskqd.domain.errors import TargetMismatchError
from taskqd.storage.statements import load

REFUSED = "TQ422"
"""The SQLSTATE of a refusal."""
_TIMEOUT = 30.0
_NOT_THERE = (asyncpg.InvalidSchemaNameError, asyncpg.UndefinedFunctionError, asyncpg.UndefinedTableError)


class Expected(Protocol):
    """What a process was configured for."""

    @property
    def environment(self) -> str | None:
        """The environment, None where none is named."""

    @property
    def installation_id(self) -> UUID | None:
        """The installation, None for any."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a schema says that it is."""

    installation_id: UUID
    environment: str | None
    """None until it is bound."""
    version: int
    """How often it was bound or rotated."""
    bound_at: datetime | None
    bound_by: str | None


async def attest(database: Any, schema: str, expected: Expected) -> UUID | None:
    """Return the id of the installation, None for a schema without one, that is not migrated.

    ``database`` is a connection or a pool. Raises ``TargetMismatchError`` when it is not the one that was ``expected``.
    """
    try:
        async with asyncio.timeout(_TIMEOUT):
            found: UUID = await database.fetchval(
                load("target", schema).attest, expected.environment, expected.installation_id
            )
    except _NOT_THERE:
        return None
    except asyncpg.PostgresError as error:
        if error.sqlstate != REFUSED:
            raise
        raise TargetMismatchError(
            f"schema {schema!r} is not the one that this was configured for: {error.args[0]}"
        ) from None
    return found


async def read_identity(conn: asyncpg.Connection, schema: str) -> Identity:
    """Return what the schema says that it is. Raises ``TargetMismatchError`` when it says nothing."""
    row = await conn.fetchrow(load("target", schema).identity, timeout=_TIMEOUT)
    if row is None:
        raise TargetMismatchError(f"schema {schema!r} has lost its identity: target_identity is empty")
    return Identity(**dict(row))


async def bind(conn: asyncpg.Connection, schema: str, environment: str, reason: str | None) -> bool:
    """Bind the schema to ``environment``; return whether that is new.

    Raises ``TargetMismatchError`` when it is bound to another one: that takes :func:`rotate`.
    """
    rows = await conn.fetch(load("target", schema).bind, environment, reason, timeout=_TIMEOUT)
    if not rows or rows[0]["environment"] != environment:
        bound = rows[0]["environment"] if rows else None
        raise TargetMismatchError(
            f"schema {schema!r} is bound to environment {bound!r}: `taskqd target rotate` makes another of it"
        )
    return bool(rows[0]["changed"])


async def rotate(conn: asyncpg.Connection, schema: str, environment: str, was: UUID, reason: str) -> UUID:
    """Make another installation of the one that ``was``, of ``environment``; return its id.

    Raises ``TargetMismatchError`` when it was not that one, or was not bound.
    """
    rows = await conn.fetch(load("target", schema).rotate, environment, was, reason, timeout=_TIMEOUT)
    if not rows or rows[0]["installation_id"] is None:
        if rows and rows[0]["was"] is None:
            raise TargetMismatchError(
                f"schema {schema!r} is not bound yet: `taskqd target bind {environment}` is enough"
            )
        raise TargetMismatchError(f"schema {schema!r} is not installation {was}: see `taskqd target show`")
    new: UUID = rows[0]["installation_id"]
    return new
