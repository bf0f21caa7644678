"""What to do about one due schedule: pure, by the columns of its row and the database's time."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Literal
from uuid import UUID

from taskqd.domain.errors import ScheduleDefinitionError
from taskqd.domain.recurrence import DstStrategy, Kind, recurrence

CatchUp = Literal["fire_once", "fire_all", "skip"]

ON_TIME = timedelta(seconds=60)
"""How late a slot may be and still count as on time, for a schedule that does not catch up."""
COUNTED = 10_000
"""Slots passed over that one decision counts."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A due schedule under a claim. ``as_of`` is the only time there is; ``next_fire_at`` None: it has none yet."""

    id: UUID
    name: str
    version: int
    kind: Kind
    expression: str
    timezone: str
    dst_strategy: DstStrategy
    catch_up: CatchUp
    catch_up_max: int
    catch_up_window: timedelta | None
    smear: timedelta | None
    next_fire_at: datetime | None
    as_of: datetime
    failures: int
    guarded: bool
    """Whether other jobs may keep its own out by rules that enqueue follows under a lock."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which slots fire, how many were passed over, and which is the next."""

    schedule: Claimed
    cursor_to: datetime
    slots: list[datetime] = field(default_factory=list)
    skipped: int = 0

    @property
    def action(self) -> str:
        """What it is called in the table of decisions."""
        return "initialized" if self.schedule.next_fire_at is None else "fired"


def decide(schedule: Claimed) -> Decision:
    """Return what is to be done. Raises ``ScheduleDefinitionError`` where the row says nothing that can be done."""
    try:
        return _decide(schedule)
    except OverflowError:
        raise ScheduleDefinitionError("the next slot lies beyond the year 9999") from None


def smear_of(schedule_id: UUID, smear: timedelta | None) -> timedelta:
    """Return by how much a schedule is shifted: less than ``smear``, always the same."""
    if smear is None or smear < timedelta(seconds=1):
        return timedelta(0)
    digest = int.from_bytes(blake2b(schedule_id.bytes, digest_size=8).digest(), "big")
    return timedelta(seconds=digest % int(smear.total_seconds()))


def _decide(schedule: Claimed) -> Decision:
    slots = recurrence(schedule.kind, schedule.expression, schedule.timezone, schedule.dst_strategy, schedule.name)
    # A smeared schedule lives in a time of its own, so that its slots keep their lattice.
    shift = smear_of(schedule.id, schedule.smear)
    now = schedule.as_of - shift
    if schedule.next_fire_at is None:
        # An interval begins with its first slot, wherever that is.
        begin = schedule.as_of if schedule.kind == "every" else now
        return Decision(schedule, slots.first_after(begin) + shift)
    cursor = schedule.next_fire_at - shift
    window = schedule.catch_up_window
    if schedule.catch_up == "fire_all":
        skipped = 0
        if window is not None and now - cursor > window:
            last = slots.latest(cursor, now - window - timedelta(microseconds=1))
            skipped, cursor = slots.count(cursor, last, COUNTED), slots.next_after(last)
        due: list[datetime] = []
        while cursor <= now and len(due) < schedule.catch_up_max:
            due.append(cursor + shift)
            cursor = slots.next_after(cursor)
        return Decision(schedule, cursor + shift, due, skipped)
    following = slots.next_after(cursor)
    latest = cursor
    skipped = 0
    if following <= now:
        latest = slots.latest(following, now)
        skipped = slots.count(cursor, latest, COUNTED) - 1
        following = slots.next_after(latest)
    if schedule.catch_up == "skip":
        window = ON_TIME if window is None else min(window, ON_TIME)
    if window is not None and now - latest > window:
        return Decision(schedule, following + shift, [], skipped + 1)
    return Decision(schedule, following + shift, [latest + shift], skipped)
