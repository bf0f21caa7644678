"""Enqueue through a pool: what ``TaskQ`` and ``ctx.jobs`` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel

from taskqd.actors.actor import ActorRef
from taskqd.client.batch import MAX_BATCH, BatchHandle
from taskqd.client.enqueue import Connection, EnqueueItem, Enqueuer, check_batch_id
from taskqd.client.handle import JobHandle
from taskqd.client.reads import JobReader
from taskqd.client.rows import JobRow
from taskqd.client.wake import WakeSender
from taskqd.domain.ids import new_uuid
from taskqd.storage.statements import load

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R")


class Jobs:
    """Enqueues and reads jobs of one schema through ``pool``, or on a connection of the caller."""

    def __init__(self, pool: Any, enqueuer: Enqueuer, wake: WakeSender) -> None:
        self._pool = pool
        self._enqueuer = enqueuer
        self._wake = wake
        self._reader = JobReader(pool, enqueuer.schema)
        self._sql = load("client", enqueuer.schema)

    async def enqueue(
        self,
        actor: ActorRef[P, R],
        payload: P | Mapping[str, Any],
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
        batch_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        connection: Connection | None = None,
    ) -> JobHandle[R]:
        """Enqueue one job and return its handle. Options as in :class:`EnqueueItem`.

        With ``connection`` (asyncpg) the insert is part of whatever transaction is open there and appears when that
        commits. Raises ``PayloadValidationError``, ``PayloadNotStorableError``, ``ValueError`` for a bad option, and
        ``IdempotencyKeyActorMismatchError``; nothing is stored then.
        """
        item = EnqueueItem(
            actor_ref=actor,
            payload=payload,
            queue=queue,
            priority=priority,
            scheduled_at=scheduled_at,
            start_to_close=start_to_close,
            schedule_to_close=schedule_to_close,
            heartbeat_timeout=heartbeat_timeout,
            idempotency_key=idempotency_key,
            idempotency_scope=idempotency_scope,
            unique_while=unique_while,
            batch_id=batch_id,
            metadata=metadata,
            tags=tags,
        )
        if connection is None:
            (enqueued,) = await self._enqueuer.insert(self._pool, [item])
            self._wake.request()
        else:
            (enqueued,) = await self._enqueuer.insert(connection, [item])
            await connection.execute(self._sql.wake)
        return JobHandle(enqueued.job_id, actor, self._reader, was_existing=enqueued.was_existing)

    async def enqueue_batch(
        self,
        items: Sequence[EnqueueItem],
        *,
        batch_id: UUID | None = None,
        connection: Connection | None = None,
    ) -> BatchHandle:
        """Enqueue 1 to 1,000 items in one transaction, all or none, and return the batch's handle.

        ``batch_id`` defaults to a new id. Inside an actor derive it from the job (``uuid.uuid5``), so that a retry
        names the same batch. Errors as for :meth:`enqueue`, ``ValueError`` for too many items, and
        ``PayloadNotStorableError`` for payloads of more than 64 MiB together.
        """
        if not isinstance(items, Sequence):
            raise TypeError(f"items must be a list or a tuple of EnqueueItem, not {type(items).__name__}")
        check_batch_id(batch_id)
        if not 1 <= len(items) <= MAX_BATCH:
            raise ValueError(f"a batch takes 1 to {MAX_BATCH} items, not {len(items)}")
        batch = batch_id if batch_id is not None else new_uuid()
        if connection is None:
            async with self._pool.acquire() as own, own.transaction():
                enqueued = await self._insert_batch(own, items, batch)
            self._wake.request()
        else:
            async with connection.transaction():
                enqueued = await self._insert_batch(connection, items, batch)
            await connection.execute(self._sql.wake)
        handles = [JobHandle(one.job_id, one.actor, self._reader, was_existing=one.was_existing) for one in enqueued]
        return BatchHandle(batch, handles, self._reader)

    async def _insert_batch(self, connection: Connection, items: Sequence[EnqueueItem], batch: UUID) -> list[Any]:
        enqueued = await self._enqueuer.insert(connection, items, batch_id=batch)
        await connection.execute(self._sql.open_batch, batch)
        return enqueued

    async def batch_counts(self, batch_id: UUID) -> dict[str, int]:
        """Return how many jobs of a batch are in each status."""
        return await self._reader.batch_counts(batch_id)

    async def batch_jobs(self, batch_id: UUID, *, after: UUID | None = None, limit: int = 500) -> list[JobRow]:
        """Return a page of a batch's jobs in the order they were made, those after the job ``after``.

        ``limit`` is 1 to 1,000; a shorter page is the last. Raises ``ValueError``.
        """
        return await self._reader.batch_jobs(batch_id, after=after, limit=limit)
