"""What became of an attempt, as handed from a consumer to the completer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taskqd.domain.retry import RetryKind
from taskqd.worker.attempt import Attempt


@dataclass(slots=True)
class Succeeded:
    """The actor returned. ``result`` is JSON text; ``seconds`` is how long the handler ran; ``value`` is what it
    returned, kept for an actor that wants to be told of its success."""

    attempt: Attempt
    seconds: float
    result: str | None
    value: Any = None


@dataclass(slots=True)
class Failed:
    """The attempt failed; the database decides whether the job has another.

    ``retry_kind`` None is the row's own; ``"non_retryable"`` ends the job. ``delay`` None waits on the row's retry
    curve. ``exhausted_class`` replaces the error class of a job that has no attempt left. ``error`` is what was raised,
    kept for an actor that wants to be told of its last failure.
    """

    attempt: Attempt
    seconds: float
    error_class: str
    message: str
    traceback: str | None
    retry_kind: RetryKind | None = None
    delay: float | None = None
    exhausted_class: str | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class CommitLost(Failed):
    """The answer to the commit that settled the attempt was lost: it succeeded if its row says so, else it failed."""


@dataclass(slots=True)
class Snoozed:
    """The actor put its job off by ``delay`` seconds; the attempt is given back."""

    attempt: Attempt
    seconds: float
    delay: float


@dataclass(slots=True)
class Released:
    """The attempt goes back to the fleet; ``seconds`` is None when its handler never began."""

    attempt: Attempt
    seconds: float | None
    cause: str


@dataclass(slots=True)
class Abandoned:
    """The job was cancelled and its handler has outlasted both graces; it may still run, and nobody waits for it."""

    attempt: Attempt
    seconds: float


Outcome = Succeeded | Failed | Snoozed | Released | Abandoned


class Overran(Exception):
    """The actor ran for longer than its start_to_close, of ``limit`` seconds, and was cancelled."""

    def __init__(self, limit: float) -> None:
        super().__init__("start_to_close")
        self.limit = limit


SHUTDOWN = "worker_shutdown"
"""Cause of a release by a worker that stops."""
UNSTARTED = "unstarted"
"""Cause of a release of rows that waited in the local queue for too long."""
CANCELLED = "cancelled"
"""Cause of a release of a row whose job was cancelled before its handler began."""
ISOLATED = "heartbeat_lost"
"""Cause of a release by a worker that cannot renew its leases."""
