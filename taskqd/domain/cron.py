"""Cron expressions: what they may say, and which wall-clock times they match. Time zones are recurrence.py's affair."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from hashlib import blake2b

from taskqd.domain.errors import ScheduleDefinitionError
from taskqd.domain.names import nearest

MAX_EXPRESSION = 255
ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
SEARCHED = timedelta(days=366 * 41)
"""How far ahead a match is looked for: 29 February falls on a given weekday once in 28 years, or 40 around 2100."""

_MONTHS = dict(
    zip(("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"), range(1, 13), strict=True)
)
_WEEKDAYS = dict(zip(("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"), range(7), strict=True))
_LONGEST_MONTHS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_PART = re.compile(r"(?P<body>\*|(?P<spread>H(?:\((?P<of>[^()]*)\))?)|[^/]+)(?:/(?P<step>[^/]*))?", re.IGNORECASE)
_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    low: int
    high: int
    spread: int
    """The last value that a bare H may mean, so that each period has one."""
    names: Mapping[str, int] = field(default_factory=dict)


_FIELDS = (
    _Field("minute", 0, 59, 59),
    _Field("hour", 0, 23, 23),
    _Field("day", 1, 31, 28),
    _Field("month", 1, 12, 12, _MONTHS),
    _Field("weekday", 0, 7, 6, _WEEKDAYS),
    _Field("second", 0, 59, 59),
)


class Cron:
    """One expression: minute, hour, day, month, weekday and, if it has a sixth field, second.

    Fields take ``*``, numbers, names (``MON``, ``JAN``), ranges, lists, steps, and ``H``: a value that depends on
    ``key``, the schedule's name, so that many schedules spread by themselves (``H``, ``H/15``, ``H(0-29)``,
    ``H(0-29)/10``). Where both day and weekday are restricted, either one matches. ``@hourly`` and its like work.

    Raises ``ScheduleDefinitionError`` that names the field, the value, what is allowed and the nearest value.
    """

    __slots__ = ("_days", "_either_day", "_hours", "_minutes", "_months", "_seconds", "_weekdays", "every_hour", "text")

    def __init__(self, text: str, key: str = "") -> None:
        self.text = text
        words = _words(text)
        values = [_values(part, word, text, key) for part, word in zip(_FIELDS, words, strict=False)]
        minutes, hours, days, months, weekdays = values[:5]
        self._seconds = tuple(sorted(values[5])) if len(values) == 6 else (0,)
        self._minutes = tuple(sorted(minutes))
        self._hours = tuple(sorted(hours))
        self._days = days
        self._months = months
        self._weekdays = frozenset(day % 7 for day in weekdays)
        self._either_day = not words[2].startswith("*") and not words[4].startswith("*")
        self.every_hour = len(self._hours) == 24
        """True where every hour matches: such a schedule follows elapsed time."""
        if not self._either_day and all(min(days) > _LONGEST_MONTHS[month - 1] for month in months):
            raise _error(text, f"day = {words[2]} does not occur in month = {words[3]}")

    def first_from(self, wall: datetime, until: datetime | None = None) -> datetime | None:
        """Return the first matching wall-clock time from ``wall`` on and before ``until``, both naive, or None."""
        last = min(datetime.max - SEARCHED, wall) + SEARCHED if until is None else until
        day = wall.date()
        moment: time | None = self._time_from(wall.time())
        while True:
            if day.month not in self._months:
                # The first day of the next month.
                following = datetime(day.year + day.month // 12, day.month % 12 + 1, 1)
                day, moment = following.date(), self._first_time()
            elif moment is not None and self._day_matches(day.day, day.isoweekday() % 7):
                found = datetime.combine(day, moment)
                return found if found < last else None
            else:
                day, moment = day + timedelta(days=1), self._first_time()
            if datetime.combine(day, time()) >= last:
                return None

    def _day_matches(self, day: int, weekday: int) -> bool:
        if self._either_day:
            return day in self._days or weekday in self._weekdays
        return day in self._days and weekday in self._weekdays

    def _first_time(self) -> time:
        return time(self._hours[0], self._minutes[0], self._seconds[0])

    def _time_from(self, at: time) -> time | None:
        """Return the first matching time of a day from ``at`` on, whole seconds."""
        hour = bisect_left(self._hours, at.hour)
        if hour == len(self._hours):
            return None
        if self._hours[hour] == at.hour:
            minute = bisect_left(self._minutes, at.minute)
            if minute < len(self._minutes) and self._minutes[minute] == at.minute:
                second = bisect_left(self._seconds, at.second + (at.microsecond > 0))
                if second < len(self._seconds):
                    return time(at.hour, at.minute, self._seconds[second])
                minute += 1
            if minute < len(self._minutes):
                return time(at.hour, self._minutes[minute], self._seconds[0])
            hour += 1
            if hour == len(self._hours):
                return None
        return time(self._hours[hour], self._minutes[0], self._seconds[0])


def _words(text: str) -> list[str]:
    if not isinstance(text, str) or not text.strip():
        raise ScheduleDefinitionError(f"a cron expression must be text of five or six fields, not {text!r}")
    if len(text) > MAX_EXPRESSION:
        raise ScheduleDefinitionError(
            f"a cron expression must be at most {MAX_EXPRESSION} characters; this one has {len(text)}"
        )
    stripped = text.strip()
    if stripped.startswith("@"):
        alias = ALIASES.get(stripped.lower())
        if alias is None:
            raise _error(text, f"{stripped} is not one of {', '.join(ALIASES)}{nearest(stripped, ALIASES)}")
        return alias.split()
    words = stripped.split()
    if len(words) not in (5, 6):
        raise _error(
            text,
            f"{len(words)} field{'s' * (len(words) != 1)}; it must have five (minute hour day month weekday) or six, "
            "with the second last",
        )
    return words


def _values(part: _Field, word: str, text: str, key: str) -> frozenset[int]:
    """Return the numbers that one field stands for."""
    found: set[int] = set()
    for piece in word.split(","):
        match = _PART.fullmatch(piece)
        if match is None:
            raise _error(text, f"{part.name} = {piece or word!r} is not *, a number, a name, a range, a step or H")
        body, step = match["body"], _step(part, match["step"], text)
        if match["spread"] is not None:
            low, high = (part.low, part.spread) if match["of"] is None else _range(part, match["of"], text)
            size = high - low + 1
            if step is None:
                found.add(low + _hash(key, part.name) % size)
                continue
            if step > size:
                raise _error(text, f"{part.name} = {piece!r}: the step {step} must be 1 to {size}")
            high = part.high - (part.name == "weekday") if match["of"] is None else high
            found.update(range(low + _hash(key, part.name) % step, high + 1, step))
        elif body == "*":
            found.update(range(part.low, part.high + 1 - (part.name == "weekday"), step or 1))
        elif step is not None and "-" not in body:
            low = _number(part, body, text)
            found.update(range(low, max(low, part.high - (part.name == "weekday")) + 1, step))
        else:
            low, high = _range(part, body, text)
            found.update(range(low, high + 1, step or 1))
    return frozenset(found)


def _step(part: _Field, step: str | None, text: str) -> int | None:
    if step is None:
        return None
    largest = part.high - part.low + 1
    if not _NUMBER.fullmatch(step) or not 1 <= int(step) <= largest:
        raise _error(
            text, f"{part.name}: the step {step or 'after /'!r} must be 1 to {largest}{_closest(step, 1, largest)}"
        )
    return int(step)


def _range(part: _Field, body: str, text: str) -> tuple[int, int]:
    first, dash, last = body.partition("-")
    low = _number(part, first, text)
    if not dash:
        return low, low
    high = _number(part, last, text)
    if part.name == "weekday" and high == 0 and low > 0:
        high = 7  # as in FRI-SUN
    if high < low:
        raise _error(text, f"{part.name} = {body!r} runs backwards; write it as two ranges")
    return low, high


def _number(part: _Field, word: str, text: str) -> int:
    named = part.names.get(word.upper())
    if named is not None:
        return named
    allowed = f"must be {part.low} to {part.high}"
    if part.names:
        allowed += f", or {' '.join(part.names)}"
    if not _NUMBER.fullmatch(word):
        hint = nearest(word, part.names) if part.names else ""
        unsupported = "; L, W, # and ? are not supported" if re.search(r"[LW#?]", word.upper()) and not hint else ""
        raise _error(text, f"{part.name} = {word!r} {allowed}{hint}{unsupported}")
    number = int(word)
    if not part.low <= number <= part.high:
        raise _error(text, f"{part.name} = {number} {allowed}{_closest(word, part.low, part.high)}")
    return number


def _closest(word: str, low: int, high: int) -> str:
    if not _NUMBER.fullmatch(word):
        return ""
    return f" (nearest: {min(max(int(word), low), high)})"


def _hash(key: str, name: str) -> int:
    return int.from_bytes(blake2b(f"{key}\0{name}".encode(), digest_size=8).digest(), "big")


def _error(text: str, problem: str) -> ScheduleDefinitionError:
    return ScheduleDefinitionError(f"cron expression {text!r}: {problem}")
