"""Durations as people write them."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.settings.durations import parse_duration


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (5, 5.0),
        (1.5, 1.5),
        ("7", 7.0),
        (" 7.5 ", 7.5),
        ("1e2", 100.0),
        ("250ms", 0.25),
        ("1.5s", 1.5),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1h30m", 5400.0),
        ("1H 30M", 5400.0),
        ("-1", -1.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_accepts_seconds_and_units(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "written", ["", "5 minutes", "m5", "5m!", "5x", "-5m", "1_0", "\u0665", True, None, [], "1,5s"]
)
def test_refuses_everything_else(written: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(written)


@pytest.mark.parametrize("written", [math.inf, math.nan, "1e999"])
def test_refuses_what_is_not_finite(written: object) -> None:
    with pytest.raises(ValueError, match="finite"):
        parse_duration(written)


@given(st.text(max_size=20))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        seconds = parse_duration(text)
    except ValueError:
        return
    assert math.isfinite(seconds)
