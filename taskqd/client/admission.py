"""What enqueue asks the database before it lets jobs of a limited actor in: ``max_pending``, ``unique_for``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.client.item import EnqueueItem, Row
from taskqd.domain.errors import (
    BatchMaxPendingExceededError,
    MaxPendingExceededError,
    MaxPendingLockTimeoutError,
    SingletonCollisionError,
    UniqueForLockTimeoutError,
)
from taskqd.storage.statements import load

LOCK_TIMEOUT = 5.0
"""Seconds that enqueue waits for others who count, or compare, the same jobs and have not committed."""
SOON = 1.0
"""Seconds after which it is worth trying again when a singleton runs: nobody knows how long it takes."""
_log = logging.getLogger("taskqd.client")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Items of one actor that has no room for them."""

    actor: str
    indices: Sequence[int]
    current_count: int
    max_pending: int

    def error(self) -> MaxPendingExceededError:
        """Return what to raise for one job."""
        return MaxPendingExceededError(self.actor, self.current_count, self.max_pending)


def collision(record: Mapping[str, Any]) -> SingletonCollisionError:
    """Return what to raise for the singleton of a record of the statement ``singletons``."""
    return SingletonCollisionError(record["actor"], record["id"], max(SOON, record["due_in"]))


def refusal_error(refused: Sequence[Refusal], batch: Any = None) -> BatchMaxPendingExceededError:
    """Return what to raise for a batch."""
    first = refused[0]
    return BatchMaxPendingExceededError(
        {one.actor: one.indices for one in refused}, first.current_count, first.max_pending, batch
    )


@dataclass(slots=True)
class Admitted:
    """Which items may be inserted (``indices``), and what becomes of the others."""

    indices: list[int] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    holders: dict[int, UUID] = field(default_factory=dict)
    """Stored jobs that are enough."""
    copies: dict[int, int] = field(default_factory=dict)
    """Items that an earlier one is enough for."""
    capped: set[str] = field(default_factory=set)
    """The actors that have a cap."""


class Gatekeeper:
    """Admits items of one schema. Call it in the transaction that inserts them."""

    def __init__(self, schema: str) -> None:
        self._sql = load("client", schema)
        self._told: set[str] = set()

    async def admit(
        self, connection: Any, items: Sequence[EnqueueItem], rows: Sequence[Row], todo: Sequence[int]
    ) -> Admitted:
        """Say what may become of the items ``todo``.

        Raises ``MaxPendingLockTimeoutError`` and ``UniqueForLockTimeoutError``.
        """
        admitted = Admitted()
        todo = await self._find_unique(connection, items, rows, todo, admitted)
        caps = await self.count(connection, [items[index] for index in todo])
        admitted.capped = set(caps)
        for actor, (queued, cap) in caps.items():
            of_actor = [index for index in todo if rows[index].actor == actor]
            if queued + _distinct(rows, of_actor) > cap:
                copies = [index for index in admitted.copies if rows[index].actor == actor]
                admitted.refused.append(Refusal(actor, sorted(of_actor + copies), queued, cap))
        full = {one.actor for one in admitted.refused}
        admitted.indices = [index for index in todo if rows[index].actor not in full]
        admitted.copies = {index: first for index, first in admitted.copies.items() if rows[first].actor not in full}
        return admitted

    async def count(self, connection: Any, items: Sequence[EnqueueItem]) -> dict[str, tuple[int, int]]:
        """Return how many jobs of each actor with a cap are queued, and that cap, and keep others from counting."""
        literals = {item.actor_ref.name: item.actor_ref.max_pending for item in items}
        if not literals:
            return {}
        names = sorted(literals)
        with _explain_timeout(MaxPendingLockTimeoutError, f"max_pending of {', '.join(map(repr, names))}"):
            records = await connection.fetch(
                self._sql.count_capped, names, [literals[name] for name in names], int(LOCK_TIMEOUT * 1000)
            )
        return {record["name"]: (record["queued"], record["cap"]) for record in records}

    async def _find_unique(
        self,
        connection: Any,
        items: Sequence[EnqueueItem],
        rows: Sequence[Row],
        todo: Sequence[int],
        admitted: Admitted,
    ) -> list[int]:
        """Find the jobs that are enough, stored or among the items; return the items that remain."""
        first: dict[tuple[str, str | None], int] = {}
        for index in todo:
            if self.is_unique(items[index], rows[index]):
                first.setdefault((rows[index].actor, rows[index].identity_key), index)
        if first:
            unique = list(first.values())
            refs = [items[index].actor_ref for index in unique]
            windows = [ref.unique_for.total_seconds() for ref in refs if ref.unique_for is not None]
            with _explain_timeout(UniqueForLockTimeoutError, f"identity_key of {refs[0].name!r}"):
                records = await connection.fetch(
                    self._sql.unique_holders,
                    [ref.name for ref in refs],
                    [rows[index].identity_key for index in unique],
                    windows,
                    [",".join(ref.unique_states) for ref in refs],
                    int(LOCK_TIMEOUT * 1000),
                )
            holders = {unique[record["ord"] - 1]: record["id"] for record in records}
        left = []
        for index in todo:
            leader = first.get((rows[index].actor, rows[index].identity_key))
            if leader is None:
                left.append(index)
            elif leader in holders:
                admitted.holders[index] = holders[leader]
            elif leader == index:
                left.append(index)
            else:
                admitted.copies[index] = leader
        return left

    async def explain_singletons(self, source: Any, rows: Sequence[Row]) -> None:
        """Raise ``SingletonCollisionError`` when a job stands against one of ``rows``."""
        records = await source.fetch(self._sql.singletons, list({row.actor for row in rows}))
        for record in records:
            raise collision(record)

    def is_unique(self, item: EnqueueItem, row: Row) -> bool:
        """Whether a stored job may be enough for it. Logs, once an actor, that one without an identity has none."""
        if item.actor_ref.unique_for is None:
            return False
        if row.identity_key is None and row.actor not in self._told:
            self._told.add(row.actor)
            _log.warning("actor_config_unique_for_ignored: a job of actor %r has no identity_key", row.actor)
        return row.identity_key is not None


def _distinct(rows: Sequence[Row], indices: Sequence[int]) -> int:
    """How many jobs the rows become: those that share a key become one."""
    keys = {(rows[index].idempotency_scope, rows[index].idempotency_key or rows[index].id) for index in indices}
    return len(keys)


@contextmanager
def _explain_timeout(kind: type[Exception], what: str) -> Iterator[None]:
    try:
        yield
    except asyncpg.LockNotAvailableError:
        raise kind(f"{what}: somebody who enqueues the same has not committed for {LOCK_TIMEOUT:g} s") from None
