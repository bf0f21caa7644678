"""The restart rule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.exits import ExitClass, classify
from taskqd.supervisor.restart import GiveUp, Restart, RestartRule, judge

RULE = RestartRule()


def verdict(code: int, **given: Any) -> Restart | GiveUp:
    facts: dict[str, Any] = {"ready_for": None, "unstable": 0, "came_up": True, "recent": 0, "jitter": 1.0}
    return judge(RULE, classify(code), **{**facts, **given})


def test_after_a_stable_run_it_returns_at_once() -> None:
    assert verdict(1, ready_for=10.0, unstable=4) == Restart(0.0, 0)


def test_unstable_runs_wait_twice_as_long_each_time_up_to_the_maximum() -> None:
    delays = [verdict(1, unstable=count) for count in range(9)]
    assert [each.delay for each in delays if isinstance(each, Restart)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_run_that_was_ready_too_briefly_is_unstable() -> None:
    assert verdict(1, ready_for=9.9) == Restart(0.5, 1)


@pytest.mark.parametrize(
    ("code", "group"),
    [
        (1, ExitCode.INTERNAL),
        (0, ExitCode.INTERNAL),
        (-11, ExitCode.INTERNAL),
        (70, ExitCode.INTERNAL),
        (69, ExitCode.UNAVAILABLE),
        (75, ExitCode.TRY_AGAIN),
    ],
)
def test_what_never_came_up_ends_the_group_at_the_third_failure(code: int, group: ExitCode) -> None:
    assert isinstance(verdict(code, came_up=False, unstable=1), Restart)
    end = verdict(code, came_up=False, unstable=2)
    assert isinstance(end, GiveUp)
    assert end.group is group


def test_a_ready_process_that_asks_to_be_started_afresh_is_no_failure() -> None:
    assert verdict(75, ready_for=0.1, unstable=2) == Restart(0.0, 2)
    assert verdict(75, unstable=2) == Restart(2.0, 3), "one that never became ready waits for what it misses"
    assert isinstance(verdict(75, ready_for=0.1, recent=10), GiveUp)


def test_refusal_is_final_at_once() -> None:
    boot, later = verdict(78, came_up=False), verdict(78, came_up=True, ready_for=1000.0)
    assert isinstance(boot, GiveUp)
    assert boot.group is ExitCode.REFUSED
    assert isinstance(later, GiveUp)
    assert later.group is None


def test_what_had_come_up_is_tried_for_ever_and_called_degraded() -> None:
    assert not getattr(verdict(1, unstable=3), "degraded", None)
    assert getattr(verdict(1, unstable=4), "degraded", None)


def test_a_database_that_is_away_degrades_nobody() -> None:
    assert verdict(69, unstable=20) == Restart(30, 21)


def test_the_burst_guard_trips_however_stable_the_runs_are() -> None:
    assert isinstance(verdict(1, ready_for=60.0, recent=9), Restart)
    assert isinstance(verdict(1, ready_for=60.0, recent=10), GiveUp)


@settings(deadline=None)
@given(
    code=st.sampled_from([0, 1, 2, 69, 70, 75, -6, -9, -11]),
    ready_for=st.none() | st.floats(0, 1e6),
    unstable=st.integers(0, 10_000),
    jitter=st.floats(0.8, 1.2),
)
def test_no_delay_leaves_its_bounds(code: int, ready_for: float | None, unstable: int, jitter: float) -> None:
    result = verdict(code, ready_for=ready_for, unstable=unstable, jitter=jitter)
    assert isinstance(result, Restart)
    assert 0 <= result.delay <= RULE.backoff_max * 1.2


def test_exit_codes_are_told_apart() -> None:
    assert classify(0).kind is ExitClass.CLEAN
    assert classify(78).kind is ExitClass.PERMANENT
    assert classify(-11).why == "ended by SIGSEGV"
    assert classify(-9, killed_because="hung").kind is ExitClass.HUNG
    assert classify(70, killed_because="hung").kind is ExitClass.INTERNAL
    assert classify(42).kind is ExitClass.CRASH
    assert classify(-9, oom=True).kind is ExitClass.OOM
    assert classify(-11, oom=True).kind is ExitClass.CRASH
    assert classify(-9, killed_because="hung", oom=True).kind is ExitClass.HUNG
