"""Claims due jobs for the local queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from taskqd.actors.registry import Registry
from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.floors import Floors
from taskqd.worker.slots import Slots

MAX_CLAIM = 500
STALE_AFTER = 1.0
"""Seconds a claimed row may wait here unstarted; then it goes back to the fleet."""


class Producer:
    """Claims as many jobs as there is room for; sleeps when there is no room, or nothing to claim.

    ``poll_interval`` bounds how long a due job can go unnoticed when every notification is lost.
    ``release(attempts)`` gives unstarted attempts back.
    """

    def __init__(
        self,
        pool: Any,
        schema: str,
        registry: Registry,
        queues: Sequence[str],
        slots: Slots,
        leases: Leases,
        *,
        worker_id: UUID,
        lock_lease: float,
        poll_interval: float,
        command_timeout: float,
        release: Callable[[list[Attempt]], None],
        on_failure: FailureHook,
    ) -> None:
        self._pool = pool
        self._sql = load("worker", schema)
        self._registry = registry
        self._known = sorted(registry)
        self._slots = slots
        self._leases = leases
        self._worker_id = worker_id
        self._lock_lease = lock_lease
        self._command_timeout = command_timeout
        self._release = release
        self._floors = Floors(queues)
        self._drained = False
        self.polls = 0
        """Steps that began since the start: each time this loop looked whether to claim."""
        self.poll_interval = poll_interval
        """Seconds between two of them when nothing wakes it."""
        self.claimed = 0
        """Rows claimed since the start."""
        self.paused = False
        self.loop = BackgroundLoop(
            "producer", self._step, cadence=poll_interval, on_failure=on_failure, backoff_cap=max(1.0, poll_interval)
        )

    def woken(self) -> None:
        """There may be new work: look from the beginning, now."""
        self._drained = False
        self._floors.want_rescan()
        self.loop.wake()

    def room_made(self) -> None:
        """A slot came free. Worth a claim only while the queue was not seen empty."""
        if not self._drained:
            self.loop.wake()

    def pause(self, paused: bool) -> None:
        """Claim nothing while paused."""
        self.paused = paused
        if not paused:
            self.woken()

    async def _step(self) -> float | None:
        self.polls += 1
        stale = self._slots.take_stale(STALE_AFTER)
        if stale:
            self._release(stale)
        room = min(MAX_CLAIM, self._slots.room())
        if self.paused or room == 0:
            return self._pause()
        if self._drained:  # nobody woke us: the poll interval has passed
            self._floors.want_rescan()
        from_beginning = self._floors.rescan_due
        got = await self._claim(room)
        self._drained = got < room and from_beginning
        if not self._drained:
            if got < room:
                self._floors.want_rescan()
            return 0.0
        if got == 0 and await self._maintain():
            self._drained = False
            self._floors.want_rescan()
            return 0.0
        return self._pause()

    async def _maintain(self) -> bool:
        """A little maintenance, so that a fleet without a scheduler still moves; True when it made work claimable."""
        done = await self._pool.fetchrow(self._sql.micro_maintenance, timeout=self._command_timeout)
        return bool(done["reaped"] or done["promoted"])

    def _pause(self) -> float:
        return min(self.poll_interval, STALE_AFTER / 2) if self._slots.waiting else self.poll_interval

    async def _claim(self, room: int) -> int:
        """Claim up to ``room`` rows into the local queue and return how many it was."""
        began = time.monotonic()
        rescan = self._floors.rescan_due
        if rescan:
            heads = await self._pool.fetch(self._sql.heads, self._floors.routes, timeout=self._command_timeout)
            self._floors.reset((head["route"], head["priority"]) for head in heads)
        if not self._floors:
            self._floors.rescanned(time.monotonic() - began)
            return 0
        segments = self._floors.segments()
        records = await self._pool.fetch(
            self._sql.claim,
            room,
            self._worker_id,
            [segment[0] for segment, _ in segments],
            [segment[1] for segment, _ in segments],
            [key[0] for _, key in segments],
            [key[1] for _, key in segments],
            self._known,
            self._lock_lease,
            timeout=self._command_timeout,
        )
        if rescan:
            self._floors.rescanned(time.monotonic() - began)
        if not records:
            return 0
        attempts = []
        for job_id, epoch, actor, payload, number, route, priority, scheduled_at, *rest in records:
            attempt = Attempt(job_id, epoch, self._registry[actor], payload, number, route, scheduled_at, *rest)
            attempts.append(attempt)
            self._leases.add(attempt)
            self._floors.advance((route, priority), (scheduled_at, job_id))
        self.claimed += len(attempts)
        self._slots.put(attempts)
        return len(attempts)
