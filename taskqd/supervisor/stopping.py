"""One budget for the whole stop, given out top-down as absolute times. Pure."""

from __future__ import annotations

from dataclasses import dataclass

SLACK = 3.0
"""Seconds of the platform's grace that are left alone: its clock started before ours."""

RESERVE = 2.0
"""Seconds that the supervisor keeps for itself after its children had theirs."""

LEAST_GRACE = 10.0
"""The shortest platform grace, in seconds, that leaves a child any time."""

CLOSING = 2.0
"""Seconds that the supervisor takes at most, its processes gone, for changes broken off and jobs to be released."""

TAIL = 3.0
"""Seconds that a child needs after its last job is released: closing what is open."""

_KILL_AFTER = 0.25
_REAP_WITHIN = 0.75


@dataclass(frozen=True, slots=True)
class Graces:
    """How long a child's jobs may finish (``cancellation``), then clean up (``cleanup``), in seconds."""

    cancellation: float
    cleanup: float


@dataclass(frozen=True, slots=True)
class Deadlines:
    """When a child cancels its jobs, releases them, must be gone, and is killed. Monotonic seconds."""

    cancel: float
    force: float
    gone: float
    kill: float


def child_time(grace: float) -> float:
    """Return how much of the platform's ``grace`` a child gets, in seconds."""
    return grace - SLACK - RESERVE


def scale(grace: float, wanted: Graces, *, fixed_cancellation: bool, fixed_cleanup: bool) -> Graces:
    """Return graces that fit the platform's ``grace``: what the operator fixed stays, the rest shrinks.

    Raises ``ValueError`` with the arithmetic when what was fixed does not fit.
    """
    room = child_time(grace)
    if wanted.cancellation + wanted.cleanup < room - TAIL:
        return wanted
    if fixed_cancellation and fixed_cleanup:
        parts = f"cancellation_grace_period {wanted.cancellation:g} + cleanup_grace_period {wanted.cleanup:g}"
        _need(parts, wanted.cancellation + wanted.cleanup, room, grace)
        return wanted
    if fixed_cancellation:
        _need(f"cancellation_grace_period {wanted.cancellation:g}", wanted.cancellation, room - TAIL, grace)
        return Graces(wanted.cancellation, min(wanted.cleanup, room - TAIL - wanted.cancellation))
    cleanup = wanted.cleanup if fixed_cleanup else min(wanted.cleanup, max(1.0, room / 5))
    _need(f"cleanup_grace_period {cleanup:g}", cleanup, room - TAIL, grace)
    return Graces(min(wanted.cancellation, room - TAIL - cleanup), cleanup)


def deadlines(now: float, grace: float, graces: Graces) -> Deadlines:
    """Return the times of a child that is asked to stop now, when the platform kills everything ``grace`` later."""
    gone = now + child_time(grace)
    cancel = min(now + graces.cancellation, gone)
    force = min(cancel + graces.cleanup, gone)
    return Deadlines(cancel=cancel, force=force, gone=gone, kill=gone + _KILL_AFTER)


def hurry(now: float, before: Deadlines, graces: Graces) -> Deadlines:
    """Return the times after a second request to stop: what still runs is cancelled now."""
    cancel = min(now, before.cancel)
    return Deadlines(
        cancel=cancel, force=min(cancel + graces.cleanup, before.force), gone=before.gone, kill=before.kill
    )


def last_moment(now: float, grace: float) -> float:
    """Return when the supervisor ends, whatever is left."""
    return now + child_time(grace) + _KILL_AFTER + _REAP_WITHIN


def _need(parts: str, used: float, room: float, grace: float) -> None:
    if used >= room:
        raise ValueError(
            f"{parts} = {used:g} s must be less than {max(room, 0):g} s, which is what termination_grace_period "
            f"{grace:g} s leaves after {SLACK + RESERVE:g} s for the supervisor and the time to close"
        )
