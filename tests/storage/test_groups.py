"""The rows in which groups tell each other what they may hold."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import asyncpg
import pytest

from taskqd.domain.errors import BudgetExceededError
from taskqd.domain.exit_codes import ExitCode
from taskqd.storage import groups
from taskqd.storage.groups import EXPIRES_AFTER, GroupRow, declare, own_place
from taskqd.storage.limits import Asker, ConnectionLimits
from taskqd.storage.migrate import migrate_up
from taskqd.storage.statements import load
from tests.postgres import Server
from tests.support import eventually


async def rows(conn: asyncpg.Connection, schema: str) -> dict[tuple[str, str], int]:
    found = await conn.fetch(f'select name, place, connections from "{schema}".groups')
    return {(row["name"], row["place"]): row["connections"] for row in found}


async def left(conn: asyncpg.Connection, schema: str) -> float:
    """Seconds until the only row expires."""
    return float(
        await conn.fetchval(f'select extract(epoch from expires_at - clock_timestamp()) from "{schema}".groups')
    )


async def test_a_successor_replaces_the_row_of_its_place(conn: asyncpg.Connection, schema: str) -> None:
    for place, connections in (("one", 5), ("two", 6), ("one", 7)):
        await declare(conn, Asker(schema, "g", place), lambda _limits, declared=connections: declared)
    assert await rows(conn, schema) == {("g", "one"): 7, ("g", "two"): 6}
    await declare(conn, Asker(schema, "g", "one"), lambda _limits: None)
    assert await rows(conn, schema) == {("g", "one"): 7, ("g", "two"): 6}


@pytest.mark.parametrize("version", ["pg15", "pg16"])
async def test_every_supported_server(version: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(version)
    conn = await asyncpg.connect(server.dsn())
    schema = f"t_{uuid.uuid4().hex[:12]}"
    try:
        await migrate_up(conn, schema)
        seen: list[ConnectionLimits] = []

        def decide(limits: Sequence[ConnectionLimits]) -> int:
            seen.extend(limits)
            return 5

        await declare(conn, Asker(schema, "one", "here"), decide)
        await declare(conn, Asker(schema, "two", "here"), decide)
        assert [share.name for share in seen[-1].groups] == ["one"]
        assert await rows(conn, schema) == {("one", "here"): 5, ("two", "here"): 5}
    finally:
        await conn.execute(f"drop schema if exists {schema} cascade")
        await conn.close(timeout=10)


async def test_a_row_that_nobody_renews_counts_no_more(conn: asyncpg.Connection, schema: str) -> None:
    await declare(conn, Asker(schema, "old", "one"), lambda _limits: 9)
    seen: list[Sequence[ConnectionLimits]] = []

    def decide(limits: Sequence[ConnectionLimits]) -> int:
        seen.append(limits)
        return 1

    await declare(conn, Asker(schema, "g", "one"), decide)
    assert [(share.name, share.declared) for share in seen[-1][0].groups] == [("old", 9)]
    await conn.execute(f"update \"{schema}\".groups set expires_at = clock_timestamp() - interval '1 second'")
    await declare(conn, Asker(schema, "g", "one"), decide)
    assert seen[-1][0].groups == ()
    await conn.execute(f"update \"{schema}\".groups set expires_at = clock_timestamp() - interval '2 days'")
    await declare(conn, Asker(schema, "new", "one"), decide)
    assert set(await rows(conn, schema)) == {("new", "one")}


async def test_two_that_declare_at_once_look_one_after_the_other(
    conn: asyncpg.Connection, schema: str, dsn: str
) -> None:
    """Ten groups of 10 want a room of 35 at the same moment: three get in."""

    async def start(number: int) -> int | None:
        own = await asyncpg.connect(dsn)
        granted: list[int | None] = []

        def decide(limits: Sequence[ConnectionLimits]) -> int | None:
            taken = sum(share.declared for share in limits[0].groups)
            granted.append(10 if taken + 10 <= 35 else None)
            return granted[-1]

        try:
            await declare(own, Asker(schema, f"g{number}", "one"), decide)
        finally:
            await own.close(timeout=10)
        return granted[0]

    granted = await asyncio.gather(*(start(number) for number in range(10)))
    assert sorted(filter(None, granted)) == [10, 10, 10]
    assert len(await rows(conn, schema)) == 3


async def test_a_group_that_never_ends_looking_is_not_waited_for(
    conn: asyncpg.Connection, schema: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "LOCK_TIMEOUT", 0.1)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(load("limits", schema).lock_groups)
            with pytest.raises(BudgetExceededError, match="has been checking its connections") as caught:
                await declare(conn, Asker(schema, "g", "one"), lambda _limits: 1)
    finally:
        await other.close(timeout=10)
    assert caught.value.exit_code == ExitCode.TRY_AGAIN
    assert await rows(conn, schema) == {}


async def test_the_row_is_renewed_when_a_good_part_of_its_time_is_over(
    conn: asyncpg.Connection, schema: str, dsn: str
) -> None:
    place = own_place()
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=2)
    row = GroupRow(pool, schema, "g", lambda *_: None)
    try:
        row.loop.start()  # without a row there is nothing to renew
        await declare(conn, Asker(schema, "g", place), lambda _limits: 4)
        written = await conn.fetchval(f'select xmin::text from "{schema}".groups')
        row.loop.wake()
        await eventually(lambda: row.loop.failures == 0 and pool.get_idle_size() == pool.get_size())
        assert await conn.fetchval(f'select xmin::text from "{schema}".groups') == written
        await conn.execute(f"update \"{schema}\".groups set expires_at = clock_timestamp() + interval '20 seconds'")
        row.loop.wake()
        await eventually(lambda: _is_fresh(conn, schema))
        await row.withdraw()
        assert await rows(conn, schema) == {}
    finally:
        await pool.close()


async def _is_fresh(conn: asyncpg.Connection, schema: str) -> bool:
    return await left(conn, schema) > EXPIRES_AFTER - 30
