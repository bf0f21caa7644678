"""Enqueues many jobs at once with COPY: all of them or none, and no answer but their number."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.client.admission import Refusal
from taskqd.client.enqueue import Connection, Enqueuer, transaction_on
from taskqd.client.item import EnqueueItem, Row, check_size
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.errors import DuplicateIdempotencyKeyError, IdempotencyKeyActorMismatchError
from taskqd.domain.lanes import lane_of
from taskqd.storage.statements import load

MAX_FAST = 50_000
MAX_FAST_SIZE = 256 * 1024 * 1024
"""Characters of JSON that the payloads of one COPY may have together."""
CHUNK = 1000
"""Rows that are made into text, and sent, together."""
COPY_TIMEOUT = 300.0
NULL = "\\N"
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class Copier:
    """Copies the items of one schema's batches."""

    def __init__(self, enqueuer: Enqueuer) -> None:
        self._enqueuer = enqueuer
        self._sql = load("client", enqueuer.schema)

    async def copy(self, source: Any, items: Sequence[EnqueueItem], batch_id: UUID) -> tuple[int, list[Refusal]]:
        """Copy ``items`` into the jobs of the batch; return how many, and those of actors that have no room.

        Raises what ``enqueue_batch_fast`` says, and leaves nothing then.
        """
        rows: list[Row] = []
        for start in range(0, len(items), CHUNK):
            rows.extend(self._enqueuer.rows.row(item, batch_id) for item in items[start : start + CHUNK])
            await asyncio.sleep(0)  # others on this loop have their turn
        check_size(rows, MAX_FAST_SIZE)
        self._check(items, rows)
        try:
            with explain_unmigrated(self._enqueuer.schema):
                async with transaction_on(source) as connection:
                    return await self._copy(connection, items, rows, batch_id)
        except asyncpg.UniqueViolationError:
            await self._explain(source, rows)
            raise

    async def _copy(
        self, connection: Connection, items: Sequence[EnqueueItem], rows: Sequence[Row], batch_id: UUID
    ) -> tuple[int, list[Refusal]]:
        one_of_each = {row.actor: item for row, item in zip(rows, items, strict=True)}
        refused = []
        caps = await self._enqueuer.gatekeeper.count(connection, list(one_of_each.values()))
        for actor, (queued, cap) in caps.items():
            indices = [index for index, row in enumerate(rows) if row.actor == actor]
            if queued + len(indices) > cap:
                refused.append(Refusal(actor, indices, queued, cap))
        full = {one.actor for one in refused}
        rows = [row._replace(capped=row.actor in caps) for row in rows if row.actor not in full]
        if rows:
            if any(row.idempotency_key is not None for row in rows):
                # in key order, so that of two that share keys one waits for the other
                rows.sort(key=lambda row: (row.idempotency_scope.encode(), (row.idempotency_key or "").encode()))
            rules = await connection.fetchrow(
                self._sql.lane_rules, list({row.actor for row in rows}), list({row.queue for row in rows})
            )
            columns = _columns(rows, await connection.fetchval(self._sql.clock), rules["gated"], rules["round_robin"])
            await connection.copy_to_table(
                "jobs",
                source=_text(list(columns.values()), len(rows)),
                columns=list(columns),
                schema_name=self._enqueuer.schema,
                timeout=COPY_TIMEOUT,
            )
        return len(rows), refused

    def _check(self, items: Sequence[EnqueueItem], rows: Sequence[Row]) -> None:
        seen = set()
        for item, row in zip(items, rows, strict=True):
            if self._enqueuer.gatekeeper.is_unique(item, row):
                raise ValueError(
                    f"actor {row.actor!r} has unique_for, which enqueue_batch_fast does not look for; "
                    "use enqueue_batch, or leave out identity_key"
                )
            if row.idempotency_key is not None:
                key = (row.idempotency_scope, row.idempotency_key)
                if key in seen:
                    raise DuplicateIdempotencyKeyError(row.idempotency_key, row.idempotency_scope, None)
                seen.add(key)

    async def _explain(self, source: Any, rows: Sequence[Row]) -> None:
        """Raise the error that names what stands against one of ``rows``."""
        keyed = [row for row in rows if row.idempotency_key is not None]
        scopes, keys = [row.idempotency_scope for row in keyed], [row.idempotency_key for row in keyed]
        for record in await source.fetch(self._sql.key_holders, scopes, keys):
            row = keyed[record["ord"] - 1]
            key = str(row.idempotency_key)
            if record["actor"] != row.actor:
                raise IdempotencyKeyActorMismatchError(key, row.idempotency_scope, row.actor, record["actor"])
            raise DuplicateIdempotencyKeyError(key, row.idempotency_scope, record["id"])
        alone = [row for row in rows if row.singleton]
        if alone:
            await self._enqueuer.gatekeeper.explain_singletons(source, alone)


def _columns(
    rows: Sequence[Row], now: datetime, gated: Sequence[str], round_robin: Sequence[str]
) -> dict[str, Sequence[str] | str]:
    """Return the columns of ``rows`` as COPY reads them: one text for a column in which all are alike, never for id."""
    values: dict[str, Sequence[Any]] = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
    due = values["scheduled_at"]
    values["status"] = ["scheduled" if at is not None and at > now else "pending" for at in due]
    values["scheduled_at"] = [now if at is None else at for at in due]
    values["schedule_to_close"] = [
        None if after is None else now + timedelta(seconds=after) for after in values["schedule_to_close"]
    ]
    values["route"] = values["queue"]
    values["serial"] = [identity is not None for identity in values["identity_key"]]
    values["lane"] = [
        lane_of(row.actor, row.identity_key, row.fairness_key, row.actor in gated, row.queue in round_robin)
        for row in rows
    ]
    columns: dict[str, Sequence[str] | str] = {}
    for name, column in values.items():
        write = _WRITERS.get(name, str)
        if name != "id" and column.count(column[0]) == len(column):
            if column[0] is not None:  # no column without a default is null throughout
                columns[name] = write(column[0])
        else:
            columns[name] = [NULL if value is None else write(value) for value in column]
    return columns


def _escaped(text: str) -> str:
    return text.translate(_ESCAPES)


def _payload(text: str) -> str:
    return text.replace("\\", "\\\\")  # JSON has no other control characters


def _interval(seconds: float) -> str:
    return f"{seconds:.6f} seconds"


_WRITERS: Mapping[str, Callable[[Any], str]] = {
    "actor": _escaped,
    "payload": _payload,
    "metadata": _payload,
    "idempotency_scope": _escaped,
    "idempotency_key": _escaped,
    "identity_key": _escaped,
    "lane": _escaped,
    "fairness_key": _escaped,
    "tags": lambda words: '{"' + words.replace(",", '","') + '"}',
    "start_to_close": _interval,
    "heartbeat_timeout": _interval,
}


async def _text(columns: Sequence[Sequence[str] | str], count: int) -> AsyncIterator[bytes]:
    """Yield the rows as text, ``CHUNK`` at a time."""
    template = "\t".join("%s" if not isinstance(column, str) else column.replace("%", "%%") for column in columns)
    varying = [column for column in columns if not isinstance(column, str)]
    for start in range(0, count, CHUNK):
        part = zip(*(column[start : start + CHUNK] for column in varying), strict=True)
        yield ("\n".join(template % row for row in part) + "\n").encode()
