"""Stores what actors report of their progress, in groups and between times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskqd.actors.progress import Progress
from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.observe.logs import get_logger
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt

MAX_GROUP = 1000

_log = get_logger("taskqd.progress")


class ProgressWriter:
    """Writes the latest progress of each attempt every ``interval`` seconds, and once more before it is settled.

    Progress is news, not an outcome: what cannot be written is logged and tried again with the next, and an attempt
    that is no longer the row's writes nothing.
    """

    def __init__(
        self,
        pool: Any,
        schema: str,
        *,
        interval: float,
        size_limit: int,
        command_timeout: float,
        on_failure: FailureHook,
    ) -> None:
        self._pool = pool
        self._sql = load("worker", schema)
        self._size_limit = size_limit
        self._command_timeout = command_timeout
        self._changed: set[Attempt] = set()
        self.loop = BackgroundLoop("progress", self._step, cadence=interval, on_failure=on_failure)

    def open(self, attempt: Attempt) -> Progress:
        """Return the progress of an attempt, beginning with what its job has stored."""
        if attempt.progress is None:
            attempt.progress = Progress(
                attempt.progress_stored, attempt.progress_seq, self._size_limit, lambda: self._changed.add(attempt)
            )
        return attempt.progress

    async def store_last(self, attempts: Sequence[Attempt]) -> None:
        """Write what these attempts have reported, before they are settled."""
        last = [attempt for attempt in attempts if attempt.progress is not None and attempt.progress.unstored]
        if not last:
            return
        try:
            await self._store(last)
        except Exception as error:
            # Whatever it is, the outcomes of these attempts are waiting to be written.
            _log.warning("progress-not-stored", jobs=len(last), error=type(error).__name__)

    async def _step(self) -> None:
        while self._changed and not self.loop.stopping:
            changed = [self._changed.pop() for _ in range(min(MAX_GROUP, len(self._changed)))]
            try:
                await self._store(changed)
            except BaseException:
                self._changed.update(changed)
                raise

    async def _store(self, attempts: Sequence[Attempt]) -> None:
        news = []
        for attempt in sorted(attempts, key=lambda attempt: attempt.job_id):
            self._changed.discard(attempt)
            if attempt.progress is not None and attempt.progress.unstored:
                news.append((attempt, *attempt.progress.text()))
        if not news:
            return
        await self._pool.execute(
            self._sql.store_progress,
            [attempt.job_id for attempt, _, _ in news],
            [attempt.epoch for attempt, _, _ in news],
            [seq for _, seq, _ in news],
            [text for _, _, text in news],
            timeout=self._command_timeout,
        )
        for attempt, seq, _ in news:
            assert attempt.progress is not None  # noqa: S101 - it has news
            attempt.progress.stored(seq)
