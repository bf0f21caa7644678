"""The line of changes: one after the other, and what each says while it is made."""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from taskqd.domain.errors import TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.journal import Journal

LONGEST = 16
"""Changes that may wait; one more is refused."""


class RefusedError(TaskQError):
    """A change is not made. ``exit_code`` tells the caller why: 1 unless said otherwise."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Change:
    """One change of the running group: everything said about it so far, and how it ended."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.ending: dict[str, Any] | None = None
        """The last line, once there is one."""
        self._lines: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    def tell(self, text: str, **fields: Any) -> None:
        """Say how far it has come."""
        self._say({"op": "progress", "text": text, **fields})

    def end(self, exit_code: int, text: str, **fields: Any) -> None:
        """Say how it ended. Whatever comes later is not said."""
        if self.ending is None:
            self.ending = {"op": "done", "exit_code": int(exit_code), "text": text, **fields}
            self._say(self.ending)

    async def follow(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield every line from the first on, until the last."""
        position = 0
        while True:
            while position < len(self._lines):
                yield self._lines[position]
                position += 1
            if self.ending is not None:
                return
            self._news.clear()
            await self._news.wait()

    def _say(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        self._news.set()


Rest = Callable[[], Awaitable[None]]
"""What is left to wait for while the next change is made already."""

Work = Callable[[Change], Awaitable[Rest | None]]
"""Makes a change, telling it how far it came, and ends it; or returns what will end it."""


class Line:
    """Makes changes one at a time, so that no two pull at the same process.

    Equal requests that wait become one: of reloads, one is made and one waits, however many ask.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: deque[tuple[Change, Work]] = deque()
        self._current: Change | None = None
        self._task: asyncio.Task[None] | None = None
        self._rests: dict[asyncio.Task[None], Change] = {}
        self._closed = ""
        self.on_end: Callable[[str, int], None] = lambda _verb, _exit_code: None
        """Told of each change that has ended."""

    @property
    def current(self) -> str:
        """The verb of the change that is being made, or an empty string."""
        return "" if self._current is None else self._current.verb

    def add(self, verb: str, work: Work, *, join: bool = False) -> Change:
        """Put a change in the line and return it; with ``join`` the one of this verb that waits already, if any.

        Raises ``RefusedError`` when the line is closed or too long.
        """
        if self._closed:
            raise RefusedError(self._closed)
        if join:
            for waiting, _ in self._waiting:
                if waiting.verb == verb:
                    return waiting
        if len(self._waiting) >= LONGEST:
            raise RefusedError(f"{LONGEST} changes wait already: try again", ExitCode.TRY_AGAIN)
        change = Change(verb)
        if self._current is not None:
            change.tell(f"waits for the {self.current} that is being made")
        self._waiting.append((change, work))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._make_all(), name="changes")
        return change

    def close(self, why: str) -> None:
        """Break off the current change and refuse every other from now on."""
        if self._closed:
            return
        self._closed = why
        for waiting, _ in self._waiting:
            waiting.end(ExitCode.ERROR, why)
        self._waiting.clear()
        if self._current is not None:
            self._journal.tell(f"{self.current}-broken-off", "warning", why=why)
            self._current.end(ExitCode.ERROR, f"broken off: {why}")
        for rest, change in self._rests.items():
            change.end(ExitCode.ERROR, f"broken off: {why}")
            rest.cancel()
        if self._task is not None:
            self._task.cancel()

    async def wait_closed(self, timeout: float) -> None:
        """Wait until what was broken off is really over."""
        tasks = [*self._rests, *([] if self._task is None else [self._task])]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    async def _make_all(self) -> None:
        while self._waiting:
            self._current, work = self._waiting.popleft()
            try:
                await self._make(self._current, work)
            finally:
                self._current = None

    async def _make(self, change: Change, work: Work) -> None:
        self._journal.tell(f"{change.verb}-begin")
        rest: Rest | None = None

        async def begin() -> None:
            nonlocal rest
            rest = await work(change)

        await self._guard(change, begin)
        if rest is None or change.ending is not None:
            self._tell_end(change)
            return
        task = asyncio.get_running_loop().create_task(self._finish(change, rest), name=change.verb)
        self._rests[task] = change
        task.add_done_callback(self._rests.pop)

    async def _finish(self, change: Change, rest: Rest) -> None:
        await self._guard(change, rest)
        self._tell_end(change)

    async def _guard(self, change: Change, work: Rest) -> None:
        try:
            await work()
        except TaskQError as error:
            change.end(error.exit_code, str(error))
        except Exception as error:
            self._journal.tell(f"{change.verb}-error", "error", left=traceback.format_exc())
            change.end(ExitCode.INTERNAL, f"{change.verb} failed: {type(error).__name__}: {error}")

    def _tell_end(self, change: Change) -> None:
        if change.ending is None:
            change.end(ExitCode.DONE, "done")
        ending = change.ending or {}
        self.on_end(change.verb, ending["exit_code"])
        if ending["exit_code"]:
            self._journal.tell(f"{change.verb}-failed", "error", exit_code=ending["exit_code"], why=ending["text"])
        else:
            self._journal.tell(f"{change.verb}-done", result=ending["text"])
