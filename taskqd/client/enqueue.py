"""Turns items into rows: validation first, then one statement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias
from uuid import UUID

from pydantic import BaseModel

from taskqd.actors.actor import ActorRef
from taskqd.actors.faithful import encode_object
from taskqd.actors.options import limit_problem, priority_problem, queue_problem
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.errors import IdempotencyKeyActorMismatchError, PayloadNotStorableError, SubEnqueueError
from taskqd.domain.ids import new_uuid
from taskqd.storage.statements import load

MAX_BATCH = 1000
MAX_BATCH_SIZE = 64 * 1024 * 1024
"""Characters of JSON that the payloads of one batch may have together: what one statement should carry."""
TAG = re.compile(r"\w(?:[\w\-]*\w)?")
MAX_TAGS, MAX_TAG = 50, 100
MAX_METADATA = 65_536
_PAYLOAD = 3
"""Where a row of ours holds the payload."""
KEY_RACES = 3
"""How often a key may be freed between our insert and our look at its holder before we give up."""

Connection: TypeAlias = Any
"""An asyncpg connection, pooled or not: the pool's proxy shares no base class with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnqueueItem:
    """One job to enqueue.

    ``actor_ref``, ``payload``
        The actor, and its payload: the model or a mapping that fits it.
    ``queue``, ``priority``, ``start_to_close``
        Override the actor's own; None (default) keeps them.
    ``schedule_to_close``
        How long after its enqueue the job may still begin an attempt; past that it fails with ``DeadlineExceeded``. It
        never ends an attempt that runs. None (default) is the ``time_budget`` of the actor's policy.
    ``heartbeat_timeout``
        Longest silence of the worker that runs it, where its lease is too long to wait for: between two
        ``TASKQ_HEARTBEAT_INTERVAL`` and ``TASKQ_LOCK_LEASE`` as this process knows them. None (default) waits for the
        lease.
    ``scheduled_at``
        Earliest start, timezone-aware; None (default) is now, by the database's clock.
    ``idempotency_key``, ``idempotency_scope``
        While a job with this key and scope exists, whatever its status, enqueue answers with that job instead.
    ``unique_while``
        ``"stored"`` (default) holds the key until retention deletes the job, ``"active"`` until it ends.
    ``batch_id``
        The batch the job counts in; default the batch's own when enqueued by ``enqueue_batch``.
    ``metadata``, ``tags``
        Free JSON up to 64 KiB, and up to 50 words, for people and filters.
    """

    actor_ref: ActorRef[Any, Any]
    payload: BaseModel | Mapping[str, Any]
    queue: str | None = None
    priority: int | None = None
    scheduled_at: datetime | None = None
    start_to_close: timedelta | None = None
    schedule_to_close: timedelta | None = None
    heartbeat_timeout: timedelta | None = None
    idempotency_key: str | None = None
    idempotency_scope: str = ""
    unique_while: Literal["stored", "active"] = "stored"
    batch_id: UUID | None = None
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of one item: a new job, or the existing holder of its idempotency key."""

    job_id: UUID
    actor: ActorRef[Any, Any]
    was_existing: bool


class Enqueuer:
    """Validates and inserts jobs of one schema on whatever connection it is given.

    ``key_max_bytes`` bounds idempotency key and scope each (``TASKQ_IDEMPOTENCY_KEY_MAX_BYTES``); ``max_backoff``
    bounds the retry cap stamped on jobs (``TASKQ_MAX_RETRY_BACKOFF``), in seconds; ``heartbeat_window`` are the
    seconds, from and below, that a ``heartbeat_timeout`` may be.
    """

    def __init__(
        self, schema: str, *, key_max_bytes: int, max_backoff: float, heartbeat_window: tuple[float, float]
    ) -> None:
        self.schema = schema
        self._key_max_bytes = key_max_bytes
        self._max_backoff = max_backoff
        self._heartbeat_window = heartbeat_window
        self._sql = load("client", schema)

    async def insert(
        self, connection: Connection, items: Sequence[EnqueueItem], *, batch_id: UUID | None = None
    ) -> list[Enqueued]:
        """Insert ``items`` in order and return one :class:`Enqueued` each.

        Nothing is inserted when any item is invalid. A key held by another actor's job raises
        ``IdempotencyKeyActorMismatchError``; run inside a transaction to take back what was inserted before it. Raises
        ``SchemaNotMigratedError`` where the schema holds no tables of ours.
        """
        rows = [self._row(item, batch_id) for item in items]
        size = sum(len(row[_PAYLOAD]) for row in rows)
        if len(rows) > 1 and size > MAX_BATCH_SIZE:
            raise PayloadNotStorableError(
                f"the payloads of the batch are {size} characters, the limit is {MAX_BATCH_SIZE}; enqueue it in parts"
            )
        with explain_unmigrated(self.schema):
            return await self._insert(connection, items, rows)

    async def _insert(
        self, connection: Connection, items: Sequence[EnqueueItem], rows: list[tuple[Any, ...]]
    ) -> list[Enqueued]:
        answers: dict[int, Enqueued] = {}
        todo = list(range(len(items)))
        for _ in range(KEY_RACES):
            columns = list(zip(*(rows[index] for index in todo), strict=True))
            inserted = {record["id"] for record in await connection.fetch(self._sql.enqueue, *columns)}
            taken: list[int] = []
            for index in todo:
                if rows[index][0] in inserted:
                    answers[index] = Enqueued(rows[index][0], items[index].actor_ref, was_existing=False)
                else:
                    taken.append(index)
            if not taken:
                break
            scopes = [items[index].idempotency_scope for index in taken]
            keys = [items[index].idempotency_key for index in taken]
            for record in await connection.fetch(self._sql.key_holders, scopes, keys):
                index = taken[record["ord"] - 1]
                item = items[index]
                if record["actor"] != item.actor_ref.name:
                    raise IdempotencyKeyActorMismatchError(
                        str(item.idempotency_key),
                        item.idempotency_scope,
                        item.actor_ref.name,
                        record["actor"],
                    )
                answers[index] = Enqueued(record["id"], item.actor_ref, was_existing=True)
            todo = [index for index in taken if index not in answers]
            if not todo:
                break
        else:
            raise SubEnqueueError(
                f"idempotency key {items[todo[0]].idempotency_key!r} is freed and taken faster than it can be read"
            )
        return [answers[index] for index in range(len(items))]

    def _row(self, item: EnqueueItem, batch_id: UUID | None) -> tuple[Any, ...]:
        if not isinstance(item, EnqueueItem):
            raise TypeError(f"a batch takes EnqueueItem, not {type(item).__name__}")
        ref = item.actor_ref
        if not isinstance(ref, ActorRef):
            raise TypeError(f"actor_ref = {ref!r} is not an actor; decorate the function with @actor")
        queue = ref.queue if item.queue is None else item.queue
        priority = ref.priority if item.priority is None else item.priority
        if problem := (
            queue_problem(queue)
            or priority_problem(priority)
            or limit_problem("start_to_close", item.start_to_close)
            or limit_problem("schedule_to_close", item.schedule_to_close)
            or self._heartbeat_problem(item.heartbeat_timeout)
        ):
            raise ValueError(problem)
        if item.scheduled_at is not None and not isinstance(item.scheduled_at, datetime):
            raise TypeError(f"scheduled_at = {item.scheduled_at!r} must be a datetime with a time zone")
        if item.scheduled_at is not None and item.scheduled_at.utcoffset() is None:
            raise ValueError(f"scheduled_at = {item.scheduled_at} has no time zone; use datetime.now(UTC) or the like")
        check_batch_id(item.batch_id)
        if item.unique_while not in ("stored", "active"):
            raise ValueError(f"unique_while = {item.unique_while!r} must be 'stored' or 'active'")
        if item.idempotency_key is not None:
            self._check_key("idempotency_key", item.idempotency_key)
            if item.idempotency_scope != "":
                self._check_key("idempotency_scope", item.idempotency_scope)
        elif item.idempotency_scope != "" or item.unique_while != "stored":
            raise ValueError("idempotency_scope and unique_while need an idempotency_key")
        retry = ref.retry
        deadline = retry.time_budget if item.schedule_to_close is None else item.schedule_to_close
        return (
            new_uuid(),
            ref.name,
            queue,
            ref.encode_payload(item.payload),
            priority,
            None if item.scheduled_at is None else _utc(item.scheduled_at),
            item.idempotency_scope,
            item.idempotency_key,
            item.unique_while == "active",
            _tags(item.tags),
            _metadata(item.metadata),
            _seconds(item.start_to_close),
            _seconds(deadline),
            _seconds(item.heartbeat_timeout),
            retry.max_attempts,
            retry.kind,
            retry.backoff,
            min(retry.base.total_seconds(), self._max_backoff),
            min(retry.cap.total_seconds(), self._max_backoff),
            retry.stored_jitter,
            item.batch_id if item.batch_id is not None else batch_id,
        )

    def _heartbeat_problem(self, timeout: object) -> str:
        low, high = self._heartbeat_window
        if timeout is None or (isinstance(timeout, timedelta) and low <= timeout.total_seconds() < high):
            return ""
        return (
            f"heartbeat_timeout = {timeout!r} must be a timedelta of at least {low:g} s, two TASKQ_HEARTBEAT_INTERVAL, "
            f"and below {high:g} s, TASKQ_LOCK_LEASE"
        )

    def _check_key(self, name: str, value: str) -> None:
        if not isinstance(value, str) or not value.strip() or "\x00" in value:
            raise ValueError(f"{name} = {value!r} must be text that is not blank and holds no NUL")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise ValueError(f"{name} = {value!r} is not valid Unicode") from None
        if size > self._key_max_bytes:
            raise ValueError(
                f"{name} is {size} bytes, the limit is {self._key_max_bytes} (TASKQ_IDEMPOTENCY_KEY_MAX_BYTES)"
            )


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def check_batch_id(batch_id: object) -> None:
    """Raise ``TypeError`` for what is neither a UUID nor None."""
    if batch_id is not None and not isinstance(batch_id, UUID):
        raise TypeError(f"batch_id = {batch_id!r} must be a UUID")


def _utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"scheduled_at = {moment} must be between the years 1 and 9999 in UTC") from None


def _tags(tags: Sequence[str]) -> str | None:
    if isinstance(tags, str):
        raise TypeError(f"tags = {tags!r} must be a sequence of words, not one string")
    if not tags:
        return None
    if len(tags) > MAX_TAGS:
        raise ValueError(f"{len(tags)} tags given, the limit is {MAX_TAGS}")
    for tag in tags:
        if not isinstance(tag, str) or not TAG.fullmatch(tag) or len(tag) > MAX_TAG:
            raise ValueError(f"tag {tag!r} must be letters, digits, '_' and inner '-', at most {MAX_TAG} characters")
    return ",".join(tags)


def _metadata(metadata: Mapping[str, Any] | None) -> str | None:
    if metadata is None:
        return None
    text = encode_object("metadata", metadata)
    if len(text) > MAX_METADATA:
        raise PayloadNotStorableError(f"metadata is {len(text)} bytes, the limit is {MAX_METADATA}")
    return text
