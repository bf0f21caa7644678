"""Many processes that die at one time: something that they share is to blame, and it is not rushed at. Pure."""

from __future__ import annotations

TOGETHER = 10.0
"""Seconds within which deaths count as one."""

AT_LEAST = 3
"""Deaths that are never too many."""

PAUSE = 2.0
"""Seconds for which nothing is started after too many deaths."""

STAGGER = 10.0
"""Seconds after that in which starts keep a distance."""

APART = 0.25
"""Seconds between two starts while they do."""


class Deaths:
    """The processes that died although they had been stable, and when the next one may be started."""

    def __init__(self) -> None:
        self._died: dict[str, float] = {}
        self._paused_until = 0.0
        self._apart_until = 0.0
        self._next_start = 0.0

    def died(self, name: str, now: float, of: int) -> list[str]:
        """Note that ``name`` died, one of ``of``; return all that died together when that has become too many."""
        self._died = {other: at for other, at in self._died.items() if now - at <= TOGETHER}
        self._died[name] = now
        if now < self._paused_until or len(self._died) <= max(AT_LEAST, of / 2):
            return []
        self._paused_until = now + PAUSE
        self._apart_until = self._paused_until + STAGGER
        return sorted(self._died)

    def may_start(self, now: float) -> bool:
        """True when a process may be started now."""
        return now >= max(self._paused_until, self._next_start)

    def started(self, now: float) -> None:
        """A process was started."""
        if now < self._apart_until:
            self._next_start = now + APART

    def next_start(self, now: float) -> float | None:
        """Return when the next one may be started, or None when it may at once."""
        return None if self.may_start(now) else max(self._paused_until, self._next_start)
