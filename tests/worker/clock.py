"""A clock that moves only when a test moves it, for the modules that read ``time.monotonic``."""

from __future__ import annotations

import pytest


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The time of this clock in seconds."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


def install(monkeypatch: pytest.MonkeyPatch, *modules: str) -> Clock:
    """Give the modules of ``taskqd.worker`` a clock and return it."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(f"taskqd.worker.{module}.time", clock)
    return clock
