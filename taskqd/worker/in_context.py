"""Drives a coroutine inside a context of its own."""

from __future__ import annotations

import contextvars
from collections.abc import Coroutine, Generator
from typing import Any


class InContext:
    """Drives a coroutine inside a context of its own, without a task of its own: a contextvar set by one job is never
    seen by the next. What does not end at once is awaited."""

    __slots__ = ("_context", "_coroutine", "_waited_for", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context) -> None:
        self._coroutine = coroutine
        self._context = context
        self.result: Any = None

    def ends_at_once(self) -> bool:
        """Run it until it waits for the first time; True when it ended before, with its ``result``."""
        try:
            self._waited_for = self._context.run(self._coroutine.send, None)
        except StopIteration as stop:
            self.result = stop.value
            return True
        return False

    def __await__(self) -> Generator[Any, Any, Any]:
        run, send = self._context.run, self._coroutine.send
        waited_for = self._waited_for
        try:
            while True:
                try:
                    value = yield waited_for
                except BaseException as error:
                    waited_for = run(self._coroutine.throw, error)
                else:
                    waited_for = run(send, value)
        except StopIteration as stop:
            return stop.value
