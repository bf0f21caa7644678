"""Acts on jobs that exist: cancel one, put an ended one back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.client.admission import collision
from taskqd.client.enqueue import check_connection, transaction_on
from taskqd.client.filter import JobFilter
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.arguments import check_flag, check_id, check_reason
from taskqd.domain.errors import EmptyFilterError, IdempotencyKeyTakenError, IllegalStateTransition, JobNotFoundError
from taskqd.domain.status import ACTIVE, TERMINAL, JobStatus
from taskqd.storage.statements import load

WINDOW = 500
"""Jobs that one transaction of ``cancel_where`` cancels."""
DEADLOCKS = 3
"""How often such a transaction is tried again when Postgres ends it for the sake of another."""


@dataclass(frozen=True, slots=True)
class CancelResult:
    """What a cancellation did.

    ``cancellation_initiated`` is False when it changed nothing: the job had ended, or was being cancelled already. A
    running job is still ``RUNNING`` afterwards: its attempt was asked to stop, and how it ends is what is recorded.
    """

    job_id: UUID
    previous_status: JobStatus
    new_status: JobStatus
    cancellation_initiated: bool


@dataclass(frozen=True, slots=True)
class BulkCancelResult:
    """What a cancellation of many did: jobs that waited are cancelled, attempts of running ones were asked to stop."""

    cancelled_ids: list[UUID]
    cancel_requested_ids: list[UUID]

    @property
    def cancelled_directly(self) -> int:
        """How many jobs were cancelled at once."""
        return len(self.cancelled_ids)

    @property
    def cancel_requested(self) -> int:
        """How many attempts were asked to stop."""
        return len(self.cancel_requested_ids)

    @property
    def total_affected(self) -> int:
        """How many jobs it changed."""
        return self.cancelled_directly + self.cancel_requested


class JobControl:
    """Cancels and retries jobs of one schema, through a pool or on a connection of the caller."""

    def __init__(self, pool: Any, schema: str) -> None:
        self._pool = pool
        self._schema = schema
        self._sql = load("client", schema)

    async def cancel(self, job_id: UUID, reason: str | None, connection: Any | None) -> CancelResult:
        """See ``TaskQ.cancel``."""
        check_id("job_id", job_id)
        check_reason(reason)
        check_connection(connection)
        with explain_unmigrated(self._schema):
            record = await (connection or self._pool).fetchrow(self._sql.cancel, job_id, reason)
        if record is None:
            raise JobNotFoundError(job_id)
        return CancelResult(job_id, JobStatus(record["before"]), JobStatus(record["after"]), record["initiated"])

    async def cancel_where(self, which: JobFilter, reason: str | None, allow_empty_filter: bool) -> BulkCancelResult:
        """See ``TaskQ.cancel_where``."""
        if not isinstance(which, JobFilter):
            raise TypeError(f"which = {which!r} must be a JobFilter")
        check_reason(reason)
        check_flag("allow_empty_filter", allow_empty_filter)
        if which.is_empty and not allow_empty_filter:
            raise EmptyFilterError
        result = BulkCancelResult([], [])
        active = sorted(ACTIVE.intersection(which.statuses or ACTIVE))
        queue, _, *others = which.arguments()
        last: UUID | None = None
        while active:
            record = await self._cancel_window(queue, active, *others, reason, WINDOW, last)
            result.cancelled_ids.extend(record["cancelled"])
            result.cancel_requested_ids.extend(record["requested"])
            if record["picked"] < WINDOW:
                break
            last = record["last"]
        return result

    async def _cancel_window(self, *arguments: Any) -> Any:
        for again in range(DEADLOCKS, -1, -1):
            try:
                with explain_unmigrated(self._schema):
                    return await self._pool.fetchrow(self._sql.cancel_where, *arguments)
            except asyncpg.DeadlockDetectedError:
                if not again:
                    raise
        raise AssertionError

    async def retry(self, job_id: UUID, connection: Any | None) -> None:
        """See ``TaskQ.retry``."""
        check_id("job_id", job_id)
        check_connection(connection)
        source = connection or self._pool
        try:
            with explain_unmigrated(self._schema):
                async with transaction_on(source) as own:
                    record = await own.fetchrow(self._sql.retry, job_id)
        except asyncpg.UniqueViolationError:
            for other in await source.fetch(self._sql.singletons_beside, job_id):
                raise collision(other) from None
            raise IdempotencyKeyTakenError(job_id) from None
        if record is None:
            raise JobNotFoundError(job_id)
        if not record["retried"]:
            ended = ", ".join(sorted(TERMINAL))
            raise IllegalStateTransition(job_id, record["before"], f"only a job that is {ended} can be retried")
