"""What a process that does not get on suffers from, and what follows. Pure.

=============  =========================================================  =========================================
verdict        how it is told                                             what follows
=============  =========================================================  =========================================
stopped        the kernel says so (SIGSTOP, a debugger)                   shown; killed like a hung one, in its time
blocked        no beats, other threads of it run                          stack, then killed
gil-held       no beats, no thread of it runs                             stack, then killed
silent         no beats, and it cannot say more                           stack, then killed
wedged         beats, free slots, a database that answers, no claims      drained and replaced: its jobs are healthy
environment    beats, but the database does not answer it                 nothing: a restart brings no database back
=============  =========================================================  =========================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SETTLED_AFTER = 1.0
"""Seconds that a silence must have lasted beyond its limit for a verdict."""

WEDGED_AFTER = 60.0
"""Seconds for which a worker may not look for work at the least, before it counts as wedged."""

WEDGED_POLLS = 10
"""Poll intervals for which it may not, where they are longer."""

TOGETHER = 5.0
"""Seconds within which stalls count as one."""


class Verdict(StrEnum):
    """What is wrong with a process."""

    STOPPED = "stopped"
    BLOCKED = "blocked"
    GIL_HELD = "gil-held"
    SILENT = "silent"
    WEDGED = "wedged"
    ENVIRONMENT = "environment"


MEANING = {
    Verdict.STOPPED: "it is stopped by a signal",
    Verdict.BLOCKED: "its event loop is blocked, other threads run",
    Verdict.GIL_HELD: "no thread of it runs: the interpreter lock is held, or it gets no processor",
    Verdict.SILENT: "its event loop does not run",
    Verdict.WEDGED: "it has free slots and a database, and looks for no work",
    Verdict.ENVIRONMENT: "the database does not answer it",
}


def judge_silence(*, stopped: bool, canary: bool, word: bool) -> Verdict:
    """Say why a process sends no beats. ``canary``: a thread of it speaks up in a silence; ``word``: it did."""
    if stopped:
        return Verdict.STOPPED
    if not canary:
        return Verdict.SILENT
    return Verdict.BLOCKED if word else Verdict.GIL_HELD


@dataclass(frozen=True, slots=True)
class Claiming:
    """How often a worker has looked for work, and since when that number stands."""

    polls: int | None = None
    since: float = 0.0


def follow(before: Claiming, beat: Mapping[str, Any], now: float, *, stale_after: float) -> Claiming:
    """Return what ``beat`` says about claiming. Whoever has a reason not to claim is excused for as long."""
    polls = beat.get("polls")
    if not isinstance(polls, int) or polls != before.polls or _excused(beat, stale_after):
        return Claiming(polls if isinstance(polls, int) else None, now)
    return before


def is_wedged(claiming: Claiming, beat: Mapping[str, Any], now: float) -> bool:
    """True when a worker has not looked for work for longer than it ever should."""
    poll = beat.get("poll_s")
    limit = max(WEDGED_AFTER, WEDGED_POLLS * poll) if isinstance(poll, int | float) else WEDGED_AFTER
    return claiming.polls is not None and now - claiming.since > limit


def is_cut_off(beat: Mapping[str, Any], stale_after: float) -> bool:
    """True when the database has not answered the process for longer than it may take."""
    age = beat.get("db_ok_age_ms")
    return isinstance(age, int | float) and age / 1000 > stale_after


def stalled_together(since: Iterable[float], watched: int) -> bool:
    """True when more than half of the ``watched`` processes, and at least two, went silent at one time.

    Then the machine is to blame and not they. ``since``: when each silent process went silent.
    """
    times = sorted(since)
    most = max((sum(first <= at <= first + TOGETHER for at in times) for first in times), default=0)
    return most >= 2 and most * 2 > watched


def _excused(beat: Mapping[str, Any], stale_after: float) -> bool:
    inflight, slots = beat.get("inflight"), beat.get("slots")
    full = isinstance(inflight, int) and isinstance(slots, int) and inflight >= slots
    return beat.get("phase") != "running" or bool(beat.get("paused")) or full or is_cut_off(beat, stale_after)
