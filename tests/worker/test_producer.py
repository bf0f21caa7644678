"""The producer: claims what is due, whatever lies in front of it, and gives back what it cannot start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from taskqd.domain.ids import new_uuid
from taskqd.storage.connect import create_pool
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.floors import RESCAN_MAX, RESCAN_MIN
from taskqd.worker.producer import Producer
from taskqd.worker.slots import Slots
from tests.jobs import JobTable
from tests.postgres import Server
from tests.proxy import Proxy
from tests.support import eventually
from tests.worker.attempts import REFS


class Harness:
    """A producer on a real database whose rows a coroutine takes, one every ``pause`` seconds."""

    def __init__(
        self, pool: Any, schema: str, queues: list[str], *, size: int = 4, poll_interval: float = 60.0
    ) -> None:
        self.taken: list[Attempt] = []
        self.given_back: list[Attempt] = []
        self.errors: list[BaseException] = []
        self.slots = Slots(size, lambda: self.producer.room_made())
        self.leases = Leases()
        self.producer = Producer(
            pool,
            schema,
            REFS,
            queues,
            self.slots,
            self.leases,
            worker_id=new_uuid(),
            lock_lease=60.0,
            poll_interval=poll_interval,
            command_timeout=5.0,
            release=self.given_back.extend,
            on_failure=lambda _name, error, _streak: self.errors.append(error),
        )

    async def take(self, pause: float) -> None:
        while (attempt := await self.slots.get()) is not None:
            self.taken.append(attempt)
            self.slots.finished(0.001)
            await asyncio.sleep(pause)

    async def __aenter__(self) -> Harness:
        self.producer.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.producer.stop(5)
        self.slots.close()


async def test_a_row_planted_below_the_floor_is_found_within_the_bound(jobs: JobTable, pool: Any, schema: str) -> None:
    backlog = await jobs.plant(30_000)
    async with Harness(pool, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.001))
        await eventually(lambda: len(harness.taken) > 1000)
        planted = time.monotonic()
        (old,) = await jobs.plant(scheduled_at="clock_timestamp() - interval '1 day'")
        await eventually(lambda: any(one.job_id == old for one in harness.taken), RESCAN_MAX)
        hidden = time.monotonic() - planted
        assert hidden < 10 * RESCAN_MIN
        assert len(harness.taken) < len(backlog), "the backlog was drained, so the floor was never in the way"
    await taker
    assert harness.errors == []


async def test_a_higher_priority_is_noticed_within_the_bound_and_goes_first(
    jobs: JobTable, pool: Any, schema: str
) -> None:
    backlog = await jobs.plant(30_000)
    async with Harness(pool, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.001))
        await eventually(lambda: len(harness.taken) > 1000)
        urgent = await jobs.plant(50, priority="7")
        await eventually(lambda: {one.job_id for one in harness.taken} >= set(urgent), 10 * RESCAN_MIN)
        assert len(harness.taken) < len(backlog)
    await taker
    assert harness.errors == []


async def test_no_queue_starves_behind_anothers_backlog(jobs: JobTable, pool: Any, schema: str) -> None:
    backlog = await jobs.plant(20_000)
    few = await jobs.plant(100, queue="'mail'", route="'mail'")
    async with Harness(pool, schema, ["default", "mail"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.001))
        await eventually(lambda: {one.job_id for one in harness.taken} >= set(few), 10)
        assert len(harness.taken) < len(backlog)
    await taker
    assert harness.errors == []


async def test_a_wake_up_is_answered_at_once_and_never_lost(jobs: JobTable, pool: Any, schema: str) -> None:
    async with Harness(pool, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: harness.producer.loop.last_ok > 0)
        for round_ in range(30):
            await jobs.plant()
            harness.producer.woken()  # at any moment of the claim that the last one caused
            await eventually(lambda count=round_: len(harness.taken) > count, 10)
    await taker
    assert harness.errors == []


class Spy:
    """A pool that notes the texts of what is fetched through it."""

    def __init__(self, pool: Any) -> None:
        self.sent: list[str] = []
        self.on_sent: Callable[[str], None] = lambda _text: None
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
        self.sent.append(query)
        self.on_sent(query)
        return await self._pool.fetch(query, *args, **options)


async def test_who_is_woken_claims_first_where_jobs_were_found_before(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.plant()
    spy = Spy(pool)
    async with Harness(spy, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: len(harness.taken) == 1)
        await jobs.plant()
        await eventually(lambda: spy.sent[-1] != jobs.worker_sql.claim)  # it sleeps, or is about to
        await asyncio.sleep(0.1)
        spy.sent.clear()
        taken_by: list[int] = []
        spy.on_sent = lambda _text: taken_by.append(len(harness.taken))
        harness.producer.woken()
        await eventually(lambda: len(harness.taken) == 2)
        assert spy.sent[0] == jobs.worker_sql.claim
        await eventually(lambda: jobs.worker_sql.heads in spy.sent)  # and looks everywhere then
        assert taken_by[:2] == [1, 2], "what was found begins before anything else is asked"
        await jobs.plant(priority="5")
        harness.producer.woken()
        await eventually(lambda: len(harness.taken) == 3)
    await taker
    assert harness.errors == []


async def test_a_stream_is_looked_after_between_its_wake_ups(jobs: JobTable, pool: Any, schema: str) -> None:
    """Jobs that nobody tells of are found while others come, long before the poll interval has passed."""
    spy = Spy(pool)
    async with Harness(spy, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))

        async def is_taken(planted: list[UUID], within: float) -> bool:
            deadline = time.monotonic() + within
            while planted[0] not in {one.job_id for one in harness.taken} and time.monotonic() < deadline:
                await asyncio.sleep(0.001)
            return planted[0] in {one.job_id for one in harness.taken}

        async def finds_what_nobody_tells_of() -> bool:
            for _ in range(3):  # a stream, unless the machine is too slow for one
                planted = await jobs.plant()
                harness.producer.woken()
                assert await is_taken(planted, 10)
            return await is_taken(await jobs.plant(), 0.05)

        deadline = time.monotonic() + 30
        while not await finds_what_nobody_tells_of():
            assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
        spy.sent.clear()
        await asyncio.sleep(0.5)
        assert len(spy.sent) <= 4, "the stream has ended, and it still looks"
    await taker
    assert harness.errors == []


async def test_what_a_glance_had_no_room_for_is_claimed_as_soon_as_there_is(
    jobs: JobTable, pool: Any, schema: str
) -> None:
    """Nobody tells of the burst, and it is more than there is room for at once."""
    hold = 0.0
    async with Harness(pool, schema, ["default"], size=1) as harness:
        producer = harness.producer

        async def take() -> None:
            while (attempt := await harness.slots.get()) is not None:
                harness.taken.append(attempt)
                await asyncio.sleep(hold)
                harness.slots.finished(0.02)  # slow enough that nothing is claimed ahead

        taker = asyncio.ensure_future(take())
        expected = 0
        deadline = time.monotonic() + 30
        while True:
            for _ in range(3):  # a stream, unless the machine is too slow for one
                await jobs.plant()
                producer.woken()
                expected += 1
                while len(harness.taken) < expected:
                    await asyncio.sleep(0.001)
                    assert time.monotonic() < deadline
            hold = 0.2
            await jobs.plant(4)
            expected += 4
            await asyncio.sleep(0.05)
            if len(harness.taken) == expected - 3:
                break  # a glance has found the first
            hold = 0.0
            producer.woken()
            await eventually(lambda count=expected: len(harness.taken) >= count, 20)
        await eventually(lambda: len(harness.taken) == expected, 20)
    await taker
    assert harness.errors == []


async def test_strangers_at_the_head_are_passed_over(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.plant(500, actor="'stranger'", scheduled_at="clock_timestamp() - interval '1 hour'")
    known = await jobs.plant(20)
    async with Harness(pool, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: {one.job_id for one in harness.taken} == set(known))
    await taker
    assert await jobs.counts() == {"pending": 500, "running": 20}


async def test_rows_that_wait_too_long_go_back(jobs: JobTable, pool: Any, schema: str) -> None:
    ids = await jobs.plant(4)
    async with Harness(pool, schema, ["default"]) as harness:  # nobody takes anything
        await eventually(lambda: len(harness.given_back) == 4)
    assert {one.job_id for one in harness.given_back} == set(ids)


async def test_after_an_outage_it_looks_again_as_soon_as_it_polls(
    jobs: JobTable, server: Server, short_dir: Path, schema: str
) -> None:
    """However long the outage was: the pauses between failed claims do not outgrow the poll interval."""
    proxy = Proxy(server, short_dir)
    proxy.start()
    pool = await create_pool(
        proxy.dsn(), role="test", schema=schema, group="", min_size=1, max_size=1, command_timeout=5
    )
    try:
        async with Harness(pool, schema, ["default"], poll_interval=0.2) as harness:
            taker = asyncio.ensure_future(harness.take(0.0))
            proxy.cut()
            await eventually(lambda: len(harness.errors) >= 6, 12)  # a pause that doubles each time takes 15 s
            proxy.restore()
            (job,) = await jobs.plant()
            await eventually(lambda: [one.job_id for one in harness.taken] == [job], 10)
        await taker
    finally:
        pool.terminate()
        proxy.stop()
