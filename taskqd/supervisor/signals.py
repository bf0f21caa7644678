"""What the supervisor is told by signals, and what it does about them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum

from taskqd.supervisor.board import Board
from taskqd.supervisor.early import HANDLED, REPEATS, take_signals
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.monitor import Monitor
from taskqd.supervisor.verbs import Verbs

LAST_LOOK = 0.5
"""Seconds that processes have to show their stacks before they are killed at SIGQUIT."""

SHOW_INTERVAL = 1.0
"""Seconds between two times that everything is shown, however often it is asked for."""


class Meaning(StrEnum):
    """What a signal asks for."""

    STOP = "stop"
    """End, within the grace; a second time sooner, a third time at once."""
    RELOAD = "reload"
    QUIT = "quit"
    """Show every stack and kill everything."""
    SHOW = "show"
    """Log the state of the group and every stack."""
    RENEW = "renew"
    """Put fresh processes into every place."""


_MEANINGS = dict(
    zip(HANDLED, (Meaning.STOP, Meaning.STOP, Meaning.RELOAD, Meaning.QUIT, Meaning.SHOW, Meaning.RENEW), strict=True)
)


class Signals:
    """Passes each signal to whoever listens for what it means. What comes before anybody does is kept for him."""

    def __init__(self) -> None:
        self._listeners: dict[Meaning, Callable[[str], None]] = {}
        self._early: list[tuple[Meaning, str]] = []
        self._on_terminal = os.isatty(0)  # once it is closed, nothing tells any more that it was one

    def install(self) -> None:
        """Handle them on the running loop, those first that came before it ran."""
        loop = asyncio.get_running_loop()
        for number in HANDLED:
            loop.add_signal_handler(number, self._arrived, number)
        for number in take_signals():
            self._arrived(number)

    def close(self) -> None:
        """Let nothing interrupt the end: the process ends now, and its exit code is what it has to say."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    def listen(self, meaning: Meaning, listener: Callable[[str], None]) -> None:
        """Call ``listener(name of the signal)`` for each from now on, and at once for what was kept."""
        self._listeners[meaning] = listener
        early, self._early = self._early, []
        for known, name in early:
            self._pass_on(known, name)

    def _arrived(self, number: signal.Signals) -> None:
        closed = number == signal.SIGHUP and self._on_terminal  # a closed terminal ends what it started
        self._pass_on(Meaning.STOP if closed else _MEANINGS[number], number.name)

    def _pass_on(self, meaning: Meaning, name: str) -> None:
        if meaning in self._listeners:
            self._listeners[meaning](name)
        elif sum(known is meaning for known, _ in self._early) < REPEATS:
            self._early.append((meaning, name))


class Orders:
    """Makes a running group do what the signals mean."""

    def __init__(self, monitor: Monitor, verbs: Verbs, board: Board, journal: Journal) -> None:
        self._monitor = monitor
        self._verbs = verbs
        self._board = board
        self._journal = journal
        self._shown_at = float("-inf")

    def follow(self, signals: Signals) -> None:
        """Listen for everything but a reload."""
        signals.listen(Meaning.STOP, self._monitor.stop)
        signals.listen(Meaning.QUIT, self._quit)
        signals.listen(Meaning.SHOW, self._show)
        signals.listen(Meaning.RENEW, self._verbs.renew)

    def _quit(self, reason: str) -> None:
        self._journal.tell("shutdown-quit", "warning", reason=reason)
        self._show_stacks()
        asyncio.get_running_loop().call_later(LAST_LOOK, self._kill, reason)

    def _kill(self, reason: str) -> None:
        for _ in range(REPEATS):
            self._monitor.stop(reason)

    def _show(self, reason: str) -> None:
        if time.monotonic() - self._shown_at < SHOW_INTERVAL:
            return
        self._shown_at = time.monotonic()
        states = {child.name: str(child.slot.state) for child in self._monitor.roster.all}
        self._journal.tell("status", reason=reason, group_is=self._board.headline(), processes=states)
        self._show_stacks()

    def _show_stacks(self) -> None:
        for child in self._monitor.roster.all:
            if child.beat_at is not None:  # one that is not so far would be ended by the signal
                child.send_signal(signal.SIGUSR1)
