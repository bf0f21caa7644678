"""What arguments of public calls must be: each check names the argument, its value and what is allowed."""

from __future__ import annotations

import math
from datetime import timedelta
from uuid import UUID

MAX_REASON = 1000
"""Characters of why somebody did something."""
_NUL = "\\u0000"


def check_id(name: str, value: object, *, optional: bool = False) -> None:
    """Raise ``TypeError`` for what is no UUID."""
    if not isinstance(value, UUID) and not (optional and value is None):
        hint = "; uuid.UUID(text) makes one" if isinstance(value, str) else ""
        raise TypeError(f"{name} = {value!r} must be a UUID{' or None' if optional else ''}{hint}")


def check_flag(name: str, value: object) -> None:
    """Raise ``TypeError`` for what is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} = {value!r} must be True or False")


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raise ``ValueError`` for what is no whole number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} = {value!r} must be a whole number between {low} and {high}")


def is_number(value: object) -> bool:
    """Whether it is a number that is neither NaN nor infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)


def is_text(value: object) -> bool:
    """Whether it is text that Postgres stores: without NUL and lone surrogates."""
    if not isinstance(value, str) or "\x00" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def holds_nul(text: str) -> bool:
    """Whether JSON text holds an escaped NUL: ``\\u0000`` behind an even number of backslashes."""
    at = text.find(_NUL)
    while at >= 0:
        slashes = 0
        while at - slashes > 0 and text[at - slashes - 1] == "\\":
            slashes += 1
        if slashes % 2 == 0:
            return True
        at = text.find(_NUL, at + 1)
    return False


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """Raise ``ValueError`` for what is not text that Postgres stores."""
    if not is_text(value) and not (optional and value is None):
        raise ValueError(f"{name} = {value!r} must be text without NUL and lone surrogates")


def check_reason(reason: object) -> None:
    """Raise ``ValueError`` for a ``reason`` that is neither None nor text of a reasonable length."""
    if reason is not None and not (is_text(reason) and len(reason) <= MAX_REASON):  # type: ignore[arg-type]
        raise ValueError(f"reason must be text of at most {MAX_REASON} characters, without NUL and lone surrogates")


def check_seconds(name: str, value: object, low: float, high: float) -> None:
    """Raise ``ValueError`` for what are no seconds from ``low`` to ``high``."""
    if not is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{name} = {value!r} must be between {low:g} and {high:g} seconds")


def check_timeout(value: object) -> None:
    """Raise ``ValueError`` for a ``timeout`` that is neither None nor a number. What is left of a time may be none."""
    if value is None or (isinstance(value, float) and value == math.inf) or is_number(value):
        return
    raise ValueError(f"timeout = {value!r} must be seconds, or None to wait as long as it takes")


def seconds_of(name: str, value: object, longest: timedelta) -> float:
    """Return a ``timedelta``, or seconds, as seconds. Raises ``ValueError`` unless it is 0 to ``longest``."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_number(seconds) or not 0 <= seconds <= longest.total_seconds():  # type: ignore[operator]
        raise ValueError(f"{name} = {value!r} must be a timedelta or seconds, between 0 and {longest.days} days")
    return float(seconds)  # type: ignore[arg-type]


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)
