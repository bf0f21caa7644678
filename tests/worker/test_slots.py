"""How far a worker claims ahead: never more unstarted rows than it can start within moments."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskqd.worker.attempt import Attempt
from taskqd.worker.slots import MAX_PREFETCH, SLOW_HANDLER, WINDOW, Slots
from tests.worker.attempts import make_attempt
from tests.worker.clock import Clock, install


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return install(monkeypatch, "slots", "attempt")


def attempts(count: int) -> list[Attempt]:
    return [make_attempt() for _ in range(count)]


async def run_to_end(slots: Slots, count: int, seconds: float = 0.001, clock: Clock | None = None) -> None:
    """Take ``count`` attempts and finish each after ``seconds``."""
    for _ in range(count):
        assert await asyncio.wait_for(slots.get(), 5) is not None
        if clock is not None:
            clock.advance(seconds)
        slots.finished(seconds)


async def test_a_worker_that_has_finished_nothing_claims_what_it_can_start(clock: Clock) -> None:
    slots = Slots(8, lambda: None)
    assert slots.room() == 8
    slots.put(attempts(8))
    assert slots.room() == 0


async def test_fast_handlers_earn_as_many_rows_ahead_as_they_finished_in_the_window(clock: Clock) -> None:
    slots = Slots(4, lambda: None)
    slots.put(attempts(30))
    await run_to_end(slots, 30)
    assert slots.room() == 4 + 30


async def test_the_right_to_claim_ahead_lapses_within_two_windows(clock: Clock) -> None:
    slots = Slots(4, lambda: None)
    slots.put(attempts(30))
    await run_to_end(slots, 30)
    clock.advance(2 * WINDOW + 0.001)
    assert slots.room() == 4


async def test_slow_handlers_claim_nothing_ahead(clock: Clock) -> None:
    slots = Slots(4, lambda: None)
    slots.put(attempts(40))
    await run_to_end(slots, 40, seconds=SLOW_HANDLER + 0.001)
    assert slots.room() == 4


async def test_one_slow_handler_among_fast_ones_changes_nothing(clock: Clock) -> None:
    slots = Slots(4, lambda: None)
    slots.put(attempts(31))
    await run_to_end(slots, 30)
    await run_to_end(slots, 1, seconds=30)
    assert slots.room() == 4 + 31


async def test_claims_ahead_are_bounded_however_fast_the_handlers(clock: Clock) -> None:
    slots = Slots(4, lambda: None)
    slots.put(attempts(3 * MAX_PREFETCH))
    await run_to_end(slots, 3 * MAX_PREFETCH, seconds=0.0)
    assert slots.room() == 4 + MAX_PREFETCH


async def test_no_claim_while_the_local_queue_is_half_full(clock: Clock) -> None:
    slots = Slots(2, lambda: None)
    slots.put(attempts(40))
    await run_to_end(slots, 40)
    slots.put(attempts(22))
    assert slots.room() == 0
    for _ in range(2):
        await slots.get()
    assert slots.waiting == 20
    assert slots.room() == 20


async def test_rows_that_waited_too_long_are_given_up_oldest_first(clock: Clock) -> None:
    slots = Slots(1, lambda: None)
    old, young = attempts(2), None
    slots.put(old)
    clock.advance(0.9)
    young = attempts(1)
    slots.put(young)
    assert slots.take_stale(1.0) == []
    clock.advance(0.2)
    assert slots.take_stale(1.0) == old
    assert slots.take_all() == young
    assert slots.waiting == 0


async def test_idle_consumers_are_woken_by_rows_and_by_the_end(clock: Clock) -> None:
    slots = Slots(3, lambda: None)
    takers = [asyncio.ensure_future(slots.get()) for _ in range(3)]
    await asyncio.sleep(0)
    (row,) = attempts(1)
    slots.put([row])
    await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)
    slots.close()
    taken = await asyncio.wait_for(asyncio.gather(*takers), 5)
    assert sorted(taken, key=lambda one: one is None) == [row, None, None]


async def test_once_closed_nothing_begins_any_more(clock: Clock) -> None:
    slots = Slots(1, lambda: None)
    slots.close()
    late = attempts(2)
    slots.put(late)  # by a claim that was under way
    assert await asyncio.wait_for(slots.get(), 5) is None
    assert slots.take_all() == late


async def test_a_taker_that_finds_no_row_asks_for_some(clock: Clock) -> None:
    asked: list[int] = []
    slots = Slots(1, lambda: asked.append(1))
    taker = asyncio.ensure_future(slots.get())
    await asyncio.sleep(0)
    assert asked
    slots.close()
    await taker


Step = tuple[str, float]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("claim"), st.just(0.0)),
            st.tuples(st.just("run"), st.sampled_from([0.0, 0.0005, 0.002, 0.02])),
            st.tuples(st.just("wait"), st.sampled_from([0.001, 0.03, 0.06, 0.2])),
        ),
        max_size=120,
    )
)
async def test_unstarted_rows_never_exceed_what_was_finished_lately(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = install(monkeypatch, "slots", "attempt")
    size = 3
    slots = Slots(size, lambda: None)
    finished: list[float] = []
    for kind, seconds in steps:
        if kind == "claim":
            room = slots.room()
            slots.put(attempts(room))
            lately = sum(at >= clock.now - 2 * WINDOW for at in finished)
            assert not room or slots.waiting <= size - slots.busy + lately
        elif kind == "wait":
            clock.advance(seconds)
        elif slots.waiting:
            assert await slots.get() is not None
            clock.advance(seconds)
            slots.finished(seconds)
            finished.append(clock.now)
    assert slots.done == len(finished)
    assert slots.busy == 0
