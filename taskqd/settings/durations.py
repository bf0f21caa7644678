"""Durations as people write them. Stdlib only."""

from __future__ import annotations

import math
import re
from datetime import timedelta

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|m|h|d)", re.ASCII)
_WHOLE = re.compile(rf"(?:{_PART.pattern}\s*)+", re.ASCII)


def parse_duration(value: object) -> float:
    """Return ``value`` in seconds.

    Accepts a number of seconds (also as text), a ``timedelta``, or text with units: ``250ms``, ``1.5s``,
    ``5m``, ``2h``, ``1d``, ``1h30m``. Raises ``ValueError`` for anything else, and for infinity and NaN.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(float(value))
    if isinstance(value, str):
        text = value.strip().lower()
        if _WHOLE.fullmatch(text):
            return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
        if _NUMBER.fullmatch(text):
            return _finite(float(text))
    raise ValueError("must be a duration: seconds, or text like '250ms', '1.5s', '5m', '2h', '1d'")


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError("must be a finite duration")
    return seconds
