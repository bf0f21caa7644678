"""When a schedule is due: pure arithmetic on instants that the database gave. A slot is one instant it is due at."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias
from zoneinfo import ZoneInfo, available_timezones

from taskqd.domain.cron import SEARCHED, Cron
from taskqd.domain.errors import ScheduleDefinitionError
from taskqd.domain.names import nearest

DstStrategy: TypeAlias = Literal["skip", "firstof", "allof"]
Kind: TypeAlias = Literal["cron", "every"]

MIN_INTERVAL, MAX_INTERVAL = 1.0, 365 * 86400.0
"""Seconds that an interval may be."""
_SECOND = timedelta(seconds=1)
_PROBE = timedelta(hours=12)
"""No zone has two transitions so close to each other."""


class Recurrence(Protocol):
    """The slots of one schedule."""

    def first_after(self, now: datetime) -> datetime:
        """Return the first slot of a schedule that begins ``now``; it is later than that."""

    def next_after(self, slot: datetime) -> datetime:
        """Return the slot that follows ``slot``."""

    def latest(self, slot: datetime, now: datetime) -> datetime:
        """Return the latest slot up to ``now``, or ``slot``, which is one itself and not later, where none followed."""

    def count(self, slot: datetime, last: datetime, limit: int) -> int:
        """Return how many slots there are from ``slot`` to ``last``, both counted, at most ``limit``."""


class Every:
    """Due each ``seconds`` of elapsed time: on a lattice that no late fire moves."""

    def __init__(self, seconds: float) -> None:
        if not MIN_INTERVAL <= seconds <= MAX_INTERVAL:
            raise ScheduleDefinitionError(
                f"an interval of {seconds:g} s must be {MIN_INTERVAL:g} s to {MAX_INTERVAL / 86400:g} days"
            )
        self._interval = timedelta(seconds=seconds)

    def first_after(self, now: datetime) -> datetime:
        """One interval from now."""
        return now + self._interval

    def next_after(self, slot: datetime) -> datetime:
        """One interval on."""
        return slot + self._interval

    def latest(self, slot: datetime, now: datetime) -> datetime:
        """As many whole intervals on as fit."""
        return slot + (now - slot) // self._interval * self._interval

    def count(self, slot: datetime, last: datetime, limit: int) -> int:
        """By division."""
        return min(limit, (last - slot) // self._interval + 1)


class CronInZone:
    """Due when the clocks of a zone show what a cron expression matches.

    Clocks jump. Where an expression names hours, a time that a jump forward leaves out is due once, at the jump, and a
    time that a jump back repeats is due the first time only, unless ``dst_strategy`` is ``"allof"``. Where it matches
    every hour it follows elapsed time: what the clocks show is due, each time they show it.
    """

    def __init__(self, cron: Cron, zone: str, dst_strategy: DstStrategy) -> None:
        self._cron = cron
        self._zone = zone
        self._fixed = not cron.every_hour
        self._once = self._fixed and dst_strategy != "allof"
        self._last: tuple[datetime, datetime] | None = None
        """The last answer and what it was to: schedules of one expression are due together, and ask the same."""

    def first_after(self, now: datetime) -> datetime:
        """The first match after now."""
        return self.next_after(now)

    def next_after(self, slot: datetime) -> datetime:
        """The first match later than ``slot``, which need not be one."""
        start = slot.astimezone(UTC).replace(tzinfo=None, microsecond=0) + _SECOND
        last = self._last
        if last is None or last[0] != start:
            last = self._last = start, self._search(start, slot)
        return last[1]

    def _search(self, start: datetime, slot: datetime) -> datetime:
        for begin, end, jump, offset, shown in _stretches(self._zone, start):
            if self._fixed and jump and begin >= start:
                skipped = begin + offset - jump
                if self._cron.first_from(skipped, begin + offset) is not None:
                    return begin.replace(tzinfo=UTC)
            wall = max(begin, start) + offset
            if self._once:
                wall = max(wall, shown)
            found = self._cron.first_from(wall, None if end is None else end + offset)
            if found is not None:
                return (found - offset).replace(tzinfo=UTC)
        raise ScheduleDefinitionError(
            f"cron expression {self._cron.text!r} matches nothing in the {SEARCHED.days // 366} years after {slot}"
        )

    def latest(self, slot: datetime, now: datetime) -> datetime:
        """By halving: whether a match follows a moment until ``now`` turns from yes to no at the latest one."""
        found, high = slot, now.replace(microsecond=0) + _SECOND
        while (following := self.next_after(found)) <= now:
            found = following
            low = found
            while high - low > _SECOND:
                middle = low + (high - low) // _SECOND // 2 * _SECOND
                following = self.next_after(middle)
                if following <= now:
                    low = found = following
                else:
                    high = middle
        return found

    def count(self, slot: datetime, last: datetime, limit: int) -> int:
        """By walking."""
        found = 1
        while slot < last and found < limit:
            slot = self.next_after(slot)
            found += 1
        return found


def recurrence(kind: Kind, expression: str, timezone: str, dst_strategy: DstStrategy, key: str) -> Recurrence:
    """Return the recurrence of a schedule by the columns that hold it; ``key`` is its name, for ``H``.

    ``expression`` is a cron expression, or for ``every`` a number of seconds. Raises ``ScheduleDefinitionError``.
    """
    if not isinstance(expression, str):
        raise ScheduleDefinitionError(
            f"expression: a cron expression must be text of five or six fields, not {expression!r}"
        )
    for name, value in (("timezone", timezone), ("dst_strategy", dst_strategy)):
        if not isinstance(value, str):
            raise ScheduleDefinitionError(f"{name} = {value!r} must be text")
    # Without an H the name changes nothing, and all schedules of the expression share one.
    return _recurrence(kind, expression, timezone, dst_strategy, key if "h" in expression.lower() else "")


@lru_cache(maxsize=20_000)
def _recurrence(kind: Kind, expression: str, timezone: str, dst_strategy: DstStrategy, key: str) -> Recurrence:
    check_zone(timezone)
    if dst_strategy not in ("skip", "firstof", "allof"):
        raise ScheduleDefinitionError(
            f"dst_strategy = {dst_strategy!r} must be skip, firstof or allof"
            f"{nearest(dst_strategy, ('skip', 'firstof', 'allof'))}"
        )
    if kind == "cron":
        return CronInZone(Cron(expression, key), timezone, dst_strategy)
    if kind != "every":
        raise ScheduleDefinitionError(f"kind = {kind!r} must be cron or every")
    try:
        return Every(float(expression))
    except (TypeError, ValueError) as error:
        if isinstance(error, ScheduleDefinitionError):
            raise
        raise ScheduleDefinitionError(f"an interval must be a number of seconds, not {expression!r}") from None


def check_zone(timezone: str) -> None:
    """Raise ``ScheduleDefinitionError`` where ``timezone`` names no zone of the IANA database."""
    if timezone != "UTC" and timezone not in _zones():
        raise ScheduleDefinitionError(f"timezone = {timezone!r} is not an IANA time zone{nearest(timezone, _zones())}")


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def _stretches(
    zone: str, start: datetime
) -> Iterator[tuple[datetime, datetime | None, timedelta, timedelta, datetime]]:
    """Yield the stretches of constant offset from the one that holds ``start`` on, as far as anybody looks.

    Each is (begin, end, the jump forward at its begin, offset, the wall-clock time that was shown before), the first
    two in naive UTC. Years end stretches too, without a jump.
    """
    no_jump = timedelta(0)
    if zone == "UTC":
        yield datetime.min, None, no_jump, no_jump, datetime.min
        return
    shown = datetime.min
    for at, before, after in _transitions(zone, start.year - 1):
        if after < before:
            shown = at + before
    for year in range(start.year, min(9998, start.year + SEARCHED.days // 366)):
        begin, jump, offset = datetime(year, 1, 1), no_jump, _offset(zone, datetime(year, 1, 1))
        for at, before, after in _transitions(zone, year):
            if at == begin:
                jump, offset = max(no_jump, after - before), after
            else:
                if at > start:
                    yield begin, at, jump, offset, shown
                begin, jump, offset = at, max(no_jump, after - before), after
            if after < before:
                shown = at + before
        yield begin, datetime(year + 1, 1, 1), jump, offset, shown


@lru_cache(maxsize=65_536)
def _transitions(zone: str, year: int) -> tuple[tuple[datetime, timedelta, timedelta], ...]:
    """Return when the offset of a zone changes in a year of UTC: the instant, the offset before and after."""
    found = []
    at = datetime(year, 1, 1)
    end = datetime(year + 1, 1, 1)
    # The first second of a year belongs to it.
    before = _offset(zone, at - _SECOND)
    low = at - _SECOND
    while low < end - _SECOND:
        high = min(low + _PROBE, end - _SECOND)
        after = _offset(zone, high)
        if after != before:
            lower, upper = low, high
            while upper - lower > _SECOND:
                middle = lower + (upper - lower) // _SECOND // 2 * _SECOND
                if _offset(zone, middle) == before:
                    lower = middle
                else:
                    upper = middle
            found.append((upper, before, after))
            before = after
        low = high
    return tuple(found)


def _offset(zone: str, at: datetime) -> timedelta:
    offset = at.replace(tzinfo=UTC).astimezone(_zone(zone)).utcoffset()
    assert offset is not None  # noqa: S101 - a zone always has one
    return offset


@lru_cache(maxsize=1024)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
