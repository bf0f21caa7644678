"""Enqueue through a pool: what ``TaskQ`` and ``ctx.jobs`` have in common."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel

from taskqd.actors.actor import ActorRef
from taskqd.client.admission import refusal_error
from taskqd.client.batch import AbortBatchAfter, BatchHandle
from taskqd.client.copying import MAX_FAST, Copier
from taskqd.client.enqueue import MAX_BATCH, Connection, Enqueuer, Outcome, check_connection, transaction_on
from taskqd.client.handle import JobHandle
from taskqd.client.item import EnqueueItem, check_actor
from taskqd.client.opening import BatchOpener
from taskqd.client.reads import JobReader
from taskqd.client.rows import JobRow
from taskqd.client.wake import Wakes
from taskqd.domain.arguments import check_id, check_whole
from taskqd.domain.ids import new_uuid
from taskqd.storage.statements import load

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R")


class Jobs:
    """Enqueues and reads jobs of one schema through ``pool``, or on a connection of the caller."""

    def __init__(self, pool: Any, enqueuer: Enqueuer, wake: Wakes) -> None:
        self._pool = pool
        self._enqueuer = enqueuer
        self._wake = wake
        self._reader = JobReader(pool, enqueuer.schema)
        self._opener = BatchOpener(enqueuer)
        self._copier = Copier(enqueuer)
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
        identity_key: str | None = None,
        fairness_key: str | None = None,
        batch_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        connection: Connection | None = None,
    ) -> JobHandle[R]:
        """Enqueue one job and return its handle. Options as in :class:`EnqueueItem`.

        With ``connection`` (asyncpg) the insert is part of whatever transaction is open there and appears when that
        commits. Raises ``PayloadValidationError``, ``PayloadNotStorableError``, ``ValueError`` for a bad option,
        ``IdempotencyKeyActorMismatchError``, and where the actor limits its jobs ``SingletonCollisionError``,
        ``MaxPendingExceededError``, ``MaxPendingLockTimeoutError`` or ``UniqueForLockTimeoutError``; nothing is stored
        then.
        """
        check_actor("actor", actor)
        check_connection(connection)
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
            identity_key=identity_key,
            fairness_key=fairness_key,
            batch_id=batch_id,
            metadata=metadata,
            tags=tags,
        )
        carried = connection is None and self._wake.may_be_carried()
        outcome = await self._enqueuer.insert(self._pool if connection is None else connection, [item], wake=carried)
        for refusal in outcome.refused:
            raise refusal.error()
        if not carried:
            await self._woken(connection)
        (enqueued,) = outcome.in_order()
        return JobHandle(enqueued.job_id, actor, self._reader, was_existing=enqueued.was_existing)

    async def enqueue_batch(
        self,
        items: Sequence[EnqueueItem],
        *,
        batch_id: UUID | None = None,
        finalizer: EnqueueItem | None = None,
        failure_policy: AbortBatchAfter | None = None,
        connection: Connection | None = None,
    ) -> BatchHandle:
        """Enqueue 1 to 1,000 items in one transaction, all or none, and return the batch's handle.

        ``batch_id`` defaults to a new id. Inside an actor derive it from the job (``uuid.uuid5``), so that a retry
        names the same batch. ``finalizer`` is a job that runs once all jobs of the batch have ended, once, however
        often it is given; ``failure_policy`` is that of the call that opens the batch.

        Errors as for :meth:`enqueue`, ``ValueError`` for too many items, ``PayloadNotStorableError`` for payloads of
        more than 64 MiB together, and ``BatchAbortedError`` for more jobs of a batch that was aborted. Where actors
        have no room for their items, all others are enqueued before ``BatchMaxPendingExceededError`` is raised.
        """
        check_connection(connection)
        _check_items(items, MAX_BATCH, "a batch")
        batch = _batch_id(batch_id)
        self._opener.check(batch, finalizer, failure_policy)
        carried = connection is None and self._wake.may_be_carried()
        async with transaction_on(self._pool if connection is None else connection) as own:
            outcome, held = await self._insert_batch(own, items, batch, failure_policy, wake=carried)
            if finalizer is not None and held is None:
                held = await self._opener.finalize(own, batch, finalizer)
        if not carried:
            await self._woken(connection)
        enqueued = outcome.in_order()
        handles = [JobHandle(one.job_id, one.actor, self._reader, was_existing=one.was_existing) for one in enqueued]
        handle = BatchHandle(batch, handles, self._reader, len(handles), self._finalizer(finalizer, held))
        if outcome.refused:
            raise refusal_error(outcome.refused, handle)
        return handle

    async def enqueue_batch_streaming(
        self,
        items: Iterable[EnqueueItem] | AsyncIterable[EnqueueItem],
        *,
        batch_id: UUID | None = None,
        finalizer: EnqueueItem | None = None,
        failure_policy: AbortBatchAfter | None = None,
        connection: Connection | None = None,
        chunk_size: int = MAX_BATCH,
    ) -> BatchHandle:
        """Enqueue as many items as there are, in chunks of ``chunk_size`` (1 to 1,000), and return the batch's handle.

        Each chunk is a transaction of its own, unless ``connection`` is given. When one is refused, those before it
        stay, and a note at the error says how many items they were: give the items keys and the batch an id, and the
        whole can be tried again. The finalizer is enqueued after the last chunk. Errors as for :meth:`enqueue_batch`;
        the stream ends at the first chunk that raises one.
        """
        check_connection(connection)
        check_whole("chunk_size", chunk_size, 1, MAX_BATCH)
        if not isinstance(items, (Iterable, AsyncIterable)) or isinstance(items, (str, bytes)):
            raise TypeError(f"items = {items!r} must be an iterable of EnqueueItem, async or not")
        batch = _batch_id(batch_id)
        self._opener.check(batch, finalizer, failure_policy)
        source = self._pool if connection is None else connection
        size, held = 0, None
        async for chunk in _chunks(items, chunk_size):
            try:
                async with transaction_on(source) as own:
                    outcome, held = await self._insert_batch(own, chunk, batch, failure_policy)
                await self._woken(connection)
                if outcome.refused:
                    raise refusal_error(outcome.refused)
            except Exception as error:
                error.add_note(f"batch {batch}: the {size} items before these stay enqueued; indices count from there")
                raise
            size += len(chunk)
        if size == 0:
            raise ValueError("items held none; a batch takes at least one item")
        if finalizer is not None and held is None:
            async with transaction_on(source) as own:
                held = await self._opener.finalize(own, batch, finalizer)
            await self._woken(connection)
        return BatchHandle(batch, [], self._reader, size, self._finalizer(finalizer, held))

    async def enqueue_batch_fast(
        self, items: Sequence[EnqueueItem], *, batch_id: UUID | None = None, connection: Connection | None = None
    ) -> int:
        """Enqueue 1 to 50,000 items with one COPY, all or none, and return how many.

        Strict where :meth:`enqueue_batch` is lenient: a key that is there twice, or that a stored job holds, raises
        ``DuplicateIdempotencyKeyError`` (``IdempotencyKeyActorMismatchError`` for another actor's job), and items of
        an actor with ``unique_for`` take no ``identity_key``. Further errors as there; the payloads may be 256 MiB
        together. Where actors have no room for their items, all others are enqueued before
        ``BatchMaxPendingExceededError`` is raised.
        """
        check_connection(connection)
        _check_items(items, MAX_FAST, "a fast batch")
        batch = _batch_id(batch_id)
        async with transaction_on(self._pool if connection is None else connection) as own:
            count, refused = await self._copier.copy(own, items, batch)
            if count:
                await self._opener.open(own, batch, items[0], count, None)
        await self._woken(connection)
        if refused:
            raise refusal_error(refused)
        return count

    async def _insert_batch(
        self,
        connection: Connection,
        items: Sequence[EnqueueItem],
        batch: UUID,
        policy: AbortBatchAfter | None,
        *,
        wake: bool = False,
    ) -> tuple[Outcome, UUID | None]:
        """Insert items of a batch; return what became of them, and the finalizer that the batch has already."""
        outcome = await self._enqueuer.insert(connection, items, batch_id=batch, wake=wake)
        if not outcome.enqueued:
            return outcome, None
        return outcome, await self._opener.open(connection, batch, items[0], outcome.new, policy)

    def _finalizer(self, item: EnqueueItem | None, job_id: UUID | None) -> JobHandle[Any] | None:
        return None if item is None or job_id is None else JobHandle(job_id, item.actor_ref, self._reader)

    async def _woken(self, connection: Connection | None) -> None:
        if connection is None:
            self._wake.request()
        else:
            await connection.execute(self._sql.wake)

    async def batch_counts(self, batch_id: UUID, *, exclude_job_id: UUID | None = None) -> dict[str, int]:
        """Return how many jobs of a batch, but for ``exclude_job_id``, are in each status."""
        return await self._reader.batch_counts(batch_id, exclude_job_id=exclude_job_id)

    async def batch_state(self, batch_id: UUID) -> str | None:
        """Return whether a batch is ``active``, ``complete`` or ``aborted``; None when none of that id was opened."""
        return await self._reader.batch_state(batch_id)

    async def batch_jobs(self, batch_id: UUID, *, after: UUID | None = None, limit: int = 500) -> list[JobRow]:
        """Return a page of a batch's jobs in the order they were made, those after the job ``after``.

        ``limit`` is 1 to 1,000; a shorter page is the last. Raises ``ValueError``.
        """
        return await self._reader.batch_jobs(batch_id, after=after, limit=limit)


def _batch_id(batch_id: UUID | None) -> UUID:
    check_id("batch_id", batch_id, optional=True)
    return new_uuid() if batch_id is None else batch_id


def _check_items(items: Any, limit: int, what: str) -> None:
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise TypeError(f"items must be a list or a tuple of EnqueueItem, not {type(items).__name__}")
    if not 1 <= len(items) <= limit:
        raise ValueError(f"{what} takes 1 to {limit} items, not {len(items)}")


async def _chunks(
    items: Iterable[EnqueueItem] | AsyncIterable[EnqueueItem], size: int
) -> AsyncIterator[list[EnqueueItem]]:
    chunk: list[EnqueueItem] = []
    async for item in items if isinstance(items, AsyncIterable) else _awaited(items):
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _awaited(items: Iterable[EnqueueItem]) -> AsyncIterator[EnqueueItem]:
    for item in items:
        yield item
