"""Batches: jobs that are enqueued and waited for together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from uuid import UUID

from taskqd.client.enqueue import MAX_BATCH, EnqueueItem
from taskqd.client.handle import JobHandle
from taskqd.domain.errors import EmptyBatchError
from taskqd.domain.signals import Snooze
from taskqd.domain.status import ACTIVE, JobStatus

__all__ = ["MAX_BATCH", "BatchHandle", "BatchStatus", "EnqueueItem", "wait_for_batch"]

MIN_SNOOZE = 1.0


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


class BatchReader(Protocol):
    """What can count a batch: a ``TaskQ`` or ``ctx.jobs``."""

    async def batch_counts(self, batch_id: UUID) -> dict[str, int]:
        """Return how many jobs of the batch are in each status."""
        ...


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """An enqueued batch; ``job_handles`` are in the order of the items."""

    batch_id: UUID
    job_handles: list[JobHandle[Any]]
    reader: BatchReader

    @property
    def size(self) -> int:
        """How many items were enqueued, existing holders of keys included."""
        return len(self.job_handles)

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
) -> BatchStatus:
    """Return the batch's status once all its jobs have ended.

    Inside an actor pass ``ctx.jobs``: while jobs are in flight it raises ``Snooze(snooze_interval)``, so that the
    finalizer holds no slot while it waits. Elsewhere pass the ``TaskQ`` and ``snooze_via_exception=False``: it polls
    every ``snooze_interval`` seconds (at least 1) and raises ``TimeoutError`` after ``timeout`` seconds (None waits as
    long as it takes).

    Raises ``EmptyBatchError`` when none is in flight and the batch holds fewer than ``expect_at_least`` jobs, or none
    at all unless ``on_empty="ok"``. Do not give the finalizer the batch's own id: it would wait for itself.
    """
    if on_empty not in ("error", "ok"):
        raise ValueError(f"on_empty = {on_empty!r} must be 'error' or 'ok'")
    if timeout is not None and snooze_via_exception:
        raise ValueError("timeout bounds polling; it needs snooze_via_exception=False")
    pause = max(MIN_SNOOZE, snooze_interval)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        status = BatchStatus.from_counts(await jobs.batch_counts(batch_id))
        if status.pending == 0:
            if status.total < expect_at_least:
                raise EmptyBatchError(f"batch {batch_id} holds {status.total} jobs, {expect_at_least} were expected")
            if status.total == 0 and on_empty == "error":
                raise EmptyBatchError(f"batch {batch_id} holds no jobs")
            return status
        if snooze_via_exception:
            raise Snooze(pause)
        left = pause if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"batch {batch_id} still has {status.pending} jobs in flight after {timeout:g} s")
        await asyncio.sleep(min(pause, left))
