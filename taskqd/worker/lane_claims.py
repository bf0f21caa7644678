"""Claims from lanes that are limited, take turns, or hold one identity each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.actors.registry import Registry
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.lanes import Lanes, Unit
from taskqd.worker.rules import Rules
from taskqd.worker.slots import Slots

NO_CLAIM = (None,) * 5
"""The arguments of a settlement that carries no claim."""
TURN_TIMEOUT = 0.1
"""Seconds that a claim waits for one under way; what nothing limits is claimed after it, and must not wait for long."""


class Relay:
    """A claim that a settlement may carry, so that what it gives back is taken up in the same commit.

    ``arguments`` are those of ``settle_succeeded`` for it.
    """

    __slots__ = ("arguments", "records")

    def __init__(self, arguments: tuple[Any, ...] = NO_CLAIM) -> None:
        self.arguments = arguments
        self.records: Sequence[Any] = ()
        """What the settlement answered."""

    @property
    def carries(self) -> bool:
        """False where a claim is under way, or none may begin: what is given back must be told then."""
        return self.arguments is not NO_CLAIM


class LaneClaims:
    """One claim at a time, from what ``lanes`` knows of."""

    def __init__(
        self,
        pool: Any,
        sql: Any,
        registry: Registry,
        slots: Slots,
        leases: Leases,
        *,
        worker_id: UUID,
        lock_lease: float,
        command_timeout: float,
    ) -> None:
        self._pool = pool
        self._sql = sql
        self._registry = registry
        self._slots = slots
        self._leases = leases
        self._worker_id = worker_id
        self._lock_lease = lock_lease
        self._command_timeout = command_timeout
        self._turn = asyncio.Lock()
        self.lanes = Lanes()
        self.left_some = False
        """True once a claim left something that may be claimed at once."""
        self.claimed = 0
        """Rows claimed since the start."""

    async def claim(self, room: int, units: Iterable[Unit], rules: Rules) -> int:
        """Claim up to ``room`` rows of ``units`` into the local queue and return how many it was; none while a
        settlement that carries a claim is held up."""
        try:
            async with asyncio.timeout(TURN_TIMEOUT):
                await self._turn.acquire()
        except TimeoutError:
            self.left_some = True
            return 0
        try:
            self.lanes.freed = 0
            units = [unit for unit in units if unit.try_at <= time.monotonic() and unit.route not in rules.paused]
            if not units:
                return 0
            try:
                records = await self._pool.fetch(
                    self._sql.claim_lanes, *self._arguments(room, units, rules), timeout=self._command_timeout
                )
            except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
                self.lanes.contended(units)
                return 0
            return self._take(units, map(tuple, records))
        finally:
            self._turn.release()

    @asynccontextmanager
    async def relay(self, attempts: Sequence[Attempt], rules: Rules) -> AsyncIterator[Relay]:
        """Let the settlement of ``attempts`` carry a claim; what it answered is to be in ``records`` at the end."""
        if self._turn.locked():
            yield Relay()
            return
        async with self._turn:
            for attempt in attempts:
                self.lanes.free(attempt)
            self.lanes.freed = 0
            units = [unit for unit in self.lanes.open() if unit.route not in rules.paused]
            relay = Relay(self._arguments(min(len(attempts), self._slots.size), units, rules))
            try:
                yield relay
            except BaseException:
                self.lanes.contended(units)
                raise
            self._take(units, (tuple(record)[1:] for record in relay.records))

    async def wait(self, timeout: float) -> None:
        """Wait until the claim under way has ended, for ``timeout`` seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._turn:
                pass

    def _arguments(self, room: int, units: Sequence[Unit], rules: Rules) -> tuple[Any, ...]:
        return (room, self._worker_id, self._lock_lease, rules.plain, self.lanes.requests(units))

    def _take(self, units: Sequence[Unit], rows: Iterable[tuple[Any, ...]]) -> int:
        taken: list[list[Attempt]] = [[] for _ in units]
        for number, note, lane, job_id, epoch, actor, payload, tried, route, _, scheduled_at, *rest in rows:
            if number is None:
                continue  # a settlement that carried nothing, or applied to nothing
            if job_id is None:
                self.left_some |= self.lanes.noted(units[number], note, lane, taken[number])
                continue
            attempt = Attempt(job_id, epoch, self._registry[actor], payload, tried, route, scheduled_at, *rest)
            attempt.lane = lane
            attempt.gated = bool(units[number].gates)
            taken[number].append(attempt)
        for unit, attempts in zip(units, taken, strict=True):
            for attempt in attempts:
                self._leases.add(attempt)  # only once all is understood: what is not begun must not be renewed
            if unit.kind == "fair":
                attempts = _in_turns(attempts)
            self._slots.put(attempts, first=unit.kind != "fair" or bool(unit.gates))
        got = sum(map(len, taken))
        self.claimed += got
        return got


def _in_turns(attempts: Sequence[Attempt]) -> list[Attempt]:
    """One of each lane, then the second of each, and so on."""
    seen: dict[str, int] = {}
    ranked = []
    for attempt in attempts:
        rank = seen[attempt.lane] = seen.get(attempt.lane, -1) + 1
        ranked.append((rank, attempt))
    return [attempt for _, attempt in sorted(ranked, key=lambda one: one[0])]
