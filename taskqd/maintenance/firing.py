"""Fires due schedules: claims them under a token, decides, and writes decisions, slots, jobs and cursors at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.domain.errors import ScheduleDefinitionError
from taskqd.domain.ids import new_uuid
from taskqd.maintenance.deciding import Claimed, Decision, decide
from taskqd.observe.logs import LibraryLogger
from taskqd.storage.statements import load

CADENCE = 1.0
"""Seconds between two looks at what is due, at most: one that nobody told of may have come."""
SHORTEST_WAIT, OVERDUE_WAIT = 0.005, 0.05
"""Seconds until the next look at least, and where what is due could not be claimed: others hold it locked."""
CLAIM_BATCH = 500
CLAIM_LEASE = 60.0
"""Seconds after which others may take what this scheduler claimed."""
FIRE_SLOTS = 1000
"""Slots that one transaction writes; it may be as many more as its last schedule has."""
DECIDING_SLICE = 0.1
"""Seconds of thought at a time: the loop does nothing else meanwhile. A schedule far behind takes some of them."""
FIRING_SLICE = 5.0
"""Seconds that one round takes before it lets others at the database."""
RETRY_AFTER, LONGEST_RETRY = 30.0, 3600.0
"""Seconds until a schedule that could not fire is tried again, doubled with each failure in a row."""
HEALTH_CADENCE = 15.0
"""Seconds between two looks at how the schedules fare."""
MAX_BACKOFF = 30.0

_DATA_ERRORS = (asyncpg.DataError, asyncpg.CheckViolationError, asyncpg.NotNullViolationError)
"""What Postgres says of values, not of itself: the schedule is at fault."""
_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.UndefinedTableError,
    asyncpg.InvalidSchemaNameError,
)
"""What no schedule is at fault for, however the batch is divided."""

_log = LibraryLogger("taskqd.maintenance.firing")


@dataclass(slots=True)
class FireCounts:
    """What one round came to."""

    claimed: int = 0
    fired: int = 0
    suppressed: int = 0
    skipped: int = 0
    failed: int = 0
    stale: int = 0
    """Schedules that had changed hands, or themselves, between claim and fire."""

    def add(self, other: FireCounts) -> None:
        """Add what another round, or part of one, came to."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Firing:
    """Fires the schedules of one schema through ``pool``, for the scheduler ``owner``.

    Any number may run at once. What keeps a slot from firing twice is the row of it, written with its job; what keeps a
    scheduler that slept from firing is its token, which has expired.
    """

    def __init__(self, pool: Any, schema: str, owner: UUID, *, statement_timeout: float) -> None:
        self._pool = pool
        self._sql = load("scheduler", schema)
        self._owner = owner
        self._timeout = statement_timeout
        self.total = FireCounts()
        self.auto_paused, self.oldest_due = 0, 0.0
        """Schedules paused by their failures, and the seconds that the oldest due one has waited, as last read."""
        self.latest_lateness = 0.0
        """Seconds from the last slot of the last batch to its job."""

    async def fire_due(
        self, stopping: Callable[[], bool], slice_seconds: float = FIRING_SLICE
    ) -> tuple[FireCounts, bool]:
        """Fire until nothing is due, for at most ``slice_seconds``; return the counts and whether nothing is left."""
        until = time.monotonic() + slice_seconds
        counts = FireCounts()
        while not stopping():
            if not await self._fire_batch(stopping, counts):
                return counts, True
            if time.monotonic() >= until:
                break
        return counts, False

    async def next_due(self) -> float | None:
        """Return the seconds until the next schedule is due, negative for one that is overdue, None without one."""
        seconds: float | None = await self._pool.fetchval(self._sql.next_due, timeout=self._timeout)
        return seconds

    async def read_health(self) -> None:
        """Read how the schedules fare."""
        record = await self._pool.fetchrow(self._sql.schedule_health, timeout=self._timeout)
        self.auto_paused, self.oldest_due = record["auto_paused"], record["oldest_due"]

    async def _fire_batch(self, stopping: Callable[[], bool], counts: FireCounts) -> bool:
        """Claim and fire once; return whether more is due, as far as this can tell."""
        token = uuid4()
        records = await self._pool.fetch(
            self._sql.claim_schedules, CLAIM_BATCH, self._owner, token, CLAIM_LEASE, timeout=self._timeout
        )
        if not records:
            return False
        waiting = sorted((Claimed(*record) for record in records), key=_due_since)
        open_claims = {claimed.id for claimed in waiting}
        batch = FireCounts(claimed=len(waiting))
        more = len(waiting) == CLAIM_BATCH
        until = time.monotonic() + CLAIM_LEASE / 2
        try:
            while waiting and not stopping():
                if time.monotonic() > until:  # rather claimed anew than fired under a claim that ends
                    more = True
                    break
                decisions, problems = _decide_some(waiting)
                if problems:
                    await self._fail(problems, token, strike=True)
                    batch.failed += len(problems)
                    open_claims.difference_update(claimed.id for claimed, _ in problems)
                if decisions:
                    await self._fire(decisions, token, batch)
                    open_claims.difference_update(decision.schedule.id for decision in decisions)
                    more = more or any(decision.cursor_to <= decision.schedule.as_of for decision in decisions)
        finally:
            counts.add(batch)
            self.total.add(batch)
            if open_claims:
                await self._release(open_claims, token)
        return more

    async def _fire(self, decisions: Sequence[Decision], token: UUID, counts: FireCounts) -> None:
        """Fire as one transaction; where the values of one schedule break it, that one fails and the others fire."""
        try:
            records = await self._write(decisions, token)
        except asyncpg.PostgresError as error:
            if isinstance(error, _AWAY):
                raise
            if len(decisions) > 1:
                half = len(decisions) // 2
                await self._fire(decisions[:half], token, counts)
                await self._fire(decisions[half:], token, counts)
                return
            problem = f"{type(error).__name__}: {error}"
            await self._fail([(decisions[0].schedule, problem)], token, strike=isinstance(error, _DATA_ERRORS))
            counts.failed += 1
            return
        if stale := len(decisions) - len(records):
            counts.stale += stale
            _log.warning("schedule-claims-lapsed", schedules=stale)
        names = {decision.schedule.id: decision.schedule.name for decision in decisions}
        for record in records:
            counts.fired += record["fired"]
            counts.suppressed += record["suppressed"]
            counts.skipped += record["skipped"]
            if record["skipped"]:
                _log.warning("schedule-slots-skipped", schedule=names[record["id"]], skipped=record["skipped"])
            if record["late"] is not None:
                self.latest_lateness = record["late"]

    async def _write(self, decisions: Sequence[Decision], token: UUID) -> list[asyncpg.Record]:
        ids = [new_uuid() for _ in decisions]
        slots = [(ids[n], due) for n, decision in enumerate(decisions) for due in decision.slots]
        async with asyncio.timeout(self._timeout), self._pool.acquire() as conn, conn.transaction():
            await conn.execute(self._sql.prepare_fire)
            if guarded := [decision.schedule.id for decision in decisions if decision.schedule.guarded]:
                await conn.execute(self._sql.guard, guarded)
            records: list[asyncpg.Record] = await conn.fetch(
                self._sql.fire,
                [decision.schedule.id for decision in decisions],
                ids,
                [decision.action for decision in decisions],
                [decision.schedule.version for decision in decisions],
                [decision.cursor_to for decision in decisions],
                [decision.skipped for decision in decisions],
                token,
                None,
                [decision_id for decision_id, _ in slots],
                [due for _, due in slots],
                [new_uuid() for _ in slots],
                self._owner,
            )
        return records

    async def _fail(self, problems: Sequence[tuple[Claimed, str]], token: UUID, *, strike: bool) -> None:
        records = await self._pool.fetch(
            self._sql.fail_schedules,
            [claimed.id for claimed, _ in problems],
            [problem for _, problem in problems],
            [min(LONGEST_RETRY, RETRY_AFTER * 2 ** min(claimed.failures, 10)) for claimed, _ in problems],
            [strike] * len(problems),
            self._owner,
            token,
            timeout=self._timeout,
        )
        paused = {record["id"] for record in records if record["paused"]}
        for claimed, problem in problems:
            if claimed.id in paused:
                _log.error("schedule-auto-paused", schedule=claimed.name, error=problem)
            else:
                _log.warning("schedule-not-fired", schedule=claimed.name, error=problem)

    async def _release(self, claims: set[UUID], token: UUID) -> None:
        """Give claims back, so that nobody has to wait for them to expire. They do where this fails."""
        try:
            await self._pool.execute(self._sql.release_schedules, list(claims), token, timeout=2.0)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            _log.warning("claims-not-released", claims=len(claims), error=type(error).__name__)


def _due_since(claimed: Claimed) -> datetime:
    return claimed.as_of if claimed.next_fire_at is None else claimed.next_fire_at


def _decide_some(waiting: list[Claimed]) -> tuple[list[Decision], list[tuple[Claimed, str]]]:
    """Take from the front of ``waiting`` what one transaction fires, or what a moment suffices to decide.

    Return the decisions, and the schedules that are defined so that none is possible, each with why.
    """
    until = time.monotonic() + DECIDING_SLICE
    decisions: list[Decision] = []
    problems: list[tuple[Claimed, str]] = []
    taken = slots = 0
    for claimed in waiting:
        taken += 1
        try:
            decisions.append(decide(claimed))
            slots += len(decisions[-1].slots)
        except ScheduleDefinitionError as error:
            problems.append((claimed, str(error)))
        if slots >= FIRE_SLOTS or time.monotonic() > until:
            break
    del waiting[:taken]
    return decisions, problems


class FiringLoop:
    """Fires what is due, the moment it is due, and looks every second for what it did not know of."""

    def __init__(self, firing: Firing, *, may_begin: Callable[[], bool], on_failure: FailureHook) -> None:
        self._firing = firing
        self._may_begin = may_begin
        self._health_due = 0.0
        self.loop = BackgroundLoop(
            "schedules", self._step, cadence=CADENCE, on_failure=on_failure, backoff_cap=MAX_BACKOFF, jitter=0.01
        )

    async def _step(self) -> float | None:
        if not self._may_begin():  # the tick comes first
            return 0.02
        _, done = await self._firing.fire_due(lambda: self.loop.stopping)
        if not done:
            return 0.0
        if time.monotonic() >= self._health_due:
            self._health_due = time.monotonic() + HEALTH_CADENCE
            await self._firing.read_health()
        wait = await self._firing.next_due()
        if wait is None:
            return CADENCE
        return min(CADENCE, max(SHORTEST_WAIT, wait)) if wait > 0 else OVERDUE_WAIT
