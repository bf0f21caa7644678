"""One claimed job in this process, and the set of them that must not lose their leases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any
from uuid import UUID

from taskqd.actors.actor import ActorRef
from taskqd.actors.context import Cancellation
from taskqd.actors.progress import Progress


class Attempt:
    """One attempt at one job, from its claim to its settlement. (``job_id``, ``epoch``) is its identity."""

    __slots__ = (
        "batch_id",
        "cancellation",
        "claimed_at",
        "climb",
        "disowned",
        "ended_at",
        "epoch",
        "forced",
        "gated",
        "given_up",
        "job_id",
        "lane",
        "number",
        "payload",
        "progress",
        "progress_seq",
        "progress_stored",
        "queue",
        "ref",
        "scheduled_at",
        "start_to_close",
        "started_at",
    )

    def __init__(
        self,
        job_id: UUID,
        epoch: int,
        ref: ActorRef[Any, Any],
        payload: str,
        number: int,
        queue: str,
        scheduled_at: datetime,
        batch_id: UUID | None,
        start_to_close: float | None,
        progress_stored: str | None,
        progress_seq: int,
    ) -> None:
        self.job_id = job_id
        self.epoch = epoch
        self.ref = ref
        self.payload = payload
        self.number = number
        self.queue = queue
        self.scheduled_at = scheduled_at
        self.batch_id = batch_id
        self.start_to_close = start_to_close
        self.progress_stored = progress_stored
        self.progress_seq = progress_seq
        self.lane = ""
        """Where it was claimed; an identity's lane is free again once it is settled."""
        self.gated = False
        """True when it was claimed through a limit, which its settlement gives back."""
        self.progress: Progress | None = None
        """What its actor reports; None until it, or the actor, asks."""
        self.claimed_at = time.monotonic()
        self.started_at: float | None = None
        """When its handler began, by the monotonic clock; None until then."""
        self.cancellation = Cancellation()
        self.forced = False
        """True once its task was cancelled by us."""
        self.ended_at: float | None = None
        """When its handler ended, where its own transaction then settles it, which nothing may cut short."""
        self.climb: asyncio.Task[None] | None = None
        """What takes it up the ladder of a cancelled job, once its job is."""
        self.given_up = False
        """True once it was settled though its handler had not ended."""
        self.disowned = False
        """True once its outcome no longer counts: its lease is lost, or it was handed back."""


class Leases:
    """The attempts whose leases the heartbeat thread renews: claimed, running, and not yet settled."""

    def __init__(self) -> None:
        self._held: set[Attempt] = set()
        self.on_first: Callable[[], None] | None = None
        """Called when one is held and none was."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, attempt: Attempt) -> None:
        """Renew this attempt's lease from the next beat on."""
        self._held.add(attempt)
        if len(self._held) == 1 and self.on_first is not None:
            self.on_first()

    def discard(self, attempt: Attempt) -> None:
        """Renew it no longer."""
        self._held.discard(attempt)

    def snapshot(self) -> tuple[Attempt, ...]:
        """The attempts as of now, for another thread."""
        # Copying a set runs no Python code and allocates nothing that could start a collection half-way, so the
        # interpreter lock makes it atomic; iterating does not promise that.
        return tuple(self._held.copy())
