"""The quick duties that keep a schema healthy: the tick, and the promotion of due jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.statements import load

PROMOTION_CADENCE = 0.5
"""Seconds between two rounds of promotion, at most: a job may have come that is due before any that was known."""
SHORTEST_WAIT = 0.05
PROMOTION_BATCH = 1000
PROMOTION_SLICE = 0.9
"""Seconds that one round of promotion may take before it lets others at the database."""
REAP_LIMIT = 200
MAX_BACKOFF = 30.0
_BEGINNING = datetime(1, 1, 1, tzinfo=UTC)


class Housekeeping:
    """Runs them on one schema through ``pool``, one round at a time.

    Correctness never depends on being alone: the tick takes an advisory transaction lock that a second caller does not
    wait for, promotion skips locked rows. ``statement_timeout`` bounds each statement, in seconds.
    """

    def __init__(self, pool: Any, schema: str, *, statement_timeout: float) -> None:
        self._pool = pool
        self._sql = load("scheduler", schema)
        self._timeout = statement_timeout
        self._floor = self._looked_until = _BEGINNING
        self._rescan_at = 0.0
        self.ticked_at: float | None = None
        self.promoted_at: float | None = None
        self.promoted = 0
        self.reaped = 0

    async def tick(self) -> dict[str, Any]:
        """Reap expired leases and end jobs past their deadline; return counts, or ``{"skipped": True}``."""
        answer = await self._pool.fetchval(self._sql.tick, REAP_LIMIT, timeout=self._timeout)
        counts: dict[str, Any] = json.loads(answer)
        self.ticked_at = time.monotonic()
        self.reaped += counts.get("reaped", 0)
        return counts

    async def promote(self, stopping: Callable[[], bool], slice_seconds: float = PROMOTION_SLICE) -> tuple[int, bool]:
        """Make due scheduled jobs claimable, in committed batches, for at most ``slice_seconds``.

        Returns how many it was and whether none is left. Starts from where the last batch ended, because each call
        would else walk the dead entries before it; from the beginning at least every ten seconds.
        """
        until = time.monotonic() + slice_seconds
        total = 0
        while True:
            if time.monotonic() >= self._rescan_at:
                self._floor, self._rescan_at = _BEGINNING, time.monotonic() + 10.0
            record = await self._pool.fetchrow(self._sql.promote, PROMOTION_BATCH, self._floor, timeout=self._timeout)
            total += record["promoted"]
            self._looked_until = record["until"]
            if record["promoted"] < PROMOTION_BATCH:
                self._rescan_at = 0.0
                done = True
                break
            self._floor = record["reached"]
            if stopping() or time.monotonic() >= until:
                done = False
                break
        if total:
            await self._pool.execute(self._sql.wake, timeout=self._timeout)
        self.promoted_at = time.monotonic()
        self.promoted += total
        return total, done

    async def next_due(self) -> float | None:
        """Return the seconds until the next scheduled job is due that the last promotion left, None without one."""
        seconds: float | None = await self._pool.fetchval(
            self._sql.next_scheduled, self._looked_until, timeout=self._timeout
        )
        return seconds


class HousekeepingLoops:
    """The two as background loops, each with its own cadence and failures."""

    def __init__(self, core: Housekeeping, *, tick_cadence: float, on_failure: FailureHook) -> None:
        self._core = core
        self._tick = BackgroundLoop(
            "tick", self._run_tick, cadence=tick_cadence, on_failure=on_failure, backoff_cap=MAX_BACKOFF
        )
        self._promotion = BackgroundLoop(
            "promotion", self._run_promotion, cadence=PROMOTION_CADENCE, on_failure=on_failure, backoff_cap=MAX_BACKOFF
        )

    @property
    def loops(self) -> tuple[BackgroundLoop, ...]:
        """The loops, tick first."""
        return self._tick, self._promotion

    def start(self) -> None:
        """Start every duty."""
        for loop in self.loops:
            loop.start()

    async def _run_tick(self) -> float | None:
        counts = await self._core.tick()
        # A full batch means that more may wait.
        return 0.0 if counts.get("reaped") == REAP_LIMIT else None

    async def _run_promotion(self) -> float | None:
        _, done = await self._core.promote(lambda: self._promotion.stopping)
        if not done:
            return 0.0
        wait = await self._core.next_due()
        return None if wait is None or wait > PROMOTION_CADENCE else max(SHORTEST_WAIT, wait)
