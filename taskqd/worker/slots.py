"""The local queue between the producer and the consumers, and the rule for how far to claim ahead."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from statistics import median_low

from taskqd.worker.attempt import Attempt

WINDOW = 0.05
"""Seconds: no more unstarted rows are held than this worker finished in the last window."""
SLOW_HANDLER = 0.01
"""Seconds: a median handler slower than this gains nothing from claiming ahead."""
MAX_PREFETCH = 1000
_SAMPLE = 32


class Slots:
    """``size`` consumers take attempts from here; ``on_room`` is called when claiming more would help."""

    def __init__(self, size: int, on_room: Callable[[], None]) -> None:
        self.size = size
        self.busy = 0
        """Consumers that run a handler now."""
        self.done = 0
        """Attempts that ran to their end since the start."""
        self._on_room = on_room
        self._first: deque[Attempt] = deque()
        self._queue: deque[Attempt] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._durations: deque[float] = deque(maxlen=_SAMPLE)
        self._window_start = 0.0
        self._in_window = 0
        self._last_window = 0
        self._low = 0
        """Rows waiting here at which claiming more helps, as of the last look at the room."""
        self._plain_held = self._all_held = False
        self._closed = False

    # -- producer's side ----------------------------------------------------------------------------

    def room(self) -> int:
        """How many attempts to claim now; 0 while the local queue is full enough."""
        ahead = self._prefetch()
        self._low = ahead // 2
        waiting = self.waiting
        free = self.size - self.busy
        if self._plain_held or self._all_held:
            return 0
        if waiting >= free and waiting > ahead // 2:
            return 0
        return max(0, free + ahead - waiting)

    def put(self, attempts: list[Attempt], *, first: bool = False) -> None:
        """Queue claimed attempts for the consumers, ``first`` those that hold what others wait for.

        Wakes one consumer, which wakes the next when its handler waits: what never waits is run by one alone.
        """
        (self._first if first else self._queue).extend(attempts)
        self.more()

    def more(self) -> None:
        """Let one more consumer begin, if there is something to begin: the caller's own is about to wait."""
        if self._may_begin():
            self._wake_one()

    def take_stale(self, age: float) -> list[Attempt]:
        """Remove and return the attempts that have waited here for more than ``age`` seconds."""
        limit = time.monotonic() - age
        stale = []
        for queue in (self._first, self._queue):
            while queue and queue[0].claimed_at < limit:
                stale.append(queue.popleft())
        return stale

    def take_all(self) -> list[Attempt]:
        """Remove and return every attempt that has not begun."""
        unstarted = [*self._first, *self._queue]
        self._first.clear()
        self._queue.clear()
        return unstarted

    def hold(self, plain: bool, everything: bool) -> None:
        """Begin nothing that nothing limits while ``plain``, nothing at all while ``everything``: outcomes wait for the
        database."""
        self._plain_held, self._all_held = plain, everything
        self.more()
        if not (plain or everything):
            self._on_room()

    def close(self) -> None:
        """Begin nothing more: idle consumers end now, the others after their attempt. ``take_all`` gets the rest."""
        self._closed = True
        while self._wake_one():
            pass

    @property
    def waiting(self) -> int:
        """Attempts claimed and not begun."""
        return len(self._first) + len(self._queue)

    # -- consumers' side ----------------------------------------------------------------------------

    async def get(self) -> Attempt | None:
        """Wait for the next attempt; None once closed."""
        while not self._may_begin() and not self._closed:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiter)
            self._on_room()
            await waiter
        if self._closed:
            return None
        attempt = self._first.popleft() if self._first else self._queue.popleft()
        self.busy += 1
        if len(self._queue) <= self._low:
            self._on_room()
        return attempt

    def finished(self, seconds: float) -> None:
        """Count a handler that ended after ``seconds``; its slot is free."""
        self.busy -= 1
        self.done += 1
        self._durations.append(seconds)
        self._roll()
        self._in_window += 1

    def _may_begin(self) -> bool:
        if self._all_held:
            return False
        return bool(self._first or (self._queue and not self._plain_held))

    # -- the prefetch rule --------------------------------------------------------------------------

    def _prefetch(self) -> int:
        self._roll()
        finished = max(self._last_window, self._in_window)
        if not finished or median_low(self._durations) > SLOW_HANDLER:
            return 0
        return min(MAX_PREFETCH, finished)

    def _roll(self) -> None:
        now = time.monotonic()
        age = now - self._window_start
        if age > WINDOW:
            self._last_window = self._in_window if age <= 2 * WINDOW else 0
            self._in_window = 0
            self._window_start = now

    def _wake_one(self) -> bool:
        while self._idle:
            waiter = self._idle.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False
