"""What nobody means, for every parameter there is, and how a refusal of it has to read."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from taskqd import TaskQError

NONSENSE: tuple[Any, ...] = (
    None,
    "",
    "no such thing",
    5,
    -1,
    10**30,
    float("nan"),
    float("inf"),
    True,
    "\x00",
    "\ud800",
    b"x",
    [],
    [None],
    {},
    {"\x00": object()},
    object(),
)


def parameters(function: Callable[..., Any], *, without: tuple[str, ...] = ()) -> list[str]:
    """The names of what a function takes."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", *without)]


ANSWERS = ("holds 0 jobs", "cron expression", "no schedule")
"""Of errors that say what is wrong without the parameter's name."""


async def complaint(call: Callable[[], Any], name: str) -> tuple[bool, str]:
    """Return whether the call was accepted, and what is wrong with how it was refused, ``""`` when nothing is.

    A refusal is one of our errors, ``ValueError`` or ``TypeError``, and names the parameter.
    """
    try:
        found = call()
        if isinstance(found, Awaitable):
            await found
    except (TaskQError, ValueError, TypeError) as error:
        text = str(error)
        named = any(word in text for word in (name, *ANSWERS))
        return False, "" if named else f"{type(error).__name__} does not name {name}: {text}"
    except Exception as error:
        return False, f"{type(error).__name__} for {name}: {error}"
    return True, ""


def shown(value: Any) -> str:
    """A value for a list of complaints."""
    return ascii(value)[:40]
