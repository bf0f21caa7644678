"""What a server, a role and a database allow, and what others have of it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.storage.connect import application_name, connect
from taskqd.storage.limits import Asker, Ceiling, Declared, Live, read_connection_limits, share_out
from tests.postgres import Server


@pytest.fixture
async def role(conn: asyncpg.Connection) -> AsyncIterator[str]:
    """An ordinary role without a limit."""
    name = f"limited_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {name} login")
    yield name
    await conn.execute(f"drop role {name}")


async def look(server: Server, role: str, database: str = "postgres") -> list[tuple[str | None, int, int]]:
    """What each ceiling is called, grants, and has been taken of by others, with one session of another beside us."""
    dsn = server.dsn(user=role, database=database)
    own = await connect(dsn, role="preflight", schema="s", group="g")
    other = await connect(dsn, role="client", schema="s")
    try:
        found = await read_connection_limits(own, Asker("s", "g", "here"))
    finally:
        await own.close(timeout=10)
        await other.close(timeout=10)
    return [(each.ceiling.limited_by, each.ceiling.max_connections, each.others) for each in found]


async def test_the_servers_limit_holds_where_there_is_no_other(server: Server, role: str) -> None:
    [(limited_by, granted, others)] = await look(server, role)
    assert limited_by is None
    assert granted >= 20
    assert others >= 1


async def test_a_role_with_a_limit_of_its_own(server: Server, role: str, conn: asyncpg.Connection) -> None:
    await conn.execute(f"alter role {role} connection limit 5")
    assert (await look(server, role))[1:] == [(f"role {role}", 5, 1)]


async def test_a_database_with_a_limit_of_its_own(server: Server, role: str, conn: asyncpg.Connection) -> None:
    await conn.execute(f"create database {role}")
    try:
        await conn.execute(f"alter database {role} connection limit 4")
        assert (await look(server, role, role))[1:] == [(f"database {role}", 4, 1)]
    finally:
        await conn.execute(f"drop database {role} with (force)")


async def test_reservations_of_every_supported_server(pg15: Server, pg16: Server) -> None:
    for server in (pg15, pg16):
        conn = await asyncpg.connect(server.dsn())
        [found] = await read_connection_limits(conn, Asker("s", "g", "here"))
        await conn.close()
        assert (found.ceiling.max_connections, found.ceiling.superuser_reserved, found.ceiling.reserved) == (300, 3, 0)


# -- who has what, without a server ---------------------------------------------------------------

SERVER = Ceiling("server", None, 100, 3)
ROLE = Ceiling("role", "role app", 50)
DATABASE = Ceiling("database", "database app", 50)


def shares(
    declared: Sequence[Declared], live: Sequence[Live], ceiling: Ceiling = SERVER, place: str | None = "here"
) -> tuple[dict[str, int], int]:
    """What each group of the schema counts for, and what nobody's sessions do."""
    found = share_out(ceiling, declared, live, Asker("s", "g", place))
    return {share.name: max(share.declared, share.live) for share in found.groups}, found.others


def test_the_larger_of_declared_and_live_counts() -> None:
    declared = [Declared("a", "one", 20), Declared("a", "two", 5), Declared("b", "one", 3)]
    live = [Live("taskqd/s/a/worker", 7), Live("taskqd/s/b/worker", 4), Live("taskqd/s/b/dispatch", 2), Live("psql", 9)]
    assert shares(declared, live) == ({"a": 25, "b": 6}, 9)


def test_the_group_itself_counts_only_elsewhere() -> None:
    live = [Live("taskqd/s/g/worker", 12)]
    assert shares([Declared("g", "here", 20)], live) == ({}, 0)
    assert shares([Declared("g", "here", 10)], live) == ({"g": 2}, 0)
    assert shares([Declared("g", "here", 10), Declared("g", "there", 8)], live) == ({"g": 8}, 0)
    assert shares([], live) == ({"g": 12}, 0)
    assert shares([Declared("g", "there", 8)], live, place=None) == ({}, 0)


def test_a_check_before_a_start_is_not_counted() -> None:
    live = [Live("taskqd/s/a/preflight", 1), Live("taskqd/t/a/preflight", 1), Live("x/preflight", 1)]
    assert shares([], live) == ({}, 1)


def test_the_limit_of_a_role_counts_what_that_role_holds() -> None:
    declared = [Declared("a", "one", 20, own_role=False), Declared("b", "one", 3)]
    live = [Live("taskqd/s/a/worker", 7, own_role=False), Live("taskqd/s/b/worker", 1), Live("psql", 9, own_role=False)]
    assert shares(declared, live, ROLE) == ({"b": 3}, 0)


def test_the_same_names_in_another_database_are_those_of_somebody_else() -> None:
    live = [Live("taskqd/s/g/worker", 7, own_database=False), Live("taskqd/s/a/worker", 2, own_database=False)]
    assert shares([Declared("a", "one", 1)], live) == ({"a": 1}, 9)
    assert shares([Declared("a", "one", 1)], live, DATABASE) == ({"a": 1}, 0)


names = st.sampled_from(["a", "b", "g", "a" * 32, "grüße" * 6])
rows = st.builds(Declared, names, st.sampled_from(["here", "there"]), st.integers(0, 50), st.booleans())
sessions = st.builds(
    Live,
    st.builds(application_name, st.sampled_from(["s", "t"]), names, st.sampled_from(["worker", "dispatch"]))
    | st.just("psql"),
    st.integers(1, 50),
    st.booleans(),
    st.booleans(),
)


@given(
    declared=st.lists(rows, unique_by=lambda row: (row.name, row.place)),
    live=st.lists(sessions),
    more=sessions,
    ceiling=st.sampled_from([SERVER, ROLE, DATABASE]),
)
def test_no_session_is_lost_and_none_makes_room(
    declared: list[Declared], live: list[Live], more: Live, ceiling: Ceiling
) -> None:
    groups, others = shares(declared, live, ceiling)
    counted = sum(
        each.sessions
        for each in live
        if (ceiling is not ROLE or each.own_role) and (ceiling is not DATABASE or each.own_database)
    )
    own = sum(row.connections for row in declared if (row.name, row.place) == ("g", "here"))
    assert others >= 0
    assert sum(groups.values()) + others >= counted - own
    beside, rest = shares(declared, [*live, more], ceiling)
    assert sum(beside.values()) + rest >= sum(groups.values()) + others
