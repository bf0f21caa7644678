"""Claim floors: they save the walk over dead entries and never hide a row for longer than they say."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from taskqd.domain.ids import new_uuid
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.floors import BEGINNING, RESCAN_MAX, RESCAN_MIN, Floors
from taskqd.worker.producer import Producer
from taskqd.worker.slots import Slots
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.attempts import REFS
from tests.worker.clock import Clock, install

KEY = (datetime(2030, 1, 1, tzinfo=UTC), UUID(int=7))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return install(monkeypatch, "floors")


def test_the_first_claim_is_a_rescan(clock: Clock) -> None:
    floors = Floors(["a"])
    assert floors.rescan_due
    assert not floors


@pytest.mark.parametrize(("cost", "pause"), [(0.0, RESCAN_MIN), (0.05, 1.0), (0.2, 4.0), (60.0, RESCAN_MAX)])
def test_a_rescan_may_cost_a_twentieth_and_is_never_further_than_ten_seconds(
    clock: Clock, cost: float, pause: float
) -> None:
    floors = Floors(["a"])
    floors.rescanned(cost)
    clock.advance(pause - 0.01)
    assert not floors.rescan_due
    clock.advance(0.02)
    assert floors.rescan_due


def test_a_short_answer_or_a_wake_up_makes_it_due_at_once(clock: Clock) -> None:
    floors = Floors(["a"])
    floors.rescanned(1.0)
    floors.want_rescan()
    assert floors.rescan_due


def test_the_floor_is_the_last_key_answered_until_the_rescan(clock: Clock) -> None:
    floors = Floors(["a"])
    floors.reset([("a", 0), ("a", 5)])
    assert floors.segments() == [(("a", 5), BEGINNING), (("a", 0), BEGINNING)]
    floors.advance(("a", 5), KEY)
    assert floors.segments() == [(("a", 5), KEY), (("a", 0), BEGINNING)]
    floors.reset([("a", 0)])
    assert floors.segments() == [(("a", 0), BEGINNING)]


def test_queues_take_turns_within_a_priority_and_never_across(clock: Clock) -> None:
    floors = Floors(["a", "b", "c"])
    floors.reset([("a", 0), ("b", 0), ("c", 0), ("b", 9)])
    firsts = []
    for _ in range(6):
        order = [segment for segment, _ in floors.segments()]
        assert order[0] == ("b", 9)
        firsts.append(order[1][0])
    assert sorted(firsts) == ["a", "a", "b", "b", "c", "c"]


class Harness:
    """A producer on a real database whose rows a coroutine takes, one every ``pause`` seconds."""

    def __init__(
        self, pool: Any, schema: str, queues: list[str], *, size: int = 4, poll_interval: float = 60.0
    ) -> None:
        self.taken: list[Attempt] = []
        self.given_back: list[Attempt] = []
        self.errors: list[BaseException] = []
        self.slots = Slots(size, lambda: self.producer.room_made())
        self.producer = Producer(
            pool,
            schema,
            REFS,
            queues,
            self.slots,
            Leases(),
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
        self.producer.loop.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.producer.loop.stop(5)
        self.slots.close()
        assert not self.errors


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


async def test_no_queue_starves_behind_anothers_backlog(jobs: JobTable, pool: Any, schema: str) -> None:
    backlog = await jobs.plant(20_000)
    few = await jobs.plant(100, queue="'mail'", route="'mail'")
    async with Harness(pool, schema, ["default", "mail"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.001))
        await eventually(lambda: {one.job_id for one in harness.taken} >= set(few), 10)
        assert len(harness.taken) < len(backlog)
    await taker


async def test_a_wake_up_is_answered_at_once_and_never_lost(jobs: JobTable, pool: Any, schema: str) -> None:
    async with Harness(pool, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: harness.producer.loop.last_ok > 0)
        for round_ in range(30):
            await jobs.plant()
            harness.producer.woken()  # at any moment of the claim that the last one caused
            await eventually(lambda count=round_: len(harness.taken) > count, 10)
    await taker


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
