"""How many connections the server grants, how many others hold, and how many the groups of the schema have declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskqd.storage.connect import application_name
from taskqd.storage.statements import load

if TYPE_CHECKING:
    import asyncpg

_PREFLIGHT = "/preflight"


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What may be held is ``max_connections`` less the two reservations."""

    of: str
    """``server``, or ``role`` or ``database`` where that has a connection limit of its own."""
    limited_by: str | None
    """The name of that role or database."""
    max_connections: int
    superuser_reserved: int = 0
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Declared:
    """The row of a group: what it may hold, in one place."""

    name: str
    place: str
    connections: int
    own_role: bool = True
    """True when it connects as the role that asks."""


@dataclass(frozen=True, slots=True)
class Live:
    """Sessions of one application name."""

    name: str
    sessions: int
    own_role: bool = True
    own_database: bool = True


@dataclass(frozen=True, slots=True)
class Share:
    """What one group of the schema has declared, and what it holds now."""

    name: str
    declared: int
    live: int


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """One ceiling, and what others have of it."""

    ceiling: Ceiling
    groups: tuple[Share, ...]
    """The other groups of the schema."""
    others: int
    """Sessions of clients that belong to no group."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The group that asks, whose own sessions are not those of others."""

    schema: str
    group: str
    place: str | None
    """Where it runs: what a group of its name holds elsewhere is counted. None: it is the group everywhere."""


async def read_connection_limits(conn: asyncpg.Connection, asker: Asker) -> list[ConnectionLimits]:
    """Return every ceiling that holds for ``conn``, and what others have of it. Reads; two looks may differ."""
    sql = load("limits", asker.schema)
    ceilings = [Ceiling(**dict(row)) for row in await conn.fetch(sql.connection_ceilings)]
    declared: list[Declared] = []
    if await conn.fetchval(sql.groups_exist):
        declared = [Declared(**dict(row)) for row in await conn.fetch(sql.declared_groups)]
    live = [Live(**dict(row)) for row in await conn.fetch(sql.live_sessions)]
    return [share_out(ceiling, declared, live, asker) for ceiling in ceilings]


def share_out(ceiling: Ceiling, declared: Sequence[Declared], live: Sequence[Live], asker: Asker) -> ConnectionLimits:
    """Return who has what of ``ceiling``.

    A check before a start holds its connection for a moment only, and is part of what its group declares: it is not
    counted.
    """
    rows = [row for row in declared if ceiling.of != "role" or row.own_role]
    sessions = [
        each
        for each in live
        if (ceiling.of != "role" or each.own_role)
        and (ceiling.of != "database" or each.own_database)
        and not (each.name.startswith("taskqd/") and each.name.endswith(_PREFLIGHT))
    ]
    groups, others = [], sum(each.sessions for each in sessions)
    for name in dict.fromkeys([asker.group, *(row.name for row in declared)]):
        prefix = application_name(asker.schema, name, "")
        # The same names in another database are those of another installation.
        held = sum(each.sessions for each in sessions if each.own_database and each.name.startswith(prefix))
        others -= held
        places = [row for row in rows if row.name == name]
        if name == asker.group:
            if asker.place is None:
                continue
            # What it holds here is what its row says, at most: the rest is that of its namesakes elsewhere.
            held = max(held - sum(row.connections for row in places if row.place == asker.place), 0)
            places = [row for row in places if row.place != asker.place]
        share = Share(name, sum(row.connections for row in places), held)
        if share.declared or share.live:
            groups.append(share)
    return ConnectionLimits(ceiling, tuple(groups), others)
