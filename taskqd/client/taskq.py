"""``TaskQ``: what a service holds to enqueue jobs and read them."""

from __future__ import annotations

import asyncio
import logging
import os
from types import TracebackType
from typing import Any, Self, TypeVar
from uuid import UUID

from taskqd.actors.actor import ActorRef
from taskqd.client.batch import BatchFilter
from taskqd.client.control import BulkCancelResult, CancelResult
from taskqd.client.enqueue import Connection, Enqueuer
from taskqd.client.filter import JobFilter, JobPage
from taskqd.client.handle import JobHandle
from taskqd.client.item import check_actor
from taskqd.client.jobs import Jobs
from taskqd.client.reads import Summaries
from taskqd.client.rows import JobRow
from taskqd.client.schedules import ScheduleCalls
from taskqd.client.wake import WakeSender
from taskqd.domain.arguments import check_id, check_whole
from taskqd.settings.client import client_settings
from taskqd.storage.connect import CONNECT_ERRORS, create_pool, explain
from taskqd.storage.schema_name import check_schema_name
from taskqd.storage.target import attest

R = TypeVar("R")

MAX_POOL = 100
COMMAND_TIMEOUT = 30.0
"""Seconds that one statement of the client may take."""
CLOSE_TIMEOUT = 10.0
"""Seconds that closing waits for statements in flight before it drops their connections."""
_log = logging.getLogger("taskqd.client")


class _Closed:
    """Stands for the pool while the client is not open."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the TaskQ is not open; use 'async with TaskQ(...) as tq' or await tq.open()")


class _Bound:
    """The open pool, for the event loop and the process that opened it: its connections serve no other."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self._process = os.getpid()
        self._loop = asyncio.get_running_loop()

    @property
    def is_ours(self) -> bool:
        """True on the event loop and in the process that opened it."""
        return self._process == os.getpid() and self._loop is asyncio.get_running_loop()

    @property
    def is_abandoned(self) -> bool:
        """True when it was never closed: its event loop was, or this process is a fork of the one that has it."""
        return self._process != os.getpid() or self._loop.is_closed()

    def __getattr__(self, name: str) -> Any:
        if not self.is_ours:
            raise RuntimeError(
                "the TaskQ was opened on another event loop, or before a fork; open one where it is used, "
                "with 'async with TaskQ(...) as tq' or await tq.open()"
            )
        return getattr(self.pool, name)


class TaskQ(Jobs, ScheduleCalls):
    """A client of one taskqd schema::

        async with TaskQ(dsn="postgresql://app@db/app") as tq:
            handle = await tq.enqueue(resize, Resize(path="a.png"))
            print(await handle.wait(timeout=30))

    ``dsn`` or ``pool``
        Exactly one. With ``dsn`` the client owns a pool of ``min_pool_size`` to ``max_pool_size`` (1 to 5)
        connections. A ``pool`` (asyncpg) stays yours; do not give the pool that your request handlers hold
        connections of, or enqueue can wait for itself.
    ``schema``
        Default ``TASKQ_SCHEMA_NAME``, else ``taskq``. It must be the schema that the workers use.

    It belongs to the event loop that opens it, and elsewhere raises ``RuntimeError``: a forked process, or a later
    ``asyncio.run``, opens it again for itself.

    Raises ``ConfigError`` for a bad schema name, ``ValueError`` for bad pool arguments; ``open()`` raises
    ``DatabaseUnavailableError``, ``DatabaseAuthError``, or ``TargetMismatchError`` when the schema is bound to another
    environment than ``TASKQ_ENVIRONMENT``, or is not ``TASKQ_INSTALLATION_ID``.
    """

    def __init__(
        self,
        *,
        dsn: str | None = None,
        pool: Any | None = None,
        schema: str | None = None,
        min_pool_size: int = 1,
        max_pool_size: int = 5,
    ) -> None:
        if (dsn is None) == (pool is None):
            raise ValueError("TaskQ takes exactly one of dsn= and pool=")
        if dsn is not None and not (isinstance(dsn, str) and dsn.strip()):
            raise ValueError("dsn must be text that is not blank, such as postgresql://app@db/app")
        if pool is not None and not all(hasattr(pool, name) for name in ("acquire", "fetchrow")):
            raise TypeError(f"pool = {pool!r} must be an asyncpg pool")
        check_whole("min_pool_size", min_pool_size, 1, MAX_POOL)
        check_whole("max_pool_size", max_pool_size, 1, MAX_POOL)
        if min_pool_size > max_pool_size:
            raise ValueError(
                f"min_pool_size = {min_pool_size} and max_pool_size = {max_pool_size} must satisfy "
                f"1 <= min <= max <= {MAX_POOL}"
            )
        settings = client_settings()
        self.schema = check_schema_name(settings.schema_name if schema is None else schema)
        self._enqueuer = Enqueuer(
            self.schema,
            key_max_bytes=settings.idempotency_key_max_bytes,
            max_backoff=settings.max_retry_backoff,
            heartbeat_window=settings.heartbeat_window,
        )
        self._expected = settings
        self._dsn = dsn
        self._given_pool = pool
        self._sizes = (min_pool_size, max_pool_size)
        self._close_pool()

    async def open(self) -> Self:
        """Open the pool. ``async with`` does it. Safe to call twice."""
        self._forget_abandoned()
        if not self._is_open():
            pool = await self._connect()
            if self._is_open():  # by another task, meanwhile
                if self._given_pool is None:
                    await pool.close()
                return self
            wake = WakeSender(pool, self.schema, _wake_failed)
            wake.start()
            self._sender = wake
            super().__init__(_Bound(pool), self._enqueuer, wake)
        elif not self._pool.is_ours:
            raise RuntimeError("the TaskQ is open on another event loop; open another one here")
        return self

    async def close(self) -> None:
        """Send what is owed and close the pool, if it is the client's own. Safe to call twice."""
        self._forget_abandoned()
        if not self._is_open():
            return
        if not self._pool.is_ours:
            raise RuntimeError("the TaskQ is open on another event loop; close it there")
        pool = self._pool.pool
        await self._sender.close()
        self._close_pool()
        if self._given_pool is None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    async def _connect(self) -> Any:
        """Return a pool to the schema that this process was configured for."""
        if self._given_pool is not None:
            await attest(self._given_pool, self.schema, self._expected)
            return self._given_pool
        dsn, (low, high) = self._dsn or "", self._sizes
        pool = await create_pool(
            dsn,
            role="client",
            schema=self.schema,
            group="",
            min_size=low,
            max_size=high,
            command_timeout=COMMAND_TIMEOUT,
        )
        try:
            await attest(pool, self.schema, self._expected)
        except CONNECT_ERRORS as error:
            pool.terminate()
            raise explain(error, dsn) from None
        except BaseException:
            pool.terminate()
            raise
        return pool

    def _is_open(self) -> bool:
        return isinstance(self._pool, _Bound)

    def _forget_abandoned(self) -> None:
        # Its connections cannot be closed from here: the loop that drives them is gone, or they are the parent's.
        if isinstance(self._pool, _Bound) and self._pool.is_abandoned:
            self._close_pool()

    def _close_pool(self) -> None:
        closed: Any = _Closed()
        super().__init__(closed, self._enqueuer, closed)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, job_id: UUID) -> JobRow | None:
        """Return the job's row, or None when there is no such job (any more).

        One that ended long ago is found in the archive, and has an ``archived_at`` then; other calls know it no more.
        """
        return await self._reader.find(job_id) or await self._reader.find_archived(job_id)

    async def cancel(
        self, job_id: UUID, reason: str | None = None, *, connection: Connection | None = None
    ) -> CancelResult:
        """Cancel a job: at once while it waits; while it runs, its attempt is asked to stop.

        A running attempt sees ``ctx.cancel_event`` within a heartbeat, as a rule in milliseconds. What it returns is
        still a success; when it raises, the job is cancelled. After the worker's ``cancellation_grace_period`` its task
        is cancelled, after ``cleanup_grace_period`` more the job is abandoned. ``reason`` (up to 1,000 characters) is
        kept with the job's events. With ``connection`` (asyncpg) it is part of whatever transaction is open there.
        Raises ``JobNotFoundError``, and ``ValueError`` for a reason that cannot be stored.
        """
        return await self._reader.control.cancel(job_id, reason, connection)

    async def retry(self, job_id: UUID, *, connection: Connection | None = None) -> None:
        """Put a job that has ended, however it did, back into its queue, due now.

        It has at least one attempt more; its result, its error and a deadline that has passed are cleared, and how it
        had ended is kept among its attempts. With ``connection`` (asyncpg) it is part of whatever transaction is open
        there. Raises ``JobNotFoundError``, ``IllegalStateTransition`` for a job that has not ended, and
        ``IdempotencyKeyTakenError`` when its key, freed by its end, is another job's now, ``SingletonCollisionError``
        when another job of its singleton actor has not ended.
        """
        await self._reader.control.retry(job_id, connection)

    async def cancel_where(
        self, which: JobFilter, reason: str | None = None, *, allow_empty_filter: bool = False
    ) -> BulkCancelResult:
        """Cancel all jobs that fit and have not ended, as :meth:`cancel` does one. Order, limit, cursor mean nothing.

        It commits 500 at a time, the newest first, so what is interrupted is done in part and may be called again. Jobs
        that are enqueued meanwhile may be left. Raises ``EmptyFilterError`` when all jobs fit, unless
        ``allow_empty_filter``, and ``ValueError`` for a reason that cannot be stored.
        """
        return await self._reader.control.cancel_where(which, reason, allow_empty_filter)

    async def list(self, which: JobFilter | None = None) -> JobPage:
        """Return a page of the jobs that fit, all by default; ``next_cursor`` of it is the ``cursor`` of the next.

        Raises ``ValueError`` for a cursor that is none, or of a page in another order.
        """
        return await self._reader.list(JobFilter() if which is None else which)

    async def list_batches(self, which: BatchFilter | None = None) -> Summaries:
        """Return the newest batches that were opened by ``enqueue_batch`` and the like, newest first."""
        return await self._reader.list_batches(BatchFilter() if which is None else which)

    def handle(self, job_id: UUID, actor: ActorRef[Any, R]) -> JobHandle[R]:
        """Return a handle on a job whose id is known, for waiting on it."""
        check_id("job_id", job_id)
        check_actor("actor", actor)
        return JobHandle(job_id, actor, self._reader)


def _wake_failed(name: str, error: BaseException, streak: int) -> None:
    # Workers poll as well: a lost notification costs latency, never a job.
    _log.warning("wake-up not sent (%d in a row): %s", streak, type(error).__name__)
