"""How queues and schedules get on: starved, slow to drain, with more slots than work, firing more than is cleared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import asyncpg

from taskqd.domain.arguments import check_seconds
from taskqd.storage.schema_name import check_schema_name
from taskqd.storage.statements import load

DEFAULT_WINDOW = 3600.0
"""Seconds that are looked back."""
LONGEST_WINDOW = 7 * 86400.0
SAMPLE = 100_000
"""The newest ended jobs that are looked at."""
MAX_WAITING = 1_000_000
"""Waiting jobs of one queue that are counted."""
FIRES = 10_000
"""The newest jobs of one schedule that are looked at."""

STARVED_FLOOR = 60.0
"""Seconds that a job may wait whatever the others did."""
STARVED_FACTOR = 4.0
"""How many times as long as 95 % of the others a job may wait."""
OVERLOAD = 2.0
"""Work that has been done and waits, as a multiple of what the slots could have done."""
SLOW_DRAIN = 86_400.0
"""Seconds from which on a queue takes too long to empty."""
IDLE = 0.1
"""The share of the slots' time below which there are too many."""
ENOUGH_ENDED = 100
"""Ended jobs from which on the share says something."""
LEAST_BACKLOG = 3
_TIMEOUT = 30.0
_SHORTEST = 60.0


class InsightKind(Enum):
    """What a queue or a schedule suffers from."""

    RUNAWAY = "runaway"
    """A schedule fires more than is cleared."""
    STARVED = "starved"
    """Jobs wait much longer than others did, or more work waits than the slots can do."""
    SLOW_DRAIN = "slow drain"
    """What waits takes more than a day at the rate at which jobs end."""
    OVER_PROVISIONED = "over-provisioned"
    """Most slots are idle most of the time."""


@dataclass(frozen=True, slots=True)
class Insight:
    """One verdict, on the queue or schedule ``subject``."""

    kind: InsightKind
    subject: str
    what: str
    do: str


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """A queue over the window. Times are in seconds."""

    queue: str
    seconds: float
    """What was looked back: the window, or less where more jobs ended than are looked at."""
    waiting: int
    """Counted up to 1,000,000."""
    oldest_wait: float
    running: int
    ended: int
    ended_badly: int
    since: float
    """Since the first of these ended."""
    busy: float
    """How long jobs ran, together."""
    wait_p95: float | None
    workers: int
    slots: int
    """Of all live workers that serve it, other queues of theirs notwithstanding."""
    paused: bool

    @property
    def rate(self) -> float:
        """Jobs that end each second."""
        return self.ended / max(self.since, _SHORTEST) if self.ended else 0.0

    @property
    def drain(self) -> float | None:
        """Seconds until nothing waits at this rate, None when nothing ends."""
        return self.waiting / self.rate if self.ended else None

    @property
    def utilisation(self) -> float | None:
        """The share of the slots' time that was used, None without slots."""
        return self.busy / (self.slots * self.seconds) if self.slots else None

    @property
    def load(self) -> float | None:
        """Work done and work that waits, as a multiple of what the slots can do in the window."""
        if not self.slots or not self.ended:
            return None
        return (self.busy + self.waiting * self.busy / self.ended) / (self.slots * self.seconds)


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """A schedule over the window, and over the one before."""

    name: str
    actor: str
    enabled: bool
    fired: int
    cleared: int
    fired_before: int
    cleared_before: int
    backlog: int
    """Jobs of it that have not ended."""
    oldest_open: float
    skipped: int
    """Slots that were passed over in the window."""


@dataclass(frozen=True, slots=True)
class Insights:
    """What was found, the worst first."""

    window: float
    queues: tuple[QueueFigures, ...]
    schedules: tuple[ScheduleFigures, ...]
    found: tuple[Insight, ...]


async def read_insights(database: Any, schema: str = "taskq", *, window: float = DEFAULT_WINDOW) -> Insights:
    """Look at the queues and schedules of ``schema`` over the last ``window`` seconds, 60 to a week.

    ``database`` is an asyncpg connection or pool. It reads: at most the 100,000 newest ended jobs and 10,000 of each
    schedule. Raises ``ValueError`` for a window outside its bounds.
    """
    check_window(window)
    check_schema_name(schema)
    if isinstance(database, asyncpg.Pool):
        async with database.acquire(timeout=_TIMEOUT) as conn:
            return await read_insights(conn, schema, window=window)
    sql = load("insights", schema)
    transaction = database.transaction()
    await transaction.start()
    try:
        await database.execute(sql.pin, timeout=_TIMEOUT)
        rows = await database.fetch(sql.queues, window, SAMPLE, MAX_WAITING, timeout=_TIMEOUT)
        queues = [QueueFigures(**dict(row)) for row in rows]
        rows = await database.fetch(sql.schedules, window, FIRES, timeout=_TIMEOUT)
        schedules = [ScheduleFigures(**dict(row)) for row in rows]
    finally:
        if not database.is_closed():
            await transaction.rollback()
    return Insights(window, tuple(queues), tuple(schedules), tuple(judge(queues, schedules)))


def insights_sql(schema: str = "taskq", *, window: float = DEFAULT_WINDOW) -> dict[str, str]:
    """Return the statements themselves, by name, with their values filled in: for psql, or a dashboard."""
    check_window(window)
    check_schema_name(schema)
    sql = load("insights", schema)
    values = {"queues": (f"{window:g}", SAMPLE, MAX_WAITING), "schedules": (f"{window:g}", FIRES)}
    filled = {}
    for name, given in values.items():
        text = sql[name]
        for number, value in enumerate(given, 1):
            text = text.replace(f"${number}::", f"{value}::")
        filled[name] = text
    return filled


def check_window(window: float) -> None:
    """Raise ``ValueError`` unless ``window`` is within its bounds."""
    check_seconds("window", window, _SHORTEST, LONGEST_WINDOW)


def judge(queues: Sequence[QueueFigures], schedules: Sequence[ScheduleFigures]) -> list[Insight]:
    """Return what the figures say, by kind."""
    found = [each for one in schedules for each in _judge_schedule(one)]
    found += [each for one in queues for each in _judge_queue(one)]
    order = list(InsightKind)
    return sorted(found, key=lambda each: order.index(each.kind))


def _judge_schedule(one: ScheduleFigures) -> list[Insight]:
    outrun = one.fired > one.cleared and one.fired_before > one.cleared_before
    if one.backlog < LEAST_BACKLOG or not (outrun or one.backlog > max(one.cleared, one.cleared_before)):
        return []
    what = (
        f"{one.fired} fired and {one.cleared} cleared, {one.backlog} not ended, the oldest for {one.oldest_open:.0f} s"
    )
    do = f'fire it less often, give {one.actor} more slots, or let overlap = "forbid" keep one at a time'
    return [Insight(InsightKind.RUNAWAY, one.name, what, do)]


def _judge_queue(one: QueueFigures) -> list[Insight]:
    if one.paused:
        return []
    found = []
    patience = max(STARVED_FLOOR, STARVED_FACTOR * (one.wait_p95 or 0.0))
    load = one.load
    if one.waiting and one.oldest_wait > patience:
        usual = "" if one.wait_p95 is None else f", 95 % of the others waited {one.wait_p95:.1f} s at most"
        what = f"{one.waiting} wait, the oldest for {one.oldest_wait:.0f} s{usual}; {one.slots} slots serve it"
        do = "give it slots; or see what is always before it: higher priorities, a limit, actors that nobody knows"
        found.append(Insight(InsightKind.STARVED, one.queue, what, do))
    elif one.waiting and load is not None and load > OVERLOAD:
        what = f"{one.waiting} wait: {load:.1f} times what {one.slots} slots do in {one.seconds:.0f} s"
        found.append(Insight(InsightKind.STARVED, one.queue, what, "give it more slots: workers, or max_concurrency"))
    drain = one.drain
    if one.waiting and drain is not None and drain > SLOW_DRAIN:
        what = f"{one.waiting} wait and {one.rate * 3600:.0f} end an hour: {drain / 86400:.1f} days until it is empty"
        found.append(Insight(InsightKind.SLOW_DRAIN, one.queue, what, "give it more slots, or less to do"))
    used = one.utilisation
    if one.slots > 1 and not one.waiting and one.ended >= ENOUGH_ENDED and used is not None and used < IDLE:
        enough = max(1, math.ceil(2 * used * one.slots))
        if enough < one.slots:
            what = f"{used:.0%} of the time of {one.slots} slots was used; {enough} would do twice the work"
            do = "fewer workers, or a lower max_concurrency, unless peaks need them"
            found.append(Insight(InsightKind.OVER_PROVISIONED, one.queue, what, do))
    return found
