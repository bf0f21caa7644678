"""Opens batches, and gives them the job that runs when they have ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID

from taskqd.client.batch import AbortBatchAfter
from taskqd.client.enqueue import Connection, Enqueuer
from taskqd.client.item import EnqueueItem
from taskqd.domain.errors import BatchAbortedError
from taskqd.storage.statements import load

HELD = datetime(9999, 12, 31, tzinfo=UTC)
"""When a job is due that is held: the end of its batch makes it due at once."""


class _Second(Exception):
    """Somebody else gave the batch its finalizer first."""

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id


class BatchOpener:
    """Writes what is stored of a batch itself, in the transaction that enqueues its jobs."""

    def __init__(self, enqueuer: Enqueuer) -> None:
        self._enqueuer = enqueuer
        self._sql = load("client", enqueuer.schema)

    def check(self, batch: UUID, finalizer: EnqueueItem | None, policy: AbortBatchAfter | None) -> None:
        """Refuse what is wrong with a batch's options before any of its jobs is enqueued."""
        if policy is not None and not isinstance(policy, AbortBatchAfter):
            raise TypeError(f"failure_policy = {policy!r} must be AbortBatchAfter(consecutive_failures=N)")
        if finalizer is None:
            return
        if not isinstance(finalizer, EnqueueItem):
            raise TypeError(f"finalizer = {finalizer!r} must be an EnqueueItem")
        if finalizer.scheduled_at is not None:
            raise ValueError("a finalizer is due when its batch has ended; leave out scheduled_at")
        if finalizer.batch_id == batch:
            raise ValueError("a finalizer in its own batch would wait for itself; leave out batch_id")
        self._enqueuer.rows.row(finalizer, None)

    async def open(
        self, connection: Connection, batch: UUID, first: EnqueueItem, new: int, policy: AbortBatchAfter | None
    ) -> UUID | None:
        """Record a batch to which ``new`` jobs were just added; return the finalizer it has already.

        Raises ``BatchAbortedError`` when it was aborted; ``policy`` is that of the first call.
        """
        record = await connection.fetchrow(
            self._sql.open_batch,
            batch,
            first.actor_ref.queue if first.queue is None else first.queue,
            new,
            None if policy is None else policy.consecutive_failures,
        )
        if record["status"] == "aborted" and new:
            raise BatchAbortedError(batch)
        finalizer: UUID | None = record["finalizer_job_id"]
        return finalizer

    async def finalize(self, connection: Connection, batch: UUID, finalizer: EnqueueItem) -> UUID:
        """Enqueue the finalizer, held until the batch has ended, and return its id; once, whoever else does too."""
        try:
            async with connection.transaction():
                outcome = await self._enqueuer.insert(connection, [replace(finalizer, scheduled_at=HELD)])
                for refusal in outcome.refused:
                    raise refusal.error()
                job = outcome.enqueued[0].job_id
                attached = await connection.fetchval(self._sql.attach_finalizer, batch, job)
                if attached != job:
                    raise _Second(attached)
        except _Second as second:
            return second.job_id
        await connection.execute(self._sql.close_batch, batch)
        return job
