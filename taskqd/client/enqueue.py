"""Turns items into jobs: validation first, then one statement; more only for those that must be counted or compared."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import UUID

from taskqd.actors.actor import ActorRef
from taskqd.client.admission import Gatekeeper, Refusal
from taskqd.client.item import EnqueueItem, Row, RowMaker, check_size
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.errors import IdempotencyKeyActorMismatchError, SubEnqueueError
from taskqd.storage.statements import load

MAX_BATCH = 1000
MAX_BATCH_SIZE = 64 * 1024 * 1024
"""Characters of JSON that the payloads of one batch may have together: what one statement should carry."""
KEY_RACES = 3
"""How often a key may be freed between our insert and our look at its holder before we give up."""

Connection: TypeAlias = Any
"""An asyncpg connection, pooled or not: the pool's proxy shares no base class with it."""


def check_connection(connection: object) -> None:
    """Raise ``TypeError`` for what is neither None nor an asyncpg connection."""
    if connection is not None and not all(hasattr(connection, name) for name in ("fetchrow", "transaction")):
        raise TypeError(f"connection = {connection!r} must be an asyncpg connection")


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What became of one item: a new job, or the existing one that is enough."""

    job_id: UUID
    actor: ActorRef[Any, Any]
    was_existing: bool


@dataclass(slots=True)
class Outcome:
    """What became of items, by their index. Every item is in one of the two."""

    enqueued: dict[int, Enqueued] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)

    def in_order(self) -> list[Enqueued]:
        """Return what was enqueued in the order of the items."""
        return [self.enqueued[index] for index in sorted(self.enqueued)]

    @property
    def new(self) -> int:
        """How many jobs were made."""
        return sum(not one.was_existing for one in self.enqueued.values())


@asynccontextmanager
async def transaction_on(source: Any) -> AsyncIterator[Connection]:
    """Open a transaction on a connection of the pool ``source``, or on it where it is a connection itself."""
    if hasattr(source, "acquire"):
        async with source.acquire() as own, own.transaction():
            yield own
    else:
        async with source.transaction():
            yield source


class Enqueuer:
    """Validates and inserts jobs of one schema through whatever pool or connection it is given. See ``RowMaker``."""

    def __init__(
        self, schema: str, *, key_max_bytes: int, max_backoff: float, heartbeat_window: tuple[float, float]
    ) -> None:
        self.schema = schema
        self.rows = RowMaker(key_max_bytes=key_max_bytes, max_backoff=max_backoff, heartbeat_window=heartbeat_window)
        self.gatekeeper = Gatekeeper(schema)
        self._sql = load("client", schema)

    async def insert(
        self, source: Any, items: Sequence[EnqueueItem], *, batch_id: UUID | None = None, wake: bool = False
    ) -> Outcome:
        """Insert ``items`` in order and say what became of each. With ``wake`` the commit wakes sleeping workers.

        Nothing is inserted when any item is invalid. A key held by another actor's job raises
        ``IdempotencyKeyActorMismatchError``, a second singleton ``SingletonCollisionError``; run inside a transaction
        to take back what was inserted before it. Raises ``SchemaNotMigratedError`` where the schema holds no tables of
        ours.
        """
        rows = [self.rows.row(item, batch_id) for item in items]
        check_size(rows, MAX_BATCH_SIZE)
        outcome = Outcome()
        todo: Sequence[int] = range(len(rows))
        with explain_unmigrated(self.schema):
            if not any(
                row.capped or self.gatekeeper.is_unique(item, row) for item, row in zip(items, rows, strict=True)
            ):
                todo = await self._insert(source, items, rows, todo, outcome, counted=False, wake=wake)
            if todo:
                async with transaction_on(source) as connection:
                    await self._insert_guarded(connection, items, rows, todo, outcome, wake=wake)
        return outcome

    async def _insert_guarded(
        self,
        connection: Connection,
        items: Sequence[EnqueueItem],
        rows: Sequence[Row],
        todo: Sequence[int],
        outcome: Outcome,
        *,
        wake: bool,
    ) -> None:
        """Insert what neither a cap nor another job stands against; raise for what cannot be told apart."""
        keyed = [index for index in todo if rows[index].idempotency_key is not None]
        if keyed:  # a duplicate is answered, however full it is
            await self._find_holders(connection, items, keyed, outcome)
        todo = [index for index in todo if index not in outcome.enqueued]
        admitted = await self.gatekeeper.admit(connection, items, rows, todo)
        outcome.refused.extend(admitted.refused)
        for index, holder in admitted.holders.items():
            outcome.enqueued[index] = Enqueued(holder, items[index].actor_ref, was_existing=True)
        stamped = [row._replace(capped=row.actor in admitted.capped) for row in rows]
        left = await self._insert(connection, items, stamped, admitted.indices, outcome, counted=True, wake=wake)
        if left:
            row = rows[left[0]]
            what = (
                f"the singleton of actor {row.actor!r}" if row.singleton else f"idempotency key {row.idempotency_key!r}"
            )
            raise SubEnqueueError(f"{what} is freed and taken faster than it can be read")
        for index, first in admitted.copies.items():
            outcome.enqueued[index] = Enqueued(
                outcome.enqueued[first].job_id, items[index].actor_ref, was_existing=True
            )

    async def _insert(
        self,
        source: Any,
        items: Sequence[EnqueueItem],
        rows: Sequence[Row],
        todo: Sequence[int],
        outcome: Outcome,
        *,
        counted: bool,
        wake: bool,
    ) -> Sequence[int]:
        """Insert rows, or find who holds their keys. Return those that neither explains."""
        for _ in range(KEY_RACES):
            if not todo:
                break
            columns = list(zip(*(rows[index] for index in todo), strict=True))
            inserted = {record["id"] for record in await source.fetch(self._sql.enqueue, *columns, counted, wake)}
            taken: list[int] = []
            for index in todo:
                if rows[index].id in inserted:
                    outcome.enqueued[index] = Enqueued(rows[index].id, items[index].actor_ref, was_existing=False)
                else:
                    taken.append(index)
            keyed = [index for index in taken if rows[index].idempotency_key is not None]
            if keyed:
                await self._find_holders(source, items, keyed, outcome)
            todo = [index for index in taken if index not in outcome.enqueued]
            alone = [rows[index] for index in todo if rows[index].singleton]
            if alone:
                await self.gatekeeper.explain_singletons(source, alone)
            if not counted and not keyed and not alone:
                break  # of an actor that has a cap in the database
        return todo

    async def _find_holders(
        self, source: Any, items: Sequence[EnqueueItem], indices: Sequence[int], outcome: Outcome
    ) -> None:
        scopes = [items[index].idempotency_scope for index in indices]
        keys = [items[index].idempotency_key for index in indices]
        for record in await source.fetch(self._sql.key_holders, scopes, keys):
            index = indices[record["ord"] - 1]
            item = items[index]
            if record["actor"] != item.actor_ref.name:
                raise IdempotencyKeyActorMismatchError(
                    str(item.idempotency_key), item.idempotency_scope, item.actor_ref.name, record["actor"]
                )
            outcome.enqueued[index] = Enqueued(record["id"], item.actor_ref, was_existing=True)
