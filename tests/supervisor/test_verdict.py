"""Verdicts on processes that do not get on: the rules, for any history."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.health.canary import Canary, split_words
from taskqd.supervisor.verdict import (
    MEANING,
    TOGETHER,
    WEDGED_AFTER,
    WEDGED_POLLS,
    Claiming,
    Verdict,
    follow,
    is_cut_off,
    is_wedged,
    judge_silence,
    stalled_together,
)
from tests.support import wait_until

IDLE = {"phase": "running", "inflight": 0, "slots": 8, "db_ok_age_ms": 100, "polls": 7, "poll_s": 1.0, "paused": False}
STALE = 60.0


def test_every_verdict_has_a_meaning() -> None:
    assert set(MEANING) == set(Verdict)


@pytest.mark.parametrize(
    ("stopped", "canary", "word", "verdict"),
    [
        (True, True, False, Verdict.STOPPED),
        (True, True, True, Verdict.STOPPED),
        (False, True, True, Verdict.BLOCKED),
        (False, True, False, Verdict.GIL_HELD),
        (False, False, False, Verdict.SILENT),
    ],
)
def test_silences_are_told_apart(stopped: bool, canary: bool, word: bool, verdict: Verdict) -> None:
    assert judge_silence(stopped=stopped, canary=canary, word=word) is verdict


def watch(beats: list[tuple[float, dict[str, object]]]) -> bool:
    """Whether the last of the beats finds the worker wedged."""
    claiming = Claiming()
    for now, beat in beats:
        claiming = follow(claiming, beat, now, stale_after=STALE)
    return is_wedged(claiming, beats[-1][1], beats[-1][0])


def test_a_worker_that_never_looks_again_is_wedged() -> None:
    assert not watch([(0, IDLE), (WEDGED_AFTER, IDLE)])
    assert watch([(0, IDLE), (WEDGED_AFTER + 0.1, IDLE)])


def test_one_that_seldom_looks_has_more_time() -> None:
    seldom = IDLE | {"poll_s": 60.0}
    assert not watch([(0, seldom), (WEDGED_POLLS * 60, seldom)])
    assert watch([(0, seldom), (WEDGED_POLLS * 60 + 0.1, seldom)])


@pytest.mark.parametrize(
    "excuse",
    [{"inflight": 8}, {"paused": True}, {"phase": "draining"}, {"db_ok_age_ms": 61_000}],
    ids=["no free slot", "quiet", "draining", "the database is away"],
)
def test_who_has_a_reason_is_excused_for_as_long(excuse: dict[str, object]) -> None:
    assert not watch([(0, IDLE), (100, IDLE | excuse)])
    assert not watch([(0, IDLE), (100, IDLE | excuse), (150, IDLE)])
    assert watch([(0, IDLE), (100, IDLE | excuse), (161, IDLE)])


def test_a_process_that_does_not_count_its_looks_is_never_wedged() -> None:
    scheduler = {"phase": "running", "inflight": 0, "slots": 0}
    assert not watch([(0, scheduler), (1e6, scheduler)])


@given(
    st.lists(
        st.tuples(
            st.floats(0, 200),
            st.integers(0, 3),
            st.sampled_from([{}, {"inflight": 8}, {"paused": True}, {"db_ok_age_ms": 1e9}]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_nobody_is_wedged_who_looked_or_was_excused_within_the_limit(
    history: list[tuple[float, int, dict[str, object]]],
) -> None:
    claiming, now, polls, last = Claiming(), 0.0, 0, 0.0
    for gap, looks, excuse in history:
        now, polls = now + gap, polls + looks
        beat = IDLE | {"polls": polls} | excuse
        if looks or excuse or claiming.polls is None:
            last = now
        claiming = follow(claiming, beat, now, stale_after=STALE)
        assert is_wedged(claiming, beat, now) == (now - last > WEDGED_AFTER)


@given(st.dictionaries(st.sampled_from(sorted(IDLE)), st.none() | st.text() | st.integers() | st.floats()))
def test_no_beat_however_strange_breaks_the_rules(beat: dict[str, object]) -> None:
    claiming = follow(Claiming(), beat, 1.0, stale_after=STALE)
    is_wedged(claiming, beat, 100.0)
    is_cut_off(beat, STALE)


def test_stalls_together_blame_the_machine() -> None:
    assert stalled_together([10, 12], 2)
    assert stalled_together([10, 12, 14], 5)
    assert not stalled_together([10], 1), "one is never together"
    assert not stalled_together([10, 12], 4), "half of them is not most"
    assert not stalled_together([10, 20], 2), "one after the other"
    assert not stalled_together([], 3)


@given(st.lists(st.floats(0, 1000), max_size=12), st.integers(1, 12))
def test_stalls_together_by_its_definition(times: list[float], watched: int) -> None:
    expected = any(
        max(some) - min(some) <= TOGETHER
        for size in range(max(2, watched // 2 + 1), len(times) + 1)
        for some in itertools.combinations(times, size)
    )
    assert stalled_together(times, watched) == expected


def test_the_canary_speaks_once_a_silence_and_names_the_last_beat() -> None:
    said: list[str] = []
    canary = Canary(said.append)
    canary.heard(3)
    canary.start()
    try:
        wait_until(lambda: said, 15)
        canary.heard(4)
        wait_until(lambda: len(said) == 2, 15)
    finally:
        canary.stop()
    assert [split_words(text) for text in said] == [("", {3: True}), ("", {4: True})]


def test_a_word_that_follows_a_stack_proves_nothing() -> None:
    stack = "Current thread 0x1 (most recent call first):\n  File x\n"
    word = "[beat 9 is the last; other threads run]\n"
    assert split_words(word + stack) == (stack, {9: True})
    assert split_words(stack + word) == (stack, {9: False})
