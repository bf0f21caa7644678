"""Every jump of every zone's clocks: each local time is due as often as it should be, and in order."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest

from taskqd.domain.cron import Cron
from taskqd.domain.recurrence import CronInZone, DstStrategy

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
FIRST, LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)
ODD = [
    "Australia/Lord_Howe",  # half an hour
    "Pacific/Apia",  # a day left out
    "Africa/Casablanca",  # back in Ramadan
    "Antarctica/Troll",  # two hours
    "Antarctica/Casey",
    "America/Sao_Paulo",  # at midnight
    "America/St_Johns",  # at a minute past midnight
    "Asia/Gaza",
    "Asia/Pyongyang",
    "Asia/Kathmandu",
]


def jumps(zone: ZoneInfo) -> Iterator[datetime]:
    """Yield each instant at which the zone's offset changes."""
    at = FIRST
    while at < LAST:
        if at.astimezone(zone).utcoffset() != (at + DAY).astimezone(zone).utcoffset():
            low, high = at, at + DAY
            while high - low > timedelta(seconds=1):
                middle = low + (high - low) // 2
                middle = middle.replace(microsecond=0)
                same = middle.astimezone(zone).utcoffset() == low.astimezone(zone).utcoffset()
                low, high = (middle, high) if same else (low, middle)
            yield high
        at += DAY


def shown_around(zone: ZoneInfo, jump: datetime) -> dict[datetime, list[datetime]]:
    """Return the minutes that the clocks show in the days around a jump, each with the instants that show it."""
    shown: dict[datetime, list[datetime]] = {}
    at = jump - 2 * DAY
    while at < jump + 3 * DAY:
        shown.setdefault(at.astimezone(zone).replace(tzinfo=None), []).append(at)
        at += MINUTE
    return shown


def expected(
    shown: dict[datetime, list[datetime]], jump: datetime, times: list[tuple[int, int]], strategy: str | None
) -> list[datetime]:
    """Return the instants at which a daily schedule is due; ``strategy`` None follows elapsed time."""
    due: set[datetime] = set()
    day = min(shown).replace(hour=0, minute=0)
    while day <= max(shown):
        for hour, minute in times:
            wall = day.replace(hour=hour, minute=minute)
            instants = shown.get(wall, [])
            if strategy is None or strategy == "allof":
                due.update(instants)
            else:
                due.update(instants[:1])
            if not instants and strategy is not None and min(shown) < wall < max(shown):
                due.add(jump)  # it lies in the gap
        day += DAY
    return sorted(due)


def walked(text: str, zone: str, strategy: DstStrategy, first: datetime, last: datetime) -> list[datetime]:
    """Return the slots from ``first`` to ``last``."""
    ours = CronInZone(Cron(text), zone, strategy)
    found, at = [], first - MINUTE
    while (at := ours.next_after(at)) <= last:
        assert not found or at > found[-1]
        found.append(at)
    return found


def check(name: str, jump: datetime) -> None:
    """Compare each kind of schedule around one jump with what the clocks show minute by minute."""
    zone = ZoneInfo(name)
    shown = shown_around(zone, jump)
    first, last = jump - 2 * DAY, jump + 3 * DAY - MINUTE
    before, after = (jump - MINUTE).astimezone(zone).utcoffset(), jump.astimezone(zone).utcoffset()
    assert before is not None
    assert after is not None
    # What the clocks would have shown next, what they showed instead, and the middle between the two.
    sides = [(jump + offset).replace(tzinfo=None) for offset in (before, after, (before + after) // 2)]
    moments = {(side.hour, side.minute) for side in sides} | {(0, 0)}
    for hour, minute in moments:
        for strategy in ("skip", "firstof", "allof"):
            found = walked(f"{minute} {hour} * * *", name, strategy, first, last)
            assert found == expected(shown, jump, [(hour, minute)], strategy), (name, jump, hour, minute, strategy)
            days = {at.astimezone(zone).date() for at in found}
            if (
                jump in found
            ):  # for a time before midnight that the jump left out, at its end, which may be the next day
                days.add((jump - MINUTE).astimezone(zone).date())
            assert days >= whole_days(shown), (name, jump, hour, minute)
    several = [(hour, minute) for hour in range(4) for minute in (0, 30)]
    found = walked("*/30 0-3 * * *", name, "skip", first, last)
    assert found == expected(shown, jump, several, "skip"), (name, jump)
    hourly = [(hour, minute) for hour in range(24) for minute in (5, 35)]
    found = walked("5,35 * * * *", name, "skip", first, last)
    assert found == expected(shown, jump, hourly, None), (name, jump)


def whole_days(shown: dict[datetime, list[datetime]]) -> set[object]:
    """Return the local days that exist, but the first and the last, of which only a part was looked at."""
    days = sorted({wall.date() for wall in shown})
    return set(days[1:-1])


@pytest.mark.parametrize("name", ODD)
def test_the_odd_zones(name: str) -> None:
    found = list(jumps(ZoneInfo(name)))
    for jump in found[:3] + found[-3:]:
        check(name, jump)


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_all_zones(part: int) -> None:
    for number, name in enumerate(sorted(available_timezones())[part::40]):
        found = list(jumps(ZoneInfo(name)))
        for jump in found[number % 9 :: 9][:5]:
            check(name, jump)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(16))
@pytest.mark.timeout(3600)
def test_every_jump_of_every_zone(part: int) -> None:
    for name in sorted(available_timezones())[part::16]:
        for jump in jumps(ZoneInfo(name)):
            check(name, jump)


def test_the_day_that_samoa_left_out() -> None:
    found = walked(
        "0 9 * * *", "Pacific/Apia", "skip", datetime(2011, 12, 29, tzinfo=UTC), datetime(2012, 1, 1, tzinfo=UTC)
    )
    local = [at.astimezone(ZoneInfo("Pacific/Apia")).strftime("%d %H:%M") for at in found]
    assert local == ["29 09:00", "31 00:00", "31 09:00", "01 09:00"]


def test_a_zone_that_is_not_utc_but_never_jumps() -> None:
    found = walked(
        "0 9 * * *", "Asia/Kolkata", "skip", datetime(2038, 12, 30, tzinfo=UTC), datetime(2039, 1, 2, tzinfo=UTC)
    )
    assert [at.strftime("%H:%M") for at in found] == ["03:30"] * 3
