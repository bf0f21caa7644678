"""Batches: jobs that are enqueued and waited for together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Literal, Protocol
from uuid import UUID

from taskqd.client.handle import JobHandle
from taskqd.domain.arguments import check_flag, check_id, check_seconds, check_text, check_timeout, check_whole
from taskqd.domain.errors import BatchAbortedError, EmptyBatchError
from taskqd.domain.signals import MAX_DELAY, Snooze
from taskqd.domain.status import ACTIVE, JobStatus

MIN_SNOOZE = 1.0
MAX_LISTED = 500
_log = logging.getLogger("taskqd.client")


@dataclass(frozen=True, slots=True)
class AbortBatchAfter:
    """Abort a batch after as many failures in a row, from 1 on.

    A job that failed or crashed for good counts; one that succeeded begins anew. What waits is then cancelled, what
    runs may finish.
    """

    consecutive_failures: int

    def __post_init__(self) -> None:
        number = self.consecutive_failures
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**31:
            raise ValueError(f"consecutive_failures = {number!r} must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """How many jobs of a batch are where. ``pending`` counts all that have not ended."""

    total: int
    pending: int
    succeeded: int
    failed: int
    cancelled: int
    crashed: int
    abandoned: int

    @property
    def is_complete(self) -> bool:
        """True when the batch has jobs and all of them have ended."""
        return self.total > 0 and self.pending == 0

    @classmethod
    def from_counts(cls, counts: Mapping[str, int]) -> BatchStatus:
        """Return the status for counts by job status."""
        return cls(
            total=sum(counts.values()),
            pending=sum(counts.get(status, 0) for status in ACTIVE),
            succeeded=counts.get(JobStatus.SUCCEEDED, 0),
            failed=counts.get(JobStatus.FAILED, 0),
            cancelled=counts.get(JobStatus.CANCELLED, 0),
            crashed=counts.get(JobStatus.CRASHED, 0),
            abandoned=counts.get(JobStatus.ABANDONED, 0),
        )


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """A stored batch. Its counters follow the ends of its jobs.

    ``status`` is ``active``, ``complete`` or ``aborted``; an aborted batch has a ``completed_at`` once none of its jobs
    is in flight. ``total`` is how many jobs it held when they were last counted: at its opening and its end, and by the
    scheduler once a minute in between.
    """

    id: UUID
    status: Literal["active", "complete", "aborted"]
    queue: str | None
    total: int
    succeeded: int
    failed: int
    cancelled: int
    crashed: int
    abandoned: int
    consecutive_failures: int
    failure_threshold: int | None
    finalizer_job_id: UUID | None
    created_at: datetime
    completed_at: datetime | None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> BatchSummary:
        """Return the summary of a record of the statement ``batches``."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFilter:
    """Which batches to list: of a ``queue`` (that of their first job), ``active`` or not, or the one ``batch_id``.

    None (default) takes all. ``limit`` is 1 to 500 of the newest.
    """

    queue: str | None = None
    active: bool | None = None
    batch_id: UUID | None = None
    limit: int = 100

    def __post_init__(self) -> None:
        check_text("queue", self.queue, optional=True)
        if self.active is not None:
            check_flag("active", self.active)
        check_id("batch_id", self.batch_id, optional=True)
        check_whole("limit", self.limit, 1, MAX_LISTED)


class BatchReader(Protocol):
    """What can count a batch: a ``TaskQ`` or ``ctx.jobs``."""

    async def batch_counts(self, batch_id: UUID, *, exclude_job_id: UUID | None = None) -> dict[str, int]:
        """Return how many jobs of the batch are in each status."""
        ...

    async def batch_state(self, batch_id: UUID) -> str | None:
        """Return whether the batch is active, complete or aborted, None when none of that id was opened."""
        ...


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """An enqueued batch of ``size`` items, existing jobs included.

    ``job_handles`` are in the order of the items; a streamed batch has none, see ``batch_jobs``. ``finalizer`` is the
    handle of the job that runs when the batch has ended, None when it has none.
    """

    batch_id: UUID
    job_handles: list[JobHandle[Any]]
    reader: BatchReader
    size: int
    finalizer: JobHandle[Any] | None = None

    async def status(self) -> BatchStatus:
        """Return how many jobs of the batch are where now."""
        return BatchStatus.from_counts(await self.reader.batch_counts(self.batch_id))


async def wait_for_batch(
    jobs: BatchReader,
    batch_id: UUID,
    *,
    snooze_interval: float = 10.0,
    snooze_via_exception: bool = True,
    timeout: float | None = None,
    expect_at_least: int = 0,
    on_empty: Literal["error", "ok"] = "error",
    exclude_job_id: UUID | None = None,
) -> BatchStatus:
    """Return the batch's status once all its jobs have ended.

    Inside an actor pass ``ctx.jobs``: while jobs are in flight it raises ``Snooze(snooze_interval)``, so that the
    finalizer holds no slot while it waits. Elsewhere pass the ``TaskQ`` and ``snooze_via_exception=False``: it polls
    every ``snooze_interval`` seconds (at least 1) and raises ``TimeoutError`` after ``timeout`` seconds (None waits as
    long as it takes). ``exclude_job_id`` is not counted: the job itself, where that is one of the batch.

    | None in flight, and | |
    |---|---|
    | the batch was aborted | raises ``BatchAbortedError`` |
    | it holds fewer jobs than ``expect_at_least`` | raises ``EmptyBatchError`` |
    | it holds none, but was opened | returns the empty status |
    | it holds none, and was never opened | ``EmptyBatchError``, or the empty status with ``on_empty="ok"`` |
    """
    check_id("batch_id", batch_id)
    check_id("exclude_job_id", exclude_job_id, optional=True)
    check_seconds("snooze_interval", snooze_interval, 0, MAX_DELAY.total_seconds())
    check_flag("snooze_via_exception", snooze_via_exception)
    check_timeout(timeout)
    check_whole("expect_at_least", expect_at_least, 0, 2**31 - 1)
    if on_empty not in ("error", "ok"):
        raise ValueError(f"on_empty = {on_empty!r} must be 'error' or 'ok'")
    if timeout is not None and snooze_via_exception:
        raise ValueError("timeout bounds polling; it needs snooze_via_exception=False")
    pause = max(MIN_SNOOZE, snooze_interval)
    if pause != snooze_interval:
        _log.warning("snooze-interval-clamped: %g s asked, %g s used", snooze_interval, pause)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        status = BatchStatus.from_counts(await jobs.batch_counts(batch_id, exclude_job_id=exclude_job_id))
        if status.pending == 0:
            state = await jobs.batch_state(batch_id)
            if state == "aborted":
                raise BatchAbortedError(batch_id)
            if status.total < expect_at_least:
                raise EmptyBatchError(f"batch {batch_id} holds {status.total} jobs, {expect_at_least} were expected")
            if status.total == 0 and state is None and on_empty == "error":
                raise EmptyBatchError(f"batch {batch_id} holds no jobs")
            return status
        if snooze_via_exception:
            raise Snooze(pause)
        left = pause if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"batch {batch_id} still has {status.pending} jobs in flight after {timeout:g} s")
        await asyncio.sleep(min(pause, left))
