"""How many connections the server grants, and how many others hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskqd.storage.connect import application_name
from taskqd.storage.statements import load

if TYPE_CHECKING:
    import asyncpg


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What may be held is ``max_connections`` less the two reservations.

    ``limited_by`` is None where that is the server's; else it names the role or the database whose own connection limit
    leaves less, and the numbers are of that.
    """

    limited_by: str | None
    max_connections: int
    superuser_reserved: int
    reserved: int
    others: int
    """Client sessions of the server, the role or the database that do not belong to the group."""


async def read_connection_limits(conn: asyncpg.Connection, schema: str, group: str) -> ConnectionLimits:
    """Return the tightest limit that holds for ``conn``; sessions of ``group`` in ``schema`` are not others."""
    row = await conn.fetchrow(load("limits", schema).connection_limits, application_name(schema, group, ""))
    assert row is not None  # noqa: S101 - a select without from returns one row
    return ConnectionLimits(**dict(row))
