"""An item to enqueue, and the row that it becomes once it has been validated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple
from uuid import UUID

from pydantic import BaseModel

from taskqd.actors.actor import ActorRef
from taskqd.actors.faithful import encode_object
from taskqd.actors.options import limit_problem, priority_problem, queue_problem
from taskqd.domain.arguments import check_id
from taskqd.domain.errors import PayloadNotStorableError
from taskqd.domain.ids import new_uuid

TAG = re.compile(r"\w(?:[\w\-]*\w)?")
MAX_TAGS, MAX_TAG = 50, 100
MAX_METADATA = 65_536


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
    ``identity_key``
        What the job is about, such as a customer. Of an actor's jobs with the same one only one runs at a time, and its
        ``unique_for`` holds for each of them alone.
    ``fairness_key``
        Whose the job is, where a queue takes turns between keys.
    ``batch_id``
        The batch the job counts in; default the batch's own when enqueued by ``enqueue_batch``.
    ``metadata``, ``tags``
        Free JSON up to 64 KiB, and up to 50 words, for people and filters. ``{"singleton": true}`` makes this job the
        only one of its actor, as the actor's own ``singleton`` does for all of them.
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
    identity_key: str | None = None
    fairness_key: str | None = None
    batch_id: UUID | None = None
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()


class Row(NamedTuple):
    """A validated item, in the order of the parameters of the statement ``enqueue``; durations are seconds."""

    id: UUID
    actor: str
    queue: str
    payload: str
    priority: int
    scheduled_at: datetime | None
    idempotency_scope: str
    idempotency_key: str | None
    unique_while_active: bool
    tags: str | None
    metadata: str | None
    start_to_close: float | None
    schedule_to_close: float | None
    heartbeat_timeout: float | None
    max_attempts: int
    retry_kind: str
    retry_backoff: str
    retry_base: float
    retry_cap: float
    retry_jitter: float
    batch_id: UUID | None
    identity_key: str | None
    fairness_key: str | None
    singleton: bool
    capped: bool


class RowMaker:
    """Validates items by the limits of one process.

    ``key_max_bytes`` bounds idempotency key and scope each (``TASKQ_IDEMPOTENCY_KEY_MAX_BYTES``); ``max_backoff``
    bounds the retry cap stamped on jobs (``TASKQ_MAX_RETRY_BACKOFF``), in seconds; ``heartbeat_window`` are the
    seconds, from and below, that a ``heartbeat_timeout`` may be.
    """

    def __init__(self, *, key_max_bytes: int, max_backoff: float, heartbeat_window: tuple[float, float]) -> None:
        self._key_max_bytes = key_max_bytes
        self._max_backoff = max_backoff
        self._heartbeat_window = heartbeat_window
        self._curves: dict[ActorRef[Any, Any], tuple[int, str, str, float, float, float]] = {}

    def row(self, item: EnqueueItem, batch_id: UUID | None) -> Row:
        """Return the row of ``item``, of the batch ``batch_id`` unless it names one. Raises what ``enqueue`` says."""
        if not isinstance(item, EnqueueItem):
            raise TypeError(f"items must be EnqueueItem, not {type(item).__name__}")
        ref = item.actor_ref
        check_actor("actor_ref", ref)
        if problem := self._problem(item):
            raise ValueError(problem)
        check_id("batch_id", item.batch_id, optional=True)
        self._check_keys(item)
        metadata = _metadata(item.metadata)
        deadline = ref.retry.time_budget if item.schedule_to_close is None else item.schedule_to_close
        return Row(
            new_uuid(),
            ref.name,
            ref.queue if item.queue is None else item.queue,
            ref.encode_payload(item.payload),
            ref.priority if item.priority is None else item.priority,
            None if item.scheduled_at is None else _utc(item.scheduled_at),
            item.idempotency_scope,
            item.idempotency_key,
            item.unique_while == "active",
            _tags(item.tags),
            metadata,
            _seconds(item.start_to_close),
            _seconds(deadline),
            _seconds(item.heartbeat_timeout),
            *(self._curves.get(ref) or self._curve(ref)),
            item.batch_id if item.batch_id is not None else batch_id,
            item.identity_key,
            item.fairness_key,
            ref.singleton or (item.metadata is not None and item.metadata.get("singleton") is True),
            ref.max_pending is not None,
        )

    def _curve(self, ref: ActorRef[Any, Any]) -> tuple[int, str, str, float, float, float]:
        """Return what is stored of an actor's policy."""
        retry = ref.retry
        base, cap = (min(each.total_seconds(), self._max_backoff) for each in (retry.base, retry.cap))
        curve = (retry.max_attempts, retry.kind, retry.backoff, base, cap, retry.stored_jitter)
        self._curves[ref] = curve
        return curve

    def _problem(self, item: EnqueueItem) -> str:
        """Say what is wrong with what the item overrides, ``""`` when nothing is."""
        return (
            (item.queue is not None and queue_problem(item.queue))
            or (item.priority is not None and priority_problem(item.priority))
            or (item.start_to_close is not None and limit_problem("start_to_close", item.start_to_close))
            or (item.schedule_to_close is not None and limit_problem("schedule_to_close", item.schedule_to_close))
            or (item.heartbeat_timeout is not None and self._heartbeat_problem(item.heartbeat_timeout))
            or ""
        )

    def _heartbeat_problem(self, timeout: object) -> str:
        low, high = self._heartbeat_window
        if isinstance(timeout, timedelta) and low <= timeout.total_seconds() < high:
            return ""
        return (
            f"heartbeat_timeout = {timeout!r} must be a timedelta of at least {low:g} s, two TASKQ_HEARTBEAT_INTERVAL, "
            f"and below {high:g} s, TASKQ_LOCK_LEASE"
        )

    def _check_keys(self, item: EnqueueItem) -> None:
        if item.unique_while not in ("stored", "active"):
            raise ValueError(f"unique_while = {item.unique_while!r} must be 'stored' or 'active'")
        if item.idempotency_key is not None:
            self._check_key("idempotency_key", item.idempotency_key)
            if item.idempotency_scope != "":
                self._check_key("idempotency_scope", item.idempotency_scope)
        elif item.idempotency_scope != "" or item.unique_while != "stored":
            raise ValueError("idempotency_scope and unique_while need an idempotency_key")
        if item.identity_key is not None:
            self._check_key("identity_key", item.identity_key)
        if item.fairness_key is not None:
            self._check_key("fairness_key", item.fairness_key)

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


def check_actor(name: str, value: object) -> None:
    """Raise ``TypeError`` for what is no actor."""
    if not isinstance(value, ActorRef):
        raise TypeError(f"{name} = {value!r} is not an actor; decorate the function with @actor")


def check_size(rows: Sequence[Row], limit: int) -> None:
    """Raise ``PayloadNotStorableError`` when the payloads of a batch are more than ``limit`` characters together."""
    size = sum(len(row.payload) for row in rows)
    if len(rows) > 1 and size > limit:
        raise PayloadNotStorableError(
            f"the payloads of the batch are {size} characters, the limit is {limit}; enqueue it in parts"
        )


def _seconds(duration: timedelta | None) -> float | None:
    return None if duration is None else duration.total_seconds()


def _utc(moment: datetime) -> datetime:
    if not isinstance(moment, datetime):
        raise TypeError(f"scheduled_at = {moment!r} must be a datetime with a time zone")
    if moment.utcoffset() is None:
        raise ValueError(f"scheduled_at = {moment} has no time zone; use datetime.now(UTC) or the like")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"scheduled_at = {moment} must be between the years 1 and 9999 in UTC") from None


def _tags(tags: Sequence[str]) -> str | None:
    if tags == ():
        return None
    if not isinstance(tags, (list, tuple, set, frozenset)):
        raise TypeError(f"tags = {tags!r} must be a list or a tuple of words")
    if len(tags) > MAX_TAGS:
        raise ValueError(f"{len(tags)} tags given, the limit is {MAX_TAGS}")
    for tag in tags:
        if not isinstance(tag, str) or not TAG.fullmatch(tag) or len(tag) > MAX_TAG:
            raise ValueError(
                f"tags: tag {tag!r} must be letters, digits, '_' and inner '-', at most {MAX_TAG} characters"
            )
    return ",".join(tags) or None


def _metadata(metadata: Mapping[str, Any] | None) -> str | None:
    if metadata is None:
        return None
    text = encode_object("metadata", metadata)
    if len(text) > MAX_METADATA:
        raise PayloadNotStorableError(f"metadata is {len(text)} bytes, the limit is {MAX_METADATA}")
    return text
