"""Acts on jobs that exist: cancel one, put an ended one back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.client.admission import collision
from taskqd.client.enqueue import transaction_on
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.errors import IdempotencyKeyTakenError, IllegalStateTransition, JobNotFoundError
from taskqd.domain.status import TERMINAL, JobStatus
from taskqd.storage.statements import load

MAX_REASON = 1000


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


class JobControl:
    """Cancels and retries jobs of one schema, through a pool or on a connection of the caller."""

    def __init__(self, pool: Any, schema: str) -> None:
        self._pool = pool
        self._schema = schema
        self._sql = load("client", schema)

    async def cancel(self, job_id: UUID, reason: str | None, connection: Any | None) -> CancelResult:
        """See ``TaskQ.cancel``."""
        if reason is not None and (len(reason) > MAX_REASON or "\x00" in reason or not _encodes(reason)):
            raise ValueError(f"reason must be at most {MAX_REASON} characters, without NUL and lone surrogates")
        with explain_unmigrated(self._schema):
            record = await (connection or self._pool).fetchrow(self._sql.cancel, job_id, reason)
        if record is None:
            raise JobNotFoundError(job_id)
        return CancelResult(job_id, JobStatus(record["before"]), JobStatus(record["after"]), record["initiated"])

    async def retry(self, job_id: UUID, connection: Any | None) -> None:
        """See ``TaskQ.retry``."""
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


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
