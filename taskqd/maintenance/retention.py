"""Retention: ended jobs move to the archive, and what has been kept for its time goes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.settings import Settings
from taskqd.storage.statements import load

CADENCE, SHORTEST_CADENCE = 60.0, 1.0
"""Seconds between two rounds, where little is found, and where much is: rather often and little than all at once."""
SLICE = 5.0
"""Seconds that a round may take before it lets others at the database; it goes on half a second later."""
BATCH_TIMEOUT = 1.75
"""Seconds that one batch may take; one that takes longer is undone, and the next is half as large."""
LEDGER_TIMEOUT = 10.0
"""Seconds that it may take to note where a walk began or was broken off: a commit, which a busy disk delays."""
MIN_BATCH = 50
GROW_AFTER = 5
"""Batches in a row that were quick enough for a larger one."""
KEEP_DECISIONS = 90 * 86400.0
_BEGINNING = (datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))


class BatchSize:
    """How many rows a batch takes: halved when one was too slow, grown by half after five that were not."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = most
        self._quick = 0

    def was_quick(self) -> None:
        """A batch came through."""
        self._quick += 1
        if self._quick >= GROW_AFTER and self.size < self.most:
            self._quick = 0
            self.size = min(self.most, self.size + max(1, self.size // 2))

    def was_slow(self) -> None:
        """A batch was undone."""
        self._quick = 0
        self.size = max(min(MIN_BATCH, self.most), self.size // 2)


class Retention:
    """Runs the duties of retention through ``pool``, one batch at a time, each in a transaction of its own.

    Two that run at once share the work. A round that is broken off, by a stop or by its slice, leaves where it was in
    the table ``maintenance``, and whoever comes next goes on from there.
    """

    def __init__(self, pool: Any, schema: str, settings: Settings) -> None:
        self._pool = pool
        self._sql = load("retention", schema)
        self._settings = settings
        self._floor, self._rescan_at = _BEGINNING, 0.0
        self.batch = BatchSize(settings.prune_batch_size)
        self.archived = 0
        """Jobs moved to the archive since the start."""
        self.expired = 0
        """Archived jobs deleted since the start."""

    async def run(self, stopping: Callable[[], bool], slice_seconds: float = SLICE) -> bool:
        """One round of every duty, for at most ``slice_seconds``; True when all of them found nothing more."""
        until = time.monotonic() + slice_seconds
        settings = self._settings
        done = await self._archive(stopping, until)
        kept = max(settings.prune_retention_failed, settings.prune_retention_abandoned)
        ended, expired = await self._drain("expire_archive", (), stopping, until)
        self.expired += expired
        done &= ended
        duties = [("prune_decisions", KEEP_DECISIONS), ("prune_batches", kept)]
        if settings.event_retention_period:
            duties.append(("prune_events", settings.event_retention_period))
        for statement, age in duties:
            ended, _ = await self._drain(statement, (age,), stopping, until)
            done &= ended
        return done

    async def _archive(self, stopping: Callable[[], bool], until: float) -> bool:
        """Walk over the ends that are old enough, from where the last walk came to, because each would else pass all
        dead entries before it; from the beginning at least every CADENCE seconds, because some were left for later."""
        settings = self._settings
        stored = await self._pool.fetchval(self._sql.begin_duty, "archive", timeout=LEDGER_TIMEOUT)
        if time.monotonic() >= self._rescan_at:
            self._floor, self._rescan_at = _BEGINNING, time.monotonic() + CADENCE
        at, job = self._floor
        if stored is not None:
            cursor = json.loads(stored)
            at, job = datetime.fromisoformat(cursor["at"]), UUID(cursor["id"])
        while not (broken := stopping() or time.monotonic() >= until):
            record = await self._within(
                self._pool.fetchrow,
                "archive",
                at,
                job,
                settings.prune_retention_succeeded,
                settings.prune_retention_failed,
                settings.prune_retention_cancelled,
                settings.prune_retention_abandoned,
                settings.archive_retention_period,
            )
            if record is None:
                continue
            size, answer = record
            self.archived += answer["done"]
            if answer["held"]:
                self._rescan_at = 0.0
            if answer["looked"]:
                self._floor = at, job = answer["at"], answer["id"]
            if answer["looked"] < size:
                break
        left = json.dumps({"at": at.isoformat(), "id": str(job)}) if broken and (at, job) != _BEGINNING else None
        await self._pool.execute(self._sql.end_duty, "archive", left, timeout=LEDGER_TIMEOUT)
        return not broken

    async def _drain(
        self, statement: str, arguments: tuple[Any, ...], stopping: Callable[[], bool], until: float
    ) -> tuple[bool, int]:
        """Run batches until one finds less than it may take; return whether one did, and the rows deleted.

        One batch runs though the time be over: no duty starves while another has much to do.
        """
        total = 0
        while not stopping():
            if (found := await self._within(self._pool.fetchval, statement, *arguments)) is not None:
                size, deleted = found
                total += deleted
                if deleted < size:
                    return True, total
            if time.monotonic() >= until:
                break
        return False, total

    async def _within(self, fetch: Callable[..., Any], statement: str, *arguments: Any) -> tuple[int, Any] | None:
        """Run one batch; None when it was too slow, and undone."""
        size = self.batch.size
        try:
            answer = await fetch(self._sql[statement], size, *arguments, timeout=BATCH_TIMEOUT)
        except (TimeoutError, asyncpg.QueryCanceledError):
            if size <= MIN_BATCH:
                raise
            self.batch.was_slow()
            return None
        self.batch.was_quick()
        return size, answer


class RetentionLoop:
    """Runs the rounds of retention until stopped: soon after one that filled a batch, ever later after others."""

    def __init__(self, retention: Retention, *, on_failure: FailureHook) -> None:
        self._retention = retention
        self._pause = SHORTEST_CADENCE
        self.loop = BackgroundLoop(
            "retention", self._step, cadence=CADENCE, on_failure=on_failure, backoff=SLICE, backoff_cap=30 * CADENCE
        )

    async def _step(self) -> float | None:
        retention = self._retention
        before = retention.archived + retention.expired
        done = await retention.run(lambda: self.loop.stopping)
        much = retention.archived + retention.expired - before >= retention.batch.size
        self._pause = SHORTEST_CADENCE if much else min(CADENCE, self._pause * 2)
        return self._pause if done else SLICE / 10
