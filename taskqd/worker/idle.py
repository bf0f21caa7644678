"""Ends a worker once its queues are empty: ``taskqd worker --until-idle``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.domain.exit_codes import ExitCode
from taskqd.observe.logs import get_logger
from taskqd.storage.statements import load

CADENCE = 1.0
SETTLE = 2.0
"""Seconds that the queues must stay empty: a job may be about to enqueue the next."""

_log = get_logger("taskqd.worker")


class IdleWatch:
    """Looks each second whether any job of these queues and actors is scheduled, pending or running, anywhere.

    Calls ``on_end(code)`` once: DONE when none was for two seconds and none has ended badly since the worker
    registered, KILLED (3) when some has, in whichever worker, TIMED_OUT after ``max_runtime`` seconds (None: as long as
    it takes). All is counted in the database. While that cannot be asked, nothing is idle.
    """

    def __init__(
        self,
        pool: Any,
        schema: str,
        queues: Sequence[str],
        actors: Sequence[str],
        worker_id: UUID,
        *,
        max_runtime: float | None,
        command_timeout: float,
        on_end: Callable[[ExitCode], None],
        on_failure: FailureHook,
    ) -> None:
        self._pool = pool
        self._sql = load("worker", schema)
        self._jobs = (list(queues), list(actors))
        self._worker_id = worker_id
        self._max_runtime = max_runtime
        self._command_timeout = command_timeout
        self._on_end = on_end
        self._idle_since: float | None = None
        self._limit: asyncio.TimerHandle | None = None
        self.loop = BackgroundLoop("idle-watch", self._step, cadence=CADENCE, on_failure=on_failure)

    def start(self) -> None:
        """Start looking."""
        if self._max_runtime is not None:
            self._limit = asyncio.get_running_loop().call_later(self._max_runtime, self._too_long)
        self.loop.start()

    async def stop(self) -> None:
        """Look no more."""
        if self._limit is not None:
            self._limit.cancel()
        await self.loop.stop(0.1)

    async def _step(self) -> None:
        if await self._ask(self._sql.any_active, *self._jobs):
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now - self._idle_since >= SETTLE:
            failed = await self._ask(self._sql.ended_badly, *self._jobs, self._worker_id)
            _log.info("until-idle-reached", failed=failed)
            self._on_end(ExitCode.KILLED if failed else ExitCode.DONE)

    async def _ask(self, statement: str, *arguments: Any) -> Any:
        return await self._pool.fetchval(statement, *arguments, timeout=self._command_timeout)

    def _too_long(self) -> None:
        _log.warning("until-idle-gave-up", max_runtime=self._max_runtime)
        self._on_end(ExitCode.TIMED_OUT)
