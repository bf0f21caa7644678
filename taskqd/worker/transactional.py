"""Attempts inside transactions: what an actor writes and its success are committed together, or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from taskqd.client.enqueue import Enqueuer
from taskqd.client.jobs import Jobs
from taskqd.client.wake import Wakes, WakeSender
from taskqd.observe.logs import get_logger
from taskqd.storage.connect import SESSION_LOST
from taskqd.storage.statements import load
from taskqd.storage.swap import SwapPool
from taskqd.worker.attempt import Attempt
from taskqd.worker.completer import BAD_DATA, Completer, unstorable
from taskqd.worker.lane_claims import NO_CLAIM
from taskqd.worker.outcome import CommitLost, Outcome, Overran, Succeeded
from taskqd.worker.progress import ProgressWriter

ACQUIRE_TIMEOUT = 10.0
"""Seconds that a slot waits for its connection; then its job is left to its lease."""
ROLLBACK_TIMEOUT = 5.0
"""Seconds that a rollback may take; then the connection is cut, which does it too."""
LOCKED_FOR = 30.0
"""Seconds that a job's row may be locked by somebody else when it is to be settled; then all is rolled back."""
NOBODY = [None] * 9
"""Fills the arrays of a settlement up to the ten that a generic plan expects: else it looks dearer than planning anew,
and each settlement is planned, which takes twice as long as the rest of it."""
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 1.0

_log = get_logger("taskqd.transactional")


class Slot(Wakes):
    """The connection of one attempt, and what enqueues on it."""

    __slots__ = ("_enqueued", "_enqueuer", "connection")

    def __init__(self, connection: Any, enqueuer: Enqueuer) -> None:
        self.connection = connection
        self._enqueuer = enqueuer
        self._enqueued = False

    def jobs(self) -> Jobs:
        """Return what ``ctx.jobs`` is."""
        return Jobs(_OneConnection(self.connection), self._enqueuer, self)

    def request(self) -> None:
        """Note that workers are to be woken, once it is committed."""
        self._enqueued = True

    @property
    def enqueued(self) -> bool:
        """True when there is something to wake workers for."""
        return self._enqueued


class SlotTransactions:
    """The transactions of a worker's slots: each attempt on a connection of its own."""

    def __init__(
        self,
        pool: SwapPool,
        enqueuer: Enqueuer,
        wake: WakeSender,
        completer: Completer,
        progress: ProgressWriter,
        *,
        command_timeout: float,
    ) -> None:
        self.pool = pool
        self._enqueuer = enqueuer
        self._wake = wake
        self._completer = completer
        self._progress = progress
        self._sql = load("worker", enqueuer.schema)
        self._command_timeout = command_timeout
        self.acquire_failures = 0
        """Attempts that got no connection and were left to their leases."""
        self.trouble = ""
        """Why the last attempt that asked for a connection got none, empty when it got one."""

    async def run(self, attempt: Attempt, work: Callable[[Slot], Awaitable[Succeeded]]) -> Outcome | None:
        """Do ``work`` inside a transaction and settle its success in it.

        Return None when that is settled, or nobody wants it any more, and what the completer is to settle otherwise.
        Raises what ``work`` raises, once everything is rolled back.
        """
        taken = False
        answer: list[Outcome | None] = []
        try:
            async with self.pool.acquire(timeout=ACQUIRE_TIMEOUT) as connection:
                taken = True
                self.trouble = ""
                answer.append(await self._run_on(connection, attempt, work))
        except Exception as error:
            if not taken:
                self._no_connection(attempt, error)
                return None
            if not answer:
                raise
            _log.warning("slot-conn-not-reset", error=f"{type(error).__name__}: {error}")
        return answer[0]

    def _no_connection(self, attempt: Attempt, error: Exception) -> None:
        self.acquire_failures += 1
        self.trouble = str(error) or type(error).__name__
        _log.error(
            "slot-pool-acquire-failed",
            job_id=str(attempt.job_id),
            actor=attempt.ref.name,
            error=f"{type(error).__name__}: {error}",
        )
        self._completer.leave(attempt)

    async def _run_on(
        self, connection: Any, attempt: Attempt, work: Callable[[Slot], Awaitable[Succeeded]]
    ) -> Outcome | None:
        transaction = connection.transaction()
        try:
            async with asyncio.timeout(self._command_timeout):
                await transaction.start()
            attempt.started_at = time.monotonic()
            slot = Slot(connection, self._enqueuer)
            outcome = await work(slot)
            if not connection.is_in_transaction():
                raise RuntimeError("the actor ended the transaction of its job, which only its return may do")
            if attempt.given_up or attempt.disowned:
                await self._undo(attempt, connection, transaction)
                return None
            attempt.ended_at = time.monotonic()
            await self._progress.store_last([attempt])
            if not await self._settle(connection, outcome):
                await self._undo(attempt, connection, transaction)
                self._completer.drop(outcome)
                return None
        except BAD_DATA as error:
            await self._undo(attempt, connection, transaction)
            if attempt.ended_at is None:
                raise
            return unstorable(outcome, error)
        except BaseException as error:
            cut = attempt.forced or isinstance(error, (asyncio.CancelledError, Overran))
            await self._undo(attempt, connection, transaction, cut=cut)
            raise
        return await self._commit(connection, transaction, slot, outcome)

    async def _settle(self, connection: Any, outcome: Succeeded) -> bool:
        """Settle the success in the open transaction; False when the job is no longer this attempt's."""
        attempt = outcome.attempt
        until = time.monotonic() + LOCKED_FOR
        pause = FIRST_PAUSE
        while True:
            applied = await connection.fetchval(
                self._sql.settle_succeeded,
                [attempt.job_id, *NOBODY],
                [attempt.epoch, *NOBODY],
                [outcome.seconds, *NOBODY],
                [outcome.result, *NOBODY],
                *NO_CLAIM,
                timeout=self._command_timeout,
            )
            if applied:
                return True
            state = await connection.fetchrow(
                self._sql.settle_state, [attempt.job_id], [attempt.epoch], timeout=self._command_timeout
            )
            if not state["held"]:
                return False
            if time.monotonic() > until:
                raise TimeoutError(f"the job's row was locked by another session for {LOCKED_FOR:g} s")
            await asyncio.sleep(pause)  # its heartbeat, or a person, has it for a moment
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _commit(self, connection: Any, transaction: Any, slot: Slot, outcome: Succeeded) -> Outcome | None:
        attempt = outcome.attempt
        try:
            async with asyncio.timeout(self._command_timeout):
                await transaction.commit()
        except BaseException as error:
            if isinstance(error, asyncpg.PostgresError) and not isinstance(error, SESSION_LOST):
                raise  # the database refused it, and has rolled back
            self._cut(attempt, connection)
            # It may have been committed although nobody heard of it: the row tells.
            return CommitLost(
                attempt,
                outcome.seconds,
                type(error).__name__,
                f"the connection was lost at the commit: {error}",
                None,
                error=error if isinstance(error, Exception) else None,
            )
        self._completer.settled(outcome)
        if slot.enqueued:
            self._wake.request()
        return None

    async def _undo(self, attempt: Attempt, connection: Any, transaction: Any, *, cut: bool = False) -> None:
        """Roll back. A connection that was cancelled in the middle, or does not answer, serves no other attempt."""
        try:
            async with asyncio.timeout(ROLLBACK_TIMEOUT):
                await transaction.rollback()
        except BaseException:
            cut = True
        if cut:
            self._cut(attempt, connection)

    def _cut(self, attempt: Attempt, connection: Any) -> None:
        _log.warning("slot-conn-terminated-transaction-in-flight", job_id=str(attempt.job_id), actor=attempt.ref.name)
        with suppress(asyncpg.InterfaceError):  # it is gone already
            connection.terminate()


class _OneConnection:
    """Looks like a pool, as far as ``ctx.jobs`` uses one: a single connection, one user at a time."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        async with self._turn:
            return await self._connection.fetch(query, *args, timeout=timeout)

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        async with self._turn:
            return await self._connection.fetchrow(query, *args, timeout=timeout)

    async def fetchval(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        async with self._turn:
            return await self._connection.fetchval(query, *args, timeout=timeout)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        async with self._turn:
            return await self._connection.execute(query, *args, timeout=timeout)

    @asynccontextmanager
    async def acquire(self, *, timeout: float | None = None) -> AsyncIterator[Any]:
        async with self._turn:
            yield self._connection
