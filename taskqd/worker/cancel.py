"""Takes the running attempts of cancelled jobs up the ladder: ask, then cancel the task, then give it up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.domain.signals import CancelOrigin
from taskqd.observe.logs import get_logger
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.completer import Completer
from taskqd.worker.consumer import Consumers
from taskqd.worker.outcome import Abandoned

_log = get_logger("taskqd.cancel")


class CancelLadder:
    """Ends the attempts of cancelled jobs, each named by (id, epoch).

    At once its cancel event is set, with the origin OPERATOR: a handler that returns has succeeded, one that raises
    is cancelled. After ``grace`` seconds the row says so and its task is cancelled. After ``cleanup_grace`` more the
    job is abandoned; the slot stays taken until the handler ends. A plain function cannot be cancelled, only asked.
    The process of an isolated attempt is killed instead, and nothing is abandoned.
    """

    def __init__(
        self,
        pool: Any,
        schema: str,
        leases: Leases,
        consumers: Consumers,
        completer: Completer,
        *,
        grace: float,
        cleanup_grace: float,
        command_timeout: float,
    ) -> None:
        self._pool = pool
        self._sql = load("worker", schema)
        self._leases = leases
        self._consumers = consumers
        self._completer = completer
        self._grace = grace
        self._cleanup_grace = cleanup_grace
        self._command_timeout = command_timeout
        self._hurried = asyncio.Event()

    def begin(self, cancelled: Sequence[tuple[UUID, int]]) -> None:
        """Start with these (job id, epoch); what is on its way already, or not here, is left alone."""
        wanted = set(cancelled)
        for attempt in self._leases.snapshot():
            if (attempt.job_id, attempt.epoch) in wanted and attempt.climb is None and not attempt.given_up:
                _log.info("cancel-requested", job_id=str(attempt.job_id), actor=attempt.ref.name)
                attempt.cancellation.request(CancelOrigin.OPERATOR)
                if self._consumers.is_running(attempt):
                    attempt.climb = asyncio.create_task(self._climb(attempt), name=f"cancel-{attempt.job_id}")

    def hurry(self, hurried: bool = True) -> None:
        """Skip the first grace, of those on their way and, until taken back, of all that follow."""
        if hurried:
            self._hurried.set()
        else:
            self._hurried.clear()

    async def _climb(self, attempt: Attempt) -> None:
        """Runs until the handler ends; the consumer cancels it then."""
        try:
            async with asyncio.timeout(self._grace):
                await self._hurried.wait()
        except TimeoutError:
            pass
        await self._record_force(attempt)
        self._consumers.cancel(attempt)
        if attempt.ref.isolated:
            return  # its process is killed by then, and the attempt ends
        await asyncio.sleep(self._cleanup_grace)
        if self._consumers.is_running(attempt) and not attempt.given_up and not attempt.disowned:
            _log.warning("cancel-ignored", job_id=str(attempt.job_id), actor=attempt.ref.name)
            self.abandon(attempt)

    def abandon(self, attempt: Attempt) -> None:
        """Settle an attempt as abandoned though its handler runs on."""
        assert attempt.started_at is not None  # noqa: S101 - only running handlers climb
        attempt.given_up = True
        self._completer.submit(Abandoned(attempt, time.monotonic() - attempt.started_at))

    async def _record_force(self, attempt: Attempt) -> None:
        try:
            await self._pool.execute(
                self._sql.force_cancel, attempt.job_id, attempt.epoch, timeout=self._command_timeout
            )
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            # The task is cancelled all the same; only the row's word for how it ended is the milder one.
            _log.warning("cancel-phase-not-recorded", job_id=str(attempt.job_id), error=type(error).__name__)
