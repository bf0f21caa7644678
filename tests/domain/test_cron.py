"""Cron expressions: what they match, what is refused and how it is told."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from croniter import croniter

from taskqd import ScheduleDefinitionError
from taskqd.domain.cron import ALIASES, Cron
from taskqd.domain.recurrence import MAX_INTERVAL, CronInZone, Every, Recurrence, recurrence

START = datetime(2026, 1, 31, 23, 59, 30)


def walk(text: str, count: int, start: datetime = START, key: str = "") -> list[str]:
    cron, found = Cron(text, key), []
    for _ in range(count):
        moment = cron.first_from(start)
        assert moment is not None
        found.append(f"{moment:%a %d %b %Y %H:%M:%S}")
        start = moment + timedelta(seconds=1)
    return found


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("* * * * *", "Sun 01 Feb 2026 00:00:00", "Sun 01 Feb 2026 00:01:00"),
        ("* * * * * */20", "Sat 31 Jan 2026 23:59:40", "Sun 01 Feb 2026 00:00:00"),
        ("30 4 1,15 * *", "Sun 01 Feb 2026 04:30:00", "Sun 15 Feb 2026 04:30:00"),
        ("0 9 * * MON-FRI", "Mon 02 Feb 2026 09:00:00", "Tue 03 Feb 2026 09:00:00"),
        ("0 9 * * fri-sun", "Sun 01 Feb 2026 09:00:00", "Fri 06 Feb 2026 09:00:00"),
        ("0 0 * * 7", "Sun 01 Feb 2026 00:00:00", "Sun 08 Feb 2026 00:00:00"),
        ("0 0 31 * *", "Tue 31 Mar 2026 00:00:00", "Sun 31 May 2026 00:00:00"),
        ("0 0 29 FEB *", "Tue 29 Feb 2028 00:00:00", "Sun 29 Feb 2032 00:00:00"),
        ("5/20 10-12/2 * * *", "Sun 01 Feb 2026 10:05:00", "Sun 01 Feb 2026 10:25:00"),
        ("0 0 13 * FRI", "Fri 06 Feb 2026 00:00:00", "Fri 13 Feb 2026 00:00:00"),
        ("0 0 */2 * SUN", "Sun 01 Feb 2026 00:00:00", "Sun 15 Feb 2026 00:00:00"),
        ("@hourly", "Sun 01 Feb 2026 00:00:00", "Sun 01 Feb 2026 01:00:00"),
        ("@Monthly", "Sun 01 Feb 2026 00:00:00", "Sun 01 Mar 2026 00:00:00"),
    ],
)
def test_what_matches(text: str, first: str, second: str) -> None:
    assert walk(text, 2) == [first, second]


def test_a_leap_day_on_a_weekday_is_found_however_far_it_is() -> None:
    assert walk("0 0 29 2 */7", 1, datetime(2088, 3, 1)) == ["Sun 29 Feb 2128 00:00:00"]


def test_another_implementation_agrees() -> None:
    rng = random.Random(7)
    texts = ["minute", "hour", "day", "month", "weekday"]
    bounds = [(0, 59), (0, 23), (1, 28), (1, 12), (0, 6)]
    for _ in range(300):
        fields = []
        for (low, high), _name in zip(bounds, texts, strict=True):
            a, b = sorted(rng.sample(range(low, high + 1), 2))
            fields.append(rng.choice(["*", "*", str(a), f"{a}-{b}", f"{a},{b}", f"*/{max(1, b)}"]))
        text = " ".join(fields)
        start = datetime(2026, rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), 17, tzinfo=UTC)
        theirs = croniter(text, start, implement_cron_bug=True)
        ours = recurrence("cron", text, "UTC", "skip", "")
        at = start
        for _ in range(5):
            at = ours.next_after(at)
            assert at == theirs.get_next(datetime), text


# -- H ----------------------------------------------------------------------------------------------


def test_a_spread_value_is_the_schedules_own_and_stays() -> None:
    minutes = {walk("H H * * *", 1, key=f"report-{n}")[0][16:21] for n in range(100)}
    assert len(minutes) > 80
    assert walk("H H * * *", 1, key="report-1") == walk("H H * * *", 1, key="report-1")


@pytest.mark.parametrize("key", ["a", "b", "c", "d", "e"])
def test_spread_values_stay_in_their_bounds(key: str) -> None:
    assert Cron("H(10-19) * * * *", key)._minutes[0] in range(10, 20)
    steps = Cron("H/15 * * * *", key)._minutes
    assert len(steps) == 4
    assert {b - a for a, b in pairwise(steps)} == {15}
    assert len(Cron("H(0-29)/10 * * * *", key)._minutes) == 3
    assert min(Cron("0 0 H * *", key)._days) in range(1, 29)
    assert min(Cron("0 0 * * H", key)._weekdays) in range(7)


# -- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a cron expression must be text of five or six fields, not ''"),
        ("* * * *", "4 fields; it must have five (minute hour day month weekday) or six, with the second last"),
        ("*", "1 field; it must have five"),
        ("60 * * * *", "minute = 60 must be 0 to 59 (nearest: 59)"),
        ("* 24 * * *", "hour = 24 must be 0 to 23 (nearest: 23)"),
        ("* * 0 * *", "day = 0 must be 1 to 31 (nearest: 1)"),
        ("* * * 13 *", "month = 13 must be 1 to 12, or JAN FEB"),
        ("* * * JAM *", "must be 1 to 12, or JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC (did you mean 'JAN'?)"),
        ("* * * * MOM", "(did you mean 'MON'?)"),
        ("* * * * 8", "weekday = 8 must be 0 to 7"),
        ("* * * * * 60", "second = 60 must be 0 to 59 (nearest: 59)"),
        ("*/0 * * * *", "minute: the step '0' must be 1 to 60 (nearest: 1)"),
        ("*/ * * * *", "minute: the step 'after /' must be 1 to 60"),
        ("*/99 * * * *", "minute: the step '99' must be 1 to 60 (nearest: 60)"),
        ("H(0-9)/20 * * * *", "minute = 'H(0-9)/20': the step 20 must be 1 to 10"),
        ("HELLO * * * *", "minute = 'HELLO' must be 0 to 59"),
        ("30-10 * * * *", "minute = '30-10' runs backwards; write it as two ranges"),
        ("1,,2 * * * *", "minute = '1,,2' is not *, a number, a name, a range, a step or H"),
        ("0 0 L * *", "day = 'L' must be 1 to 31; L, W, # and ? are not supported"),
        ("0 0 * * 5#2", "L, W, # and ? are not supported"),
        ("0 0 30 2 *", "day = 30 does not occur in month = 2"),
        ("@daly", "(did you mean '@daily'?)"),
        ("@reboot", "@reboot is not one of @yearly"),
        ("* " * 200, "at most 255 characters; this one has 400"),
    ],
)
def test_a_bad_expression_is_told_in_one_message(text: str, message: str) -> None:
    with pytest.raises(ScheduleDefinitionError) as caught:
        Cron(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cron", "* * * * *", "Europe/Berlim", "skip"), "is not an IANA time zone (did you mean 'Europe/Berlin'?)"),
        (("cron", "* * * * *", "../etc/passwd", "skip"), "is not an IANA time zone"),
        (("cron", "* * * * *", "UTC", "first"), "must be skip, firstof or allof (did you mean 'firstof'?)"),
        (("every", "often", "UTC", "skip"), "an interval must be a number of seconds, not 'often'"),
        (("every", "0.5", "UTC", "skip"), "an interval of 0.5 s must be 1 s to 365 days"),
        (("every", "nan", "UTC", "skip"), "an interval of nan s must be"),
        (("never", "1", "UTC", "skip"), "kind = 'never' must be cron or every"),
    ],
)
def test_bad_columns_are_told_in_one_message(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleDefinitionError) as caught:
        recurrence(*arguments, "name")  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_every_alias_is_an_expression() -> None:
    assert all(Cron(alias).first_from(START) for alias in ALIASES)


# -- the latest slot, and how many --------------------------------------------------------------------


@pytest.mark.parametrize("text", ["* * * * * *", "*/7 * * * *", "30 2 * * *", "0 0 1 * *", "* 3 * * * */5"])
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_the_latest_slot_is_the_one_that_walking_finds(text: str, zone: str) -> None:
    ours = CronInZone(Cron(text), zone, "skip")
    rng = random.Random(text)
    slot = ours.next_after(datetime(2026, 10, 20, tzinfo=UTC))
    for seconds in (0, 1, 59, 3600, rng.randint(1, 90_000)):
        now = slot + timedelta(seconds=seconds, microseconds=17)
        walked, count = slot, 1
        while (following := ours.next_after(walked)) <= now:
            walked, count = following, count + 1
        assert ours.latest(slot, now) == walked
        assert ours.count(slot, walked, 1_000_000) == count
        assert ours.count(slot, walked, 3) == min(3, count)


def test_intervals_keep_their_lattice() -> None:
    ours, start = Every(90), datetime(2026, 3, 29, 0, 59, 59, 500_000, tzinfo=UTC)
    assert ours.first_after(start) == start + timedelta(seconds=90)
    assert ours.next_after(start) == start + timedelta(seconds=90)
    now = start + timedelta(days=1, seconds=100)
    assert ours.latest(start, now) == start + timedelta(days=1, seconds=90)
    assert ours.count(start, ours.latest(start, now), 10_000) == 962
    assert Every(MAX_INTERVAL).first_after(start) == start + timedelta(days=365)


def test_schedules_of_one_expression_share_their_slots_unless_it_depends_on_their_names() -> None:
    def of(expression: str, name: str) -> Recurrence:
        return recurrence("cron", expression, "Europe/Berlin", "skip", name)

    assert of("0 3 * * *", "a") is of("0 3 * * *", "b")
    spread = [of("H H * * *", name).next_after(datetime(2026, 1, 1, tzinfo=UTC)) for name in ("a", "b", "a")]
    assert spread[0] == spread[2] != spread[1]
