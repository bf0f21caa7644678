"""The slots of a stored schedule: those to come, and those of a span of the past."""

from __future__ import annotations

from datetime import datetime, timedelta

from taskqd.domain.errors import ConfigError
from taskqd.domain.recurrence import Recurrence, recurrence
from taskqd.domain.schedule import Schedule
from taskqd.maintenance.deciding import smear_of
from taskqd.storage.schedules import StoredSchedule

MAX_SLOTS = 10_000


def next_slots(stored: StoredSchedule, count: int) -> list[datetime]:
    """Return the next slots. Raises ``ConfigError`` where what is stored is no schedule."""
    found, shift, _ = _recurrence(stored)
    first = found.first_after(stored.now - shift) if stored.next_fire_at is None else stored.next_fire_at - shift
    slots = [first]
    while len(slots) < count:
        slots.append(found.next_after(slots[-1]))
    return [slot + shift for slot in slots]


def slots_between(stored: StoredSchedule, first: datetime, last: datetime) -> list[datetime]:
    """Return the slots from ``first`` to ``last``. Raises ``ConfigError`` where they are more than 10,000."""
    found, shift, definition = _recurrence(stored)
    begin = first - shift
    if definition.kind == "cron":
        slot = found.next_after(begin - timedelta(seconds=1))
    elif stored.next_fire_at is None:
        raise ConfigError(f"schedule {stored.name!r} has no slots yet: no scheduler has looked at it")
    else:
        interval, known = timedelta(seconds=float(definition.expression)), stored.next_fire_at - shift
        slot = known - (known - begin) // interval * interval
    slots: list[datetime] = []
    while slot + shift <= last:
        if len(slots) == MAX_SLOTS:
            raise ConfigError(f"more than {MAX_SLOTS} slots between {first} and {last}; take a shorter span")
        slots.append(slot + shift)
        slot = found.next_after(slot)
    return slots


def _recurrence(stored: StoredSchedule) -> tuple[Recurrence, timedelta, Schedule]:
    """Return the recurrence, by how much it is shifted, and the definition."""
    definition = stored.definition
    if definition is None:
        raise ConfigError(stored.problem)
    found = recurrence(
        definition.kind, definition.expression, definition.timezone, definition.dst_strategy, stored.name
    )
    smear = None if definition.smear is None else timedelta(seconds=definition.smear)
    return found, smear_of(stored.id, smear), definition
