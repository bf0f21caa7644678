"""What an actor wants to be called when a job of its has ended."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

Hook: TypeAlias = Callable[..., Any]

DEFAULT_TIMEOUT = 3.0
LONGEST_TIMEOUT = 300.0
_ARGUMENTS = {"on_success": ("row", "result"), "on_retry_exhausted": ("row", "error"), "on_cancel": ("row",)}


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions, ``async def`` or plain, and the seconds that each may take. A plain one runs on a thread."""

    on_success: Hook | None = None
    on_success_timeout: float = DEFAULT_TIMEOUT
    on_retry_exhausted: Hook | None = None
    on_retry_exhausted_timeout: float = DEFAULT_TIMEOUT
    on_cancel: Hook | None = None
    on_cancel_timeout: float = DEFAULT_TIMEOUT

    def __bool__(self) -> bool:
        return any((self.on_success, self.on_retry_exhausted, self.on_cancel))

    def problem(self) -> str:
        """Say what is wrong with them, ``""`` when nothing is."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_timeout"):
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not number or not 0 < value <= LONGEST_TIMEOUT:
                    return f"{field.name} = {value!r} must be seconds above zero, up to {LONGEST_TIMEOUT:g}"
            elif value is not None and not callable(value):
                return f"{field.name} = {value!r} must be a function"
            elif value is not None and not _takes(value, _ARGUMENTS[field.name]):
                return f"{field.name} = {value!r} must take ({', '.join(_ARGUMENTS[field.name])})"
        return ""


def _takes(hook: Hook, arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # one written in C need not say what it takes
        return True
    return True
