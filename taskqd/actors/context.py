"""What a running actor knows about its job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar
from uuid import UUID

from pydantic import BaseModel

from taskqd.actors.progress import Progress, Reported
from taskqd.domain.signals import CancelOrigin

if TYPE_CHECKING:
    import structlog

    from taskqd.actors.actor import ActorRef

P = TypeVar("P", bound=BaseModel)


class JobEnqueuer(Protocol):
    """What ``ctx.jobs`` offers: enqueue from inside an actor. Each call commits by itself, but in transactional actors:
    there all is committed with the job's success."""

    async def enqueue(
        self,
        actor: ActorRef[Any, Any],
        payload: BaseModel | Mapping[str, Any],
        *,
        queue: str | None = None,
        priority: int | None = None,
        scheduled_at: datetime | None = None,
        start_to_close: timedelta | None = None,
        schedule_to_close: timedelta | None = None,
        heartbeat_timeout: timedelta | None = None,
        idempotency_key: str | None = None,
        idempotency_scope: str = "",
        unique_while: Literal["stored", "active"] = "stored",
        identity_key: str | None = None,
        fairness_key: str | None = None,
        batch_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
    ) -> Any:
        """Enqueue one job; returns its handle."""
        ...

    async def enqueue_batch(
        self, items: Sequence[Any], *, batch_id: UUID | None = None, finalizer: Any = None, failure_policy: Any = None
    ) -> Any:
        """Enqueue up to 1,000 ``EnqueueItem`` in one transaction; returns the batch's handle.

        ``finalizer`` is an ``EnqueueItem`` that runs when all of them have ended, ``failure_policy`` an
        ``AbortBatchAfter``.
        """
        ...

    async def enqueue_batch_fast(self, items: Sequence[Any], *, batch_id: UUID | None = None) -> int:
        """Enqueue up to 50,000 ``EnqueueItem`` with one COPY; returns how many."""
        ...

    async def enqueue_batch_streaming(self, items: Any, *, batch_id: UUID | None = None, chunk_size: int = 1000) -> Any:
        """Enqueue what an iterable yields in chunks, each of which commits by itself; returns the batch's handle."""
        ...

    async def batch_counts(self, batch_id: UUID, *, exclude_job_id: UUID | None = None) -> dict[str, int]:
        """Return how many jobs of a batch, but for ``exclude_job_id``, are in each status."""
        ...

    async def batch_state(self, batch_id: UUID) -> str | None:
        """Return whether a batch is active, complete or aborted; None when none of that id was opened."""
        ...

    async def batch_jobs(self, batch_id: UUID, *, after: UUID | None = None, limit: int = 500) -> Sequence[Any]:
        """Return a page of a batch's jobs, those after the job ``after``; a short page is the last."""
        ...


class Cancellation:
    """The request to stop one attempt: set on the loop, readable from any thread."""

    __slots__ = ("_event", "origin")

    def __init__(self) -> None:
        self.origin: CancelOrigin | None = None
        self._event: asyncio.Event | None = None

    def request(self, origin: CancelOrigin) -> None:
        """Ask the attempt to stop. The first origin stays."""
        if self.origin is None:
            self.origin = origin
            if self._event is not None:
                self._event.set()

    @property
    def event(self) -> asyncio.Event:
        """The event behind ``ctx.cancel_event``, made when first asked for."""
        if self._event is None:
            self._event = asyncio.Event()
            if self.origin is not None:
                self._event.set()
        return self._event


class JobContext(Generic[P]):
    """One attempt of a job, handed to an actor that asks for it."""

    __slots__ = (
        "_cancellation",
        "_progress",
        "actor",
        "attempt",
        "batch_id",
        "fence_token",
        "job_id",
        "jobs",
        "log",
        "payload",
        "queue",
        "worker_id",
    )

    def __init__(
        self,
        *,
        job_id: UUID,
        actor: str,
        queue: str,
        attempt: int,
        fence_token: int,
        batch_id: UUID | None,
        worker_id: UUID,
        payload: P,
        jobs: JobEnqueuer,
        log: structlog.stdlib.BoundLogger,
        cancellation: Cancellation,
        progress: Callable[[], Progress],
    ) -> None:
        self.job_id = job_id
        """The job's id, the same over all attempts."""
        self.actor = actor
        """The actor's name."""
        self.queue = queue
        """The queue this attempt was claimed from."""
        self.attempt = attempt
        """1 for the first attempt. A snooze or a hand-back gives its number back, so numbers may repeat."""
        self.fence_token = fence_token
        """Rises with every claim of this job, never repeats: pass it to a store that can refuse older writers."""
        self.batch_id = batch_id
        """The batch the job belongs to, if any."""
        self.worker_id = worker_id
        """The worker that runs this attempt."""
        self.payload = payload
        """The decoded payload."""
        self.jobs = jobs
        """Enqueues further jobs. Each call commits at once, and a later failure of this job does not take them back,
        unless the actor is transactional."""
        self.log = log
        """A structlog logger bound to this job."""
        self._cancellation = cancellation
        self._progress = progress

    def progress(
        self,
        *,
        step: str | None = None,
        percent: float | None = None,
        detail: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> Reported:
        """Report how far the job has come; ``await`` it or not, and call it from a thread too.

        ``step``
            What it is doing now, up to 200 characters.
        ``percent``
            0 to 100.
        ``detail``
            More about it, up to 2,000 characters.
        ``data``
            A JSON object of your own: what the next attempt needs to go on from here.

        A field that is left out keeps what was last reported. It returns at once: the latest is stored every
        ``TASKQ_PROGRESS_COALESCE_INTERVAL`` (0.5 s) and before the attempt is settled. Raises ``ValueError`` for a
        field out of its range, ``PayloadNotStorableError`` for data that JSON or Postgres cannot hold, and
        ``ProgressTooLarge``; the progress stays as it was then.
        """
        self._progress().report(step, percent, detail, data)
        return Reported()

    @property
    def progress_state(self) -> Mapping[str, Any]:
        """What was last reported of this job, by an earlier attempt too: ``step``, ``percent``, ``detail``, ``data``.

        Empty in the first attempt of a job. An interrupted job goes on from here.
        """
        return self._progress().state

    @property
    def cancel_event(self) -> asyncio.Event:
        """Set when the attempt should stop. For ``async def`` actors; in a thread use :meth:`should_abort`."""
        return self._cancellation.event

    @property
    def cancel_origin(self) -> CancelOrigin | None:
        """Why the attempt should stop, such as SHUTDOWN (the job runs again elsewhere); None while it should not."""
        return self._cancellation.origin

    @property
    def cancellation_requested(self) -> bool:
        """True once somebody asked this attempt to stop."""
        return self._cancellation.origin is not None

    def should_abort(self) -> bool:
        """The same as ``cancellation_requested``; safe to call from any thread."""
        return self._cancellation.origin is not None

    def check_cancelled(self) -> None:
        """Raise ``asyncio.CancelledError`` when somebody asked this attempt to stop."""
        if self._cancellation.origin is not None:
            raise asyncio.CancelledError(f"cancelled by {self._cancellation.origin}")
