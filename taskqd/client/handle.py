"""A handle on one enqueued job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import UUID

from taskqd.actors.actor import ActorRef
from taskqd.client.control import CancelResult
from taskqd.client.rows import JobProgress, JobRow
from taskqd.domain.arguments import check_seconds, check_timeout
from taskqd.domain.errors import JobFailed, ResultUnavailable
from taskqd.domain.status import TERMINAL, JobStatus

if TYPE_CHECKING:
    from taskqd.client.reads import JobReader

R = TypeVar("R")

FIRST_POLL, SLOWEST_POLL = 0.02, 0.5
FASTEST_STREAM, SLOWEST_STREAM = 0.05, 60.0


class JobHandle(Generic[R]):
    """One job: ask for its status, or wait for its result.

    ``was_existing`` is True when enqueue found the holder of the idempotency key instead of making a job.
    """

    __slots__ = ("_reader", "actor", "job_id", "was_existing")

    def __init__(self, job_id: UUID, actor: ActorRef[Any, R], reader: JobReader, *, was_existing: bool = False) -> None:
        self.job_id = job_id
        self.actor = actor
        self.was_existing = was_existing
        self._reader = reader

    def __repr__(self) -> str:
        return f"JobHandle({self.job_id}, actor={self.actor.name!r})"

    async def row(self) -> JobRow:
        """Return the job's row as it is now. Raises ``JobNotFoundError`` once it is pruned."""
        return await self._reader.row(self.job_id)

    async def status(self) -> JobStatus:
        """Return the job's status as it is now. Raises ``JobNotFoundError`` once it is pruned."""
        return await self._reader.status(self.job_id)

    async def cancel(self, reason: str | None = None) -> CancelResult:
        """Cancel the job, as ``TaskQ.cancel`` does. Raises ``JobNotFoundError`` once it is pruned."""
        return await self._reader.control.cancel(self.job_id, reason, None)

    async def progress(self) -> JobProgress:
        """Return how far the job has come. Raises ``JobNotFoundError`` once it is pruned."""
        return await self._reader.progress(self.job_id)

    async def progress_stream(self, *, poll: float = 0.5) -> AsyncIterator[JobProgress]:
        """Yield how far the job has come, now and whenever that or its status has changed; ends with the job.

        Asks every ``poll`` seconds (0.05 to 60), so reports in between are one. Raises ``ValueError``, and
        ``JobNotFoundError`` once the job is pruned.
        """
        check_seconds("poll", poll, FASTEST_STREAM, SLOWEST_STREAM)
        last = None
        while last is None or not last.is_terminal:
            now = await self.progress()
            if now != last:
                last = now
                yield now
            else:
                await asyncio.sleep(poll)

    async def wait(self, timeout: float | None = None) -> R:
        """Wait until the job has ended and return its result.

        Polls, at first quickly, then every half second. Raises ``JobFailed`` when it ended other than succeeded,
        ``ResultUnavailable`` when it succeeded so long ago that its result is kept no longer (``result_ttl``),
        ``TimeoutError`` after ``timeout`` seconds (None waits as long as it takes; the job goes on either way),
        ``ValueError`` for a timeout that is no number.
        """
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = FIRST_POLL
        while True:
            status = await self.status()
            if status in TERMINAL:
                row = await self.row()
                if row.status is JobStatus.SUCCEEDED:
                    if row.result_text is None and self.actor.result_adapter is not None:
                        raise ResultUnavailable(row)
                    return self.actor.decode_result(row.result_text)
                if row.is_terminal:  # not put back by an operator's retry in between
                    raise JobFailed(row)
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"job {self.job_id} is still {status} after {timeout:g} s")
                pause = min(pause, left)
            await asyncio.sleep(pause)
            pause = min(SLOWEST_POLL, max(pause, FIRST_POLL) * 1.5)
