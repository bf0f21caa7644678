"""Tells the application's error reporter of jobs that have failed for good."""

from __future__ import annotations

import asyncio
from collections import deque
from uuid import UUID

from taskqd.actors.reporter import ErrorReporter
from taskqd.client.reads import JobReader
from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.domain.errors import RecordedError
from taskqd.observe.logs import get_logger
from taskqd.worker.outcome import Failed, Outcome

TIMEOUT = 3.0
"""Seconds that one report may take."""
AT_ONCE = 8
"""Reports that run at the same time."""
MAX_WAITING = 1_000
"""Ends that wait here to be reported; more are counted and dropped."""

_log = get_logger("taskqd.reporter")


class ErrorReports:
    """Calls an :class:`ErrorReporter` for each end that this worker settles as failed, a few at a time."""

    def __init__(self, reporter: ErrorReporter, reader: JobReader, *, on_failure: FailureHook) -> None:
        self._reporter = reporter
        self._reader = reader
        self._waiting: deque[tuple[UUID, BaseException | None]] = deque()
        self._reporting = 0
        self.kind = type(reporter).__name__
        """What the reporter is called in metrics."""
        self.failures = 0
        """Reports that failed, took too long or were dropped."""
        self.loop = BackgroundLoop("error-reporter", self._step, cadence=60.0, on_failure=on_failure)

    def ended(self, outcome: Outcome, status: str) -> None:
        """Take an end that was just settled; ``status`` is the job's now."""
        if status != "failed":
            return
        if len(self._waiting) >= MAX_WAITING:
            self._failed(outcome.attempt.job_id, "too many wait")
            return
        error = outcome.error if isinstance(outcome, Failed) else None
        self._waiting.append((outcome.attempt.job_id, error))
        self.loop.wake()

    async def finish(self, timeout: float) -> None:
        """Report what can be within ``timeout`` seconds. Call it at the end."""
        try:
            async with asyncio.timeout(timeout):
                while self._waiting or self._reporting:
                    self.loop.wake()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            _log.warning("error-reports-dropped", reports=len(self._waiting) + self._reporting)
        await self.loop.stop(0.1)

    async def _step(self) -> float:
        group = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        self._reporting = len(group)
        try:
            await asyncio.gather(*(self._report(*end) for end in group))
        finally:
            self._reporting = 0
        return 0.0 if self._waiting else self.loop.cadence

    async def _report(self, job_id: UUID, error: BaseException | None) -> None:
        try:
            async with asyncio.timeout(TIMEOUT):
                row = await self._reader.find(job_id)
                if row is not None:
                    exception = error or RecordedError(row.error_class or "", row.error_message or "")
                    await self._reporter.report(row, exception)
        except Exception as problem:
            self._failed(job_id, f"{type(problem).__name__}: {problem}")

    def _failed(self, job_id: UUID, why: str) -> None:
        self.failures += 1
        _log.warning("error-report-failed", reporter=self.kind, job_id=str(job_id), error=why)
