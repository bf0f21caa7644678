"""Claims due jobs for the local queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.actors.registry import Registry
from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.floors import Floors
from taskqd.worker.lane_claims import LaneClaims, Relay
from taskqd.worker.rules import FRESH, MAX_AGE, Rules
from taskqd.worker.slots import Slots

MAX_CLAIM = 500
MAX_BESIDE_LIMITED = 128
"""The same while limited jobs wait too, whose every commit waits for a processor and for what is written before."""
STALE_AFTER = 1.0
"""Seconds a claimed row may wait here unstarted; then it goes back to the fleet."""
WARM = 0.03
"""Seconds between two claims that found something, at most, while jobs come in a stream."""
GLANCE = 0.005
"""Seconds between two glances then: those who enqueue a stream wake us less often than that."""
RELANE_EVERY = 1.0
MAX_RELANED = 20_000
"""Rows that one look moves before it claims again."""


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
        self._queues = list(queues)
        self._rules = Rules(self._known)
        self._rules_read = -MAX_AGE
        self._lanes_first = False
        self._relane_at = 0.0
        self._keyed_after: dict[str, str | None] = {}
        self._slots = slots
        self._leases = leases
        self._worker_id = worker_id
        self._lock_lease = lock_lease
        self._lane_claims = LaneClaims(
            pool,
            self._sql,
            registry,
            slots,
            leases,
            worker_id=worker_id,
            lock_lease=lock_lease,
            command_timeout=command_timeout,
        )
        self._lanes = self._lane_claims.lanes
        self._command_timeout = command_timeout
        self._release = release
        self._floors = Floors(queues)
        self._drained = False
        self._was_drained = False
        """Woken after a look found nothing left."""
        self._found_at = self._warm_until = float("-inf")
        self.polls = 0
        """Steps that began since the start: each time this loop looked whether to claim."""
        self.poll_interval = poll_interval
        """Seconds between two of them when nothing wakes it."""
        self._claimed = 0
        self.paused = False
        self.loop = BackgroundLoop(
            "producer", self._step, cadence=poll_interval, on_failure=on_failure, backoff_cap=max(1.0, poll_interval)
        )
        self._claiming = False
        self._freed_loop = BackgroundLoop("producer-freed", self._step_freed, cadence=60.0, on_failure=on_failure)

    def start(self) -> None:
        """Start to claim."""
        self.loop.start()
        self._freed_loop.start()

    async def stop(self, timeout: float) -> None:
        """Claim nothing more; let a claim under way finish within ``timeout`` seconds."""
        await asyncio.gather(self.loop.stop(timeout), self._freed_loop.stop(timeout), self._lane_claims.wait(timeout))

    @property
    def claimed(self) -> int:
        """Rows claimed since the start."""
        return self._claimed + self._lane_claims.claimed

    def woken(self) -> None:
        """There may be new work: look from the beginning, now where nothing was left, else as soon as that is cheap."""
        if self._drained:
            self._was_drained, self._drained = True, False
            self._floors.want_rescan()
        else:
            self._floors.hasten()
        self.loop.wake()

    def room_made(self) -> None:
        """A slot came free. Worth a claim only while the queue was not seen empty."""
        if not self._drained:
            self.loop.wake()

    def pause(self, paused: bool) -> None:
        """Claim nothing while paused."""
        self.paused = paused
        if not paused:
            self._floors.want_rescan()
            self.loop.wake()

    def freed(self, attempt: Attempt) -> None:
        """An attempt gave back a limit, or an identity, that another job may wait for."""
        self._lanes.free(attempt)
        (self._freed_loop if self._claiming else self.loop).wake()

    @asynccontextmanager
    async def relay(self, attempts: Sequence[Attempt]) -> AsyncIterator[Relay]:
        """Let the settlement of ``attempts``, which gives back what others wait for, carry the claim of those."""
        if self.paused or self.loop.stopping or not self._lanes or self._rules_age >= MAX_AGE:
            yield Relay()
            return
        async with self._lane_claims.relay(attempts, self._rules) as relay:
            yield relay

    async def _step(self) -> float | None:
        self.polls += 1
        stale = self._slots.take_stale(STALE_AFTER)
        if stale:
            self._release(stale)
        room = min(MAX_BESIDE_LIMITED if self._floors and self._lanes.limited else MAX_CLAIM, self._slots.room())
        if self.paused:
            return self._pause()
        if room == 0:
            # The local queue is full of what nothing limits: what was given back is still taken up at once.
            return 0.0 if await self._take_freed() else self._pause()
        glances = self._drained and self._warm and not self._floors.rescan_due
        if self._drained and not glances:  # nobody woke us: the poll interval has passed
            self._floors.want_rescan()
        from_beginning = self._floors.rescan_due
        self._claiming = True
        try:
            got = await self._glance(room) if glances or self._was_drained else 0
            if got:
                await asyncio.sleep(0)  # what was found begins before the look is sent
            if got < room and not glances:
                got += await self._claim(room - got)
        finally:
            self._claiming = self._was_drained = False
        self._found(got)
        if glances and got < room:
            return self._pause()
        self._drained = got < room and from_beginning and not self._lane_claims.left_some
        if not self._drained:
            if got < room:
                self._floors.want_rescan()
            return 0.0
        if got == 0 and await self._maintain():
            self._drained = False
            self._floors.want_rescan()
            return 0.0
        return self._pause()

    async def _step_freed(self) -> None:
        """Take up what was given back while a claim is under way, of what nothing limits for the most part."""
        if not self.paused:
            await self._take_freed()

    async def _take_freed(self) -> int:
        freed = min(self._lanes.freed, self._slots.size)
        if freed and self._rules_age >= MAX_AGE and await self._read_rules():
            await self._look()
        return await self._lane_claims.claim(freed, self._lanes.open(), self._rules) if freed else 0

    async def _maintain(self) -> bool:
        """A little maintenance, so that a fleet without a scheduler still moves; True when it made work claimable."""
        try:
            done = await self._pool.fetchrow(self._sql.micro_maintenance, timeout=self._command_timeout)
        except asyncpg.LockNotAvailableError:
            return False  # somebody holds a gate that a dead worker's job gives back
        return bool(done["reaped"] or done["promoted"])

    def _pause(self) -> float:
        pause = min(self.poll_interval, STALE_AFTER / 2) if self._slots.waiting else self.poll_interval
        if self._drained and self._warm:
            pause = min(pause, GLANCE)
        closed = self._lanes.next_open() if self._drained else None
        return pause if closed is None else min(pause, closed)

    # -- claiming -----------------------------------------------------------------------------------

    async def _glance(self, room: int) -> int:
        """Claim where rows were found before, without a look: most often what woke us is there, a round trip sooner.

        What stands anywhere else waits for the look that follows, or is due within a second.
        """
        if self._lanes or self._rules_age >= MAX_AGE:
            return 0
        open_now = {route for route in self._queues if self._rules.is_plain(route)} - self._rules.paused
        segments = [segment for segment in self._floors.recent() if segment[0][0] in open_now]
        return await self._claim_plain(room, segments) if segments else 0

    def _found(self, got: int) -> None:
        now = time.monotonic()
        if got:
            if now - self._found_at < WARM:
                self._warm_until = now + WARM
            self._found_at = now

    @property
    def _warm(self) -> bool:
        """True while jobs come in a stream."""
        return time.monotonic() < self._warm_until

    async def _claim(self, room: int) -> int:
        """Claim up to ``room`` rows into the local queue and return how many it was."""
        began = time.monotonic()
        self._lane_claims.left_some = False
        if self._rules_age >= MAX_AGE:
            await self._read_rules()
        rescan = self._floors.rescan_due
        if rescan:
            await self._look()
        got = 0
        for lanes, parts in self._plan():
            if got < room and lanes:
                got += await self._lane_claims.claim(room - got, parts, self._rules)
            elif got < room:
                got += await self._claim_plain(room - got, parts)
        if rescan:
            self._floors.rescanned(time.monotonic() - began)
        if self._rules_age >= FRESH and await self._read_rules():
            self._lane_claims.left_some = True
        return got

    @property
    def _rules_age(self) -> float:
        return time.monotonic() - self._rules_read

    async def _read_rules(self) -> bool:
        """Read them; True, and a look is due, where they have changed."""
        before = self._rules
        self._rules = await Rules.read(self._pool, self._sql, self._queues, self._known, self._command_timeout)
        self._rules_read = time.monotonic()
        if self._rules == before:
            return False
        self._floors.want_rescan()
        return True

    async def _look(self) -> None:
        """See where pending rows begin."""
        routes = [queue for queue in self._queues if queue not in self._rules.paused]
        heads = await self._pool.fetch(self._sql.heads, routes, self._known, timeout=self._command_timeout)
        plain = {(route, priority): actor for route, lane, priority, actor in heads if not lane}
        stray = {route for (route, _), actor in plain.items() if actor not in self._rules.plain}
        keyed = {route for route, lane, *_ in heads if lane.startswith("f:")} if self._rules.limited else set()
        if (stray or keyed) and await self._relane(stray, keyed):
            heads = await self._pool.fetch(self._sql.heads, routes, self._known, timeout=self._command_timeout)
        self._floors.reset((head["route"], head["priority"]) for head in heads if self._is_plain(head))
        top = max((head["priority"] for head in heads), default=0)
        self._lanes.reset((tuple(head) for head in heads if not self._is_plain(head)), self._rules, self._known, top)

    def _is_plain(self, head: Any) -> bool:
        return not head["lane"] and self._rules.is_plain(head["route"])

    async def _relane(self, stray: Iterable[str], keyed: Iterable[str]) -> bool:
        """Take rows out of the plain lanes, and those of fairness keys, that are not claimed from there.

        At most once a second while there are none.
        """
        if time.monotonic() < self._relane_at:
            return False
        moved = 0
        for route in keyed:
            found = await self._pool.fetchrow(
                self._sql.relane_fair,
                route,
                list(self._rules.limited),
                self._keyed_after.get(route),
                timeout=self._command_timeout,
            )
            moved += found["moved"]
            self._keyed_after[route] = found["stopped"]
        for route in stray:
            while batch := await self._pool.fetchval(
                self._sql.relane, route, list(self._rules.limited), self._known, timeout=self._command_timeout
            ):
                moved += batch
                if moved >= MAX_RELANED:
                    return True
        self._relane_at = time.monotonic() + RELANE_EVERY
        return moved > 0

    def _plan(self) -> list[tuple[bool, list[Any]]]:
        """What to claim from, most urgent first: segments of plain lanes and units of the others, in runs of a kind.

        Where both are as urgent they take turns to be first.
        """
        units = self._lanes.open()
        segments = self._floors.segments()
        if not units:
            return [(False, segments)] if segments else []
        self._lanes_first = not self._lanes_first
        parts: list[tuple[int, bool, Any]] = [(segment[0][1], False, segment) for segment in segments]
        parts += [(unit.priority, True, unit) for unit in units]
        parts.sort(key=lambda part: (-part[0], part[1] is not self._lanes_first))
        return [(lanes, [part[2] for part in run]) for lanes, run in groupby(parts, key=lambda part: part[1])]

    async def _claim_plain(self, room: int, segments: Sequence[Any]) -> int:
        records = await self._pool.fetch(
            self._sql.claim,
            room,
            self._worker_id,
            [segment[0] for segment, _ in segments],
            [segment[1] for segment, _ in segments],
            [key[0] for _, key in segments],
            [key[1] for _, key in segments],
            self._rules.plain,
            self._lock_lease,
            timeout=self._command_timeout,
        )
        attempts = []
        for job_id, epoch, actor, payload, number, route, priority, scheduled_at, *rest in records:
            attempt = Attempt(job_id, epoch, self._registry[actor], payload, number, route, scheduled_at, *rest)
            attempts.append(attempt)
            self._leases.add(attempt)
            self._floors.advance((route, priority), (scheduled_at, job_id))
        self._claimed += len(attempts)
        self._slots.put(attempts)
        return len(attempts)
