"""Claim floors: they save the walk over dead entries and never hide a row for longer than they say."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from taskqd.worker.floors import BEGINNING, RESCAN_MAX, RESCAN_MIN, Floors
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


def test_news_hastens_the_next_rescan_as_far_as_rescans_stay_cheap(clock: Clock) -> None:
    floors = Floors(["a"])
    floors.rescanned(0.01)
    floors.hasten()
    assert not floors.rescan_due
    clock.advance(0.11)
    assert floors.rescan_due
    floors.rescanned(5.0)
    floors.hasten()
    clock.advance(RESCAN_MAX - 0.1)
    assert not floors.rescan_due
    clock.advance(0.2)
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
