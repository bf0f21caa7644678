"""Every way from one status of a job to another. The SQL is tested against this table; docs/life.md is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from taskqd.domain.status import TERMINAL, JobStatus

_S = JobStatus
_WAITING = frozenset({_S.SCHEDULED, _S.PENDING})


class Attempt(StrEnum):
    """What a transition does to the number of attempts that the job has spent."""

    SPENT = "+ 1"
    KEPT = ""
    GIVEN_BACK = "- 1"


@dataclass(frozen=True, slots=True)
class Transition:
    """From any of ``sources`` to one of ``targets``, by ``event``.

    ``raises_epoch`` tells whether it fences off whoever held the job before; only the end that the attempt itself
    writes does not.
    """

    event: str
    sources: frozenset[JobStatus]
    targets: frozenset[JobStatus]
    attempt: Attempt
    raises_epoch: bool
    meaning: str


def _to(*targets: JobStatus) -> frozenset[JobStatus]:
    return frozenset(targets)


_RUNNING = _to(_S.RUNNING)

TRANSITIONS: tuple[Transition, ...] = (
    Transition("promote", _to(_S.SCHEDULED), _to(_S.PENDING), Attempt.KEPT, False, "it is due"),
    Transition("claim", _to(_S.PENDING), _RUNNING, Attempt.SPENT, True, "a worker takes it"),
    Transition(
        "succeed",
        _RUNNING,
        _to(_S.SUCCEEDED),
        Attempt.KEPT,
        False,
        "the actor returned, even if it was asked to stop meanwhile or its deadline has passed",
    ),
    Transition(
        "fail",
        _RUNNING,
        _to(_S.FAILED),
        Attempt.KEPT,
        False,
        "the actor raised, or outran start_to_close, and has no attempt left, may not retry, or would retry past the "
        "deadline",
    ),
    Transition("retry", _RUNNING, _WAITING, Attempt.KEPT, True, "the actor raised and may try again, on its curve"),
    Transition("snooze", _RUNNING, _WAITING, Attempt.GIVEN_BACK, True, "the actor put it off"),
    Transition(
        "interrupt",
        _RUNNING,
        _to(_S.PENDING),
        Attempt.KEPT,
        True,
        "its worker stops, or died while it stopped; this never ends a job",
    ),
    Transition(
        "hand back", _RUNNING, _to(_S.PENDING), Attempt.GIVEN_BACK, True, "claimed, and its handler never began"
    ),
    Transition(
        "crash", _RUNNING, _WAITING, Attempt.KEPT, True, "its worker died, or lost its lease; it waits on its curve"
    ),
    Transition(
        "crash out",
        _RUNNING,
        _to(_S.CRASHED, _S.FAILED),
        Attempt.KEPT,
        True,
        "the same, without an attempt left (crashed), or past the deadline (failed)",
    ),
    Transition(
        "expire",
        _WAITING,
        _to(_S.FAILED),
        Attempt.KEPT,
        True,
        "its deadline passed while it waited",
    ),
    Transition("cancel", _WAITING, _to(_S.CANCELLED), Attempt.KEPT, True, "somebody cancelled it"),
    Transition(
        "end cancelled",
        _RUNNING,
        _to(_S.CANCELLED),
        Attempt.KEPT,
        False,
        "somebody cancelled it while it ran, and the actor raised, or put it off, or was interrupted",
    ),
    Transition(
        "drop cancelled",
        _RUNNING,
        _to(_S.CANCELLED),
        Attempt.GIVEN_BACK,
        False,
        "somebody cancelled it after its claim and before its handler began",
    ),
    Transition(
        "reap cancelled", _RUNNING, _to(_S.CANCELLED), Attempt.KEPT, True, "it was cancelled, and its worker died"
    ),
    Transition(
        "abandon",
        _RUNNING,
        _to(_S.ABANDONED),
        Attempt.KEPT,
        False,
        "it was cancelled, and its actor outlasted every grace",
    ),
    Transition("run again", TERMINAL, _to(_S.PENDING), Attempt.KEPT, True, "somebody retries an ended job"),
)


def find(event: str) -> Transition:
    """Return the transition of this name. Raises ``KeyError``."""
    return _BY_EVENT[event]


_BY_EVENT = {transition.event: transition for transition in TRANSITIONS}
