"""Wake-ups of sleeping workers: few while many jobs come, one after the last, and none lost by closing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg
import pytest

from taskqd import EnqueueItem, TaskQ
from taskqd.client.wake import RARE, SPACING, WakeSender
from tests.client.actors import Number, double
from tests.client.conftest import Wakes
from tests.support import eventually


async def test_an_enqueue_wakes(tq: TaskQ, wakes: Wakes) -> None:
    await tq.enqueue(double, Number())
    await eventually(lambda: wakes.seen == 1)
    await tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number())])
    await eventually(lambda: wakes.seen == 2)


async def test_a_rare_enqueue_wakes_by_its_own_commit(dsn: str, schema: str, wakes: Wakes) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        counted = CountsNotifications(pool)
        async with TaskQ(pool=counted, schema=schema) as tq:
            for number, enqueue in enumerate(
                (
                    lambda: tq.enqueue(double, Number()),
                    lambda: tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number())]),
                ),
                1,
            ):
                await asyncio.sleep(2 * RARE)
                await enqueue()
                await eventually(lambda wanted=number: wakes.seen == wanted)
            assert counted.sent == 0


async def test_many_enqueues_share_spaced_wake_ups_and_the_last_is_followed_by_one(tq: TaskQ, wakes: Wakes) -> None:
    started = time.monotonic()
    for _ in range(300):
        await tq.enqueue(double, Number())
    elapsed = time.monotonic() - started
    last = asyncio.get_running_loop().time()
    await eventually(lambda: wakes.seen > 0 and wakes.times[-1] >= last - SPACING)
    assert wakes.seen <= elapsed / SPACING + 2
    assert wakes.seen < 300


async def test_closing_sends_the_wake_up_that_is_owed(dsn: str, schema: str, wakes: Wakes) -> None:
    for number in range(1, 6):
        async with TaskQ(dsn=dsn, schema=schema) as tq:
            await tq.enqueue(double, Number())
        await eventually(lambda number=number: wakes.seen >= number)


async def test_nothing_is_sent_when_nothing_was_enqueued(dsn: str, schema: str, wakes: Wakes) -> None:
    async with TaskQ(dsn=dsn, schema=schema):
        pass
    async with TaskQ(dsn=dsn, schema=schema) as tq:
        await tq.enqueue(double, Number())
    await eventually(lambda: wakes.seen == 1)


async def test_a_wake_up_that_failed_is_sent_again(dsn: str, schema: str, wakes: Wakes) -> None:
    failures: list[str] = []
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        flaky = FailsOnce(pool)
        sender = WakeSender(flaky, schema, lambda _name, error, _streak: failures.append(str(error)))
        sender.start()
        sender.request()
        await eventually(lambda: wakes.seen == 1)
        await sender.close()
    assert failures == ["the first time"]


async def test_closing_reports_a_wake_up_that_it_cannot_send(schema: str) -> None:
    failures: list[str] = []
    sender = WakeSender(FailsOnce(None), schema, lambda _name, error, _streak: failures.append(str(error)))
    sender.start()
    sender.request()
    await sender.close()
    assert failures == ["the first time"]


async def test_a_pool_without_a_free_connection_does_not_hold_up_closing(
    dsn: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskqd.client.wake.FLUSH_TIMEOUT", 0.2)
    failures: list[BaseException] = []
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire():
        sender = WakeSender(pool, schema, lambda _name, error, _streak: failures.append(error))
        sender.start()
        sender.request()
        started = time.monotonic()
        await sender.close()
        assert time.monotonic() - started < 10
    assert isinstance(failures[-1], TimeoutError)


class CountsNotifications:
    """A pool that counts what is only executed."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def execute(self, sql: str) -> None:
        self.sent += 1
        await self._pool.execute(sql)


class FailsOnce:
    """A pool whose first statement fails as a lost connection does."""

    def __init__(self, pool: asyncpg.Pool | None) -> None:
        self._pool = pool
        self._failed = False

    async def execute(self, sql: str) -> None:
        if not self._failed:
            self._failed = True
            raise ConnectionResetError("the first time")
        assert self._pool is not None
        await self._pool.execute(sql)
