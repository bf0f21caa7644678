"""Signals that arrive before the supervisor's loop runs: kept, and taken by it.

Imports next to nothing, so that it can be the first thing that ``taskqd run`` does: until then the system ends the
process with the first signal that comes. A handler, neither a mask nor "ignore": children would inherit those.
"""

from __future__ import annotations

import signal
from types import FrameType

HANDLED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""What the supervisor acts on."""

REPEATS = 3
"""How often one signal is kept: as often as one more of it may make a difference."""

_kept: list[signal.Signals] = []


def keep_signals() -> None:
    """Keep each of :data:`HANDLED` that arrives from now on."""
    for number in HANDLED:
        signal.signal(number, _keep)


def take_signals() -> list[signal.Signals]:
    """Return what was kept, in the order of arrival, and forget it."""
    taken = list(_kept)
    _kept.clear()
    return taken


def _keep(number: int, _frame: FrameType | None) -> None:
    if _kept.count(signal.Signals(number)) < REPEATS:
        _kept.append(signal.Signals(number))
