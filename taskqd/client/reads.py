"""Reads of jobs and batches."""

from __future__ import annotations

from typing import Any, TypeAlias
from uuid import UUID

from taskqd.client.batch import BatchFilter, BatchSummary
from taskqd.client.control import JobControl
from taskqd.client.filter import MAX_PAGE, JobFilter, JobPage
from taskqd.client.rows import JobProgress, JobRow
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.arguments import check_id, check_whole
from taskqd.domain.errors import JobNotFoundError
from taskqd.domain.status import JobStatus
from taskqd.storage.statements import load

_FIRST = UUID(int=0)

Rows: TypeAlias = list[JobRow]
Summaries: TypeAlias = list[BatchSummary]


class JobReader:
    """Reads jobs of one schema through one pool. A schema without our tables raises ``SchemaNotMigratedError``."""

    def __init__(self, pool: Any, schema: str) -> None:
        self._pool = pool
        self._schema = schema
        self.control = JobControl(pool, schema)
        self._sql = load("client", schema)

    async def find(self, job_id: UUID) -> JobRow | None:
        """Return the job's row, or None."""
        check_id("job_id", job_id)
        with explain_unmigrated(self._schema):
            record = await self._pool.fetchrow(self._sql.job, job_id)
        return None if record is None else JobRow.from_record(record)

    async def find_archived(self, job_id: UUID) -> JobRow | None:
        """Return the row of a job that retention has moved to the archive, or None."""
        with explain_unmigrated(self._schema):
            record = await self._pool.fetchrow(self._sql.archived_job, job_id)
        return None if record is None else JobRow.from_record(record)

    async def row(self, job_id: UUID) -> JobRow:
        """Return the job's row. Raises ``JobNotFoundError``."""
        row = await self.find(job_id)
        if row is None:
            raise JobNotFoundError(job_id)
        return row

    async def status(self, job_id: UUID) -> JobStatus:
        """Return the job's status. Raises ``JobNotFoundError``."""
        with explain_unmigrated(self._schema):
            status = await self._pool.fetchval(self._sql.job_status, job_id)
        if status is None:
            raise JobNotFoundError(job_id)
        return JobStatus(status)

    async def progress(self, job_id: UUID) -> JobProgress:
        """Return how far the job has come. Raises ``JobNotFoundError``."""
        with explain_unmigrated(self._schema):
            record = await self._pool.fetchrow(self._sql.job_progress, job_id)
        if record is None:
            raise JobNotFoundError(job_id)
        return JobProgress.from_record(record)

    async def list(self, which: JobFilter) -> JobPage:
        """See ``TaskQ.list``."""
        if not isinstance(which, JobFilter):
            raise TypeError(f"which = {which!r} must be a JobFilter")
        arguments = (*which.arguments(), which.order_by, which.limit, *which.position())
        with explain_unmigrated(self._schema):
            records = await self._pool.fetch(self._sql.list_jobs, *arguments)
        return which.page([JobRow.from_record(record) for record in records])

    async def batch_counts(self, batch_id: UUID, *, exclude_job_id: UUID | None = None) -> dict[str, int]:
        """Return how many jobs of the batch are in each status; a status without jobs is left out."""
        check_id("batch_id", batch_id)
        check_id("exclude_job_id", exclude_job_id, optional=True)
        with explain_unmigrated(self._schema):
            records = await self._pool.fetch(self._sql.batch_counts, batch_id, exclude_job_id)
        return {record["status"]: record["jobs"] for record in records}

    async def batch_state(self, batch_id: UUID) -> str | None:
        """Return the stored status of the batch, None when it was never opened."""
        check_id("batch_id", batch_id)
        with explain_unmigrated(self._schema):
            state: str | None = await self._pool.fetchval(self._sql.batch_state, batch_id)
        return state

    async def list_batches(self, which: BatchFilter) -> Summaries:
        """See ``TaskQ.list_batches``."""
        if not isinstance(which, BatchFilter):
            raise TypeError(f"which = {which!r} must be a BatchFilter")
        arguments = (which.batch_id, which.queue, which.active, which.limit)
        with explain_unmigrated(self._schema):
            records = await self._pool.fetch(self._sql.batches, *arguments)
        return [BatchSummary.from_record(record) for record in records]

    async def batch_jobs(self, batch_id: UUID, *, after: UUID | None = None, limit: int = 500) -> Rows:
        """Return a page of the batch's jobs in the order they were made, those after the job ``after``.

        ``limit`` is 1 to 1,000; a shorter page is the last. Raises ``ValueError``.
        """
        check_id("batch_id", batch_id)
        check_id("after", after, optional=True)
        check_whole("limit", limit, 1, MAX_PAGE)
        with explain_unmigrated(self._schema):
            records = await self._pool.fetch(self._sql.batch_jobs, batch_id, after or _FIRST, limit)
        return [JobRow.from_record(record) for record in records]
