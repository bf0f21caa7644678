"""The restart rule: by consecutive unstable runs, not by rate.

A rate limit and a growing backoff fight each other: the backoff keeps the rate under every usual limit, and a
broken process is started again and again for ever. A count of consecutive unstable runs cannot be outrun.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.exits import Exit, ExitClass, group_code

BOOT_FAILURES = 3
"""Unstable runs in a row after which a process that never came up ends the whole group."""

DEGRADED_AFTER = 5
"""Unstable runs in a row after which a process that had come up counts as degraded; it is tried on."""

_DOUBLINGS = 16
"""No delay needs more; a larger exponent would overflow before it is cut to the maximum."""


@dataclass(frozen=True, slots=True)
class RestartRule:
    """The delays, in seconds. ``burst_limit`` restarts within ``burst_window`` give a process up; 0 is no limit."""

    backoff_initial: float = 0.5
    backoff_max: float = 30.0
    stable_after: float = 10.0
    burst_limit: int = 10
    burst_window: float = 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after ``delay`` seconds. ``unstable`` is the new count of unstable runs in a row."""

    delay: float
    unstable: int
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start again. ``group`` is what the whole group ends with, or None when the others go on."""

    why: str
    unstable: int
    group: ExitCode | None = None


def judge(
    rule: RestartRule,
    end: Exit,
    *,
    ready_for: float | None,
    unstable: int,
    came_up: bool,
    recent: int,
    jitter: float,
) -> Restart | GiveUp:
    """Say what follows after a process ended that nobody had asked to stop.

    ``ready_for``: seconds that it was ready, or None. ``unstable``: unstable runs in a row before this one.
    ``came_up``: a process of its kind was ready once under this supervisor. ``recent``: its restarts within
    the burst window. ``jitter``: a factor around 1, so that processes that died together do not return
    together.
    """
    if end.kind is ExitClass.PERMANENT:
        return GiveUp(end.why, unstable + 1, None if came_up else group_code(end))
    if ready_for is not None and end.kind is ExitClass.RECYCLE:
        verdict: Restart | GiveUp = Restart(0.0, unstable)
    elif ready_for is not None and ready_for >= rule.stable_after:
        verdict = Restart(0.0, 0)
    else:
        verdict = _unstable(rule, end, unstable + 1, came_up, jitter)
    if isinstance(verdict, Restart) and 0 < rule.burst_limit <= recent:
        return GiveUp(f"{recent} restarts within {rule.burst_window:g} s", verdict.unstable)
    return verdict


def _unstable(rule: RestartRule, end: Exit, count: int, came_up: bool, jitter: float) -> Restart | GiveUp:
    if not came_up and count >= BOOT_FAILURES:
        return GiveUp(f"never came up in {count} attempts; the last: {end.why}", count, group_code(end))
    delay = min(rule.backoff_max, rule.backoff_initial * 2 ** min(count - 1, _DOUBLINGS)) * jitter
    # A database that is away makes every run unstable; that says nothing about the process.
    degraded = count >= DEGRADED_AFTER and end.kind is not ExitClass.ENVIRONMENT
    return Restart(delay, count, degraded)
