"""A pool replaced under its users, and what keeps a process on the present credential."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from taskqd.storage import swap as module
from taskqd.storage.connect import create_pool
from taskqd.storage.credentials import EXPIRY_MARGIN, Credential, CredentialError, Login
from taskqd.storage.listener import Listener
from taskqd.storage.rotation import Result, Rotation
from taskqd.storage.schema_name import wake_channel
from taskqd.storage.swap import SwapPool
from tests.support import eventually

BACKEND = "select pg_backend_pid()"


class Opener:
    """Opens pools of one session, or fails, or hangs."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.opened: list[asyncpg.Pool] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self) -> asyncpg.Pool:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        pool = await create_pool(
            self.dsn, role="swap", schema="s", group="", min_size=1, max_size=2, command_timeout=20
        )
        self.opened.append(pool)
        return pool


@pytest.fixture
async def opener(dsn: str) -> AsyncIterator[Opener]:
    made = Opener(dsn)
    yield made
    for pool in made.opened:
        pool.terminate()


async def test_it_answers_like_the_pool_it_holds(opener: Opener) -> None:
    pool = await SwapPool.open(opener)
    assert await pool.fetchval("select $1::int", 5) == 5
    assert await pool.fetchval("select 1, 2", column=1, timeout=5) == 2
    assert [record["n"] for record in await pool.fetch("select generate_series(1, $1) n", 3)] == [1, 2, 3]
    assert dict(await pool.fetchrow("select 1 as a") or {}) == {"a": 1}
    assert await pool.execute("select 1") == "SELECT 1"
    async with pool.acquire() as connection, connection.transaction():
        assert await connection.fetchval("select 7") == 7
    await pool.close()
    with pytest.raises(asyncpg.InterfaceError):
        await pool.fetchval("select 1")


async def test_what_began_ends_on_the_old_sessions_and_the_rest_runs_on_new_ones(opener: Opener) -> None:
    pool = await SwapPool.open(opener)
    async with pool.acquire() as held:
        before = await held.fetchval(BACKEND)
        swapping = asyncio.ensure_future(pool.swap())
        await eventually(lambda: len(opener.opened) == 2)
        assert await eventually(lambda: _moved(pool, before))
        assert await held.fetchval(BACKEND) == before
        assert not swapping.done()
    await swapping
    assert opener.opened[0].is_closing()


async def _moved(pool: SwapPool, before: int) -> bool:
    return bool(await pool.fetchval(BACKEND) != before)


async def test_nobody_who_waits_for_a_session_is_cut_off(opener: Opener) -> None:
    pool = await SwapPool.open(opener)
    slow = [asyncio.ensure_future(pool.fetchval("select 1 from pg_sleep(0.3)")) for _ in range(6)]
    await asyncio.sleep(0)
    await pool.swap()
    assert await asyncio.gather(*slow) == [1] * 6, "two sessions, six statements: four were in the queue"


async def test_swaps_under_load_fail_no_statement(opener: Opener) -> None:
    pool = await SwapPool.open(opener)
    done = 0
    stop = asyncio.Event()

    async def work() -> None:
        nonlocal done
        while not stop.is_set():
            assert await pool.fetchval("select 1") == 1
            done += 1

    workers = [asyncio.ensure_future(work()) for _ in range(8)]
    for _ in range(5):
        await pool.swap()
    stop.set()
    await asyncio.gather(*workers)
    assert done > 20
    assert len(opener.opened) == 6


async def test_a_statement_that_does_not_end_is_ended_with_the_old_pool(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_TIMEOUT", 0.2)
    pool = await SwapPool.open(opener)
    endless = asyncio.ensure_future(pool.fetchval("select pg_sleep(1000)", timeout=100))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await pool.swap()
    assert time.monotonic() - began < 5
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await asyncio.wait_for(endless, 10)
    # The server only notices when the statement has ended; until then its snapshot would hold up others' tests.
    assert await pool.fetchval(
        "select bool_and(pg_terminate_backend(pid)) from pg_stat_activity where query = 'select pg_sleep(1000)'"
    )


async def test_a_new_pool_that_does_not_open_leaves_the_old_one(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await SwapPool.open(opener)
    before = await pool.fetchval(BACKEND)
    opener.error = CredentialError("no")
    with pytest.raises(CredentialError):
        await pool.swap()
    opener.error = None
    opener.gate.clear()
    monkeypatch.setattr(module, "OPEN_TIMEOUT", 0.1)
    with pytest.raises(TimeoutError):
        await pool.swap()
    assert await pool.fetchval(BACKEND) == before


async def test_a_swap_that_a_close_overtakes_opens_nothing_for_good(opener: Opener) -> None:
    pool = await SwapPool.open(opener)
    opener.gate.clear()
    swapping = asyncio.ensure_future(pool.swap())
    await asyncio.sleep(0)
    pool.terminate()
    opener.gate.set()
    await swapping
    assert all(each.is_closing() for each in opener.opened)


# -- the listener ---------------------------------------------------------------------------------


async def test_a_listener_that_is_renewed_misses_nothing(dsn: str, schema: str, conn: asyncpg.Connection) -> None:
    heard: list[float] = []
    failed: list[object] = []
    listener = Listener(
        dsn,
        schema,
        "g",
        {wake_channel(schema): lambda: heard.append(time.monotonic())},
        on_failure=lambda *why: failed.append(why),
        check_interval=3600,
        setup_timeout=10,
        backoff=0.1,
    )
    listener.start()
    name = f"taskqd/{schema}/g/notify"
    find = "select array_agg(pid) from pg_stat_activity where application_name = $1"
    try:
        await eventually(lambda: heard)
        (before,) = await conn.fetchval(find, name)
        renewing = asyncio.ensure_future(listener.renew())
        while not renewing.done():
            count = len(heard)
            await conn.execute("select pg_notify($1, '')", wake_channel(schema))
            await eventually(lambda count=count: len(heard) > count)  # type: ignore[misc]
        await renewing
        (after,) = await eventually(lambda: _only_one(conn, find, name))
        assert after != before
        count = len(heard)
        await conn.execute("select pg_notify($1, '')", wake_channel(schema))
        await eventually(lambda: len(heard) > count)
    finally:
        await listener.stop(5)
    assert failed == []


async def _only_one(conn: asyncpg.Connection, query: str, name: str) -> list[int]:
    found: list[int] = await conn.fetchval(query, name)
    return found if len(found) == 1 else []


# -- rotation -------------------------------------------------------------------------------------


class Source(Login):
    """A credential that a test changes."""

    def __init__(self) -> None:
        self.credential = Credential("one")
        self.error: CredentialError | None = None

    def _read(self, fresh: bool, asked_at: float) -> Credential:
        if self.error is not None:
            raise self.error
        return self.credential


class Renewed:
    """What a rotation did."""

    def __init__(self, source: Source | None, *, interval: float = 0.02) -> None:
        self.told: list[list[Result]] = []
        self.failures: list[BaseException] = []
        self.broken: Exception | None = None
        self.renewals = 0
        self.rotation = Rotation(
            source,
            None if source is None else source.credential,
            {"a": self.renew, "b": self.break_down},
            interval=interval,
            on_renewed=self.told.append,
            on_failure=lambda _name, error, _streak: self.failures.append(error),
        )

    async def renew(self) -> None:
        self.renewals += 1

    async def break_down(self) -> None:
        if self.broken is not None:
            raise self.broken


async def test_every_resource_is_reported_and_a_failure_is_its_own() -> None:
    made = Renewed(None)
    made.broken = CredentialError("the file is gone")
    good, bad = await made.rotation.renew()
    assert (good["resource"], good["ok"], good["error"]) == ("a", True, None)
    assert (bad["resource"], bad["ok"], bad["error"]) == ("b", False, "the file is gone")
    assert good["ms"] >= 0
    made.broken = TimeoutError()
    assert (await made.rotation.renew())[1]["error"] == "no answer in time"
    made.broken = ValueError("odd")
    assert (await made.rotation.renew())[1]["error"] == "ValueError: odd"
    assert len(made.told) == 3


async def test_a_changed_credential_is_noticed_once_and_a_failed_renewal_tried_again() -> None:
    source = Source()
    made = Renewed(source)
    made.rotation.start()
    try:
        await asyncio.sleep(0.2)
        assert made.renewals == 0
        made.broken = RuntimeError("not yet")
        source.credential = Credential("two")
        await eventually(lambda: made.renewals >= 2)
        made.broken = None
        await eventually(lambda: made.told[-1][1]["ok"])
        done = made.renewals
        await asyncio.sleep(0.2)
        assert made.renewals == done
    finally:
        await made.rotation.stop(1)


async def test_a_credential_that_cannot_be_read_is_told_and_tried_again() -> None:
    source = Source()
    made = Renewed(source)
    source.error = CredentialError("gone")
    made.rotation.start()
    try:
        await eventually(lambda: made.failures)
        with pytest.raises(CredentialError):
            await made.rotation.renew()
        source.error, source.credential = None, Credential("two")
        await eventually(lambda: made.renewals)
    finally:
        await made.rotation.stop(1)


async def test_one_that_expires_is_looked_at_half_way_there() -> None:
    source = Source()
    source.credential = Credential("one", expires_at=time.time() + EXPIRY_MARGIN + 2)
    made = Renewed(source, interval=3600)
    made.rotation.start()
    try:
        await asyncio.sleep(0.05)
        source.credential = Credential("two", expires_at=time.time() + 7200)
        await eventually(lambda: made.renewals == 1, 10)
    finally:
        await made.rotation.stop(1)


@pytest.mark.parametrize("interval", [0, 0.01])
async def test_it_does_not_look_where_there_is_nothing_to_see(interval: float) -> None:
    source: Any = Source() if interval == 0 else None
    made = Renewed(source, interval=interval)
    made.rotation.start()
    if source is not None:
        source.credential = Credential("two")
    await asyncio.sleep(0.1)
    assert made.renewals == 0
    await made.rotation.stop(1)
