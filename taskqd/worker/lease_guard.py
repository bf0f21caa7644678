"""Sees to it that no lease ends under a worker that cannot renew it, whatever keeps it from that."""

from __future__ import annotations

import threading
import time

from taskqd.worker.attempt import Leases
from taskqd.worker.exit_timer import ExitTimer


class LeaseGuard:
    """Ends the process when no beat was made for ``window`` seconds, and something is held.

    The heartbeat thread does the same in Python, a little earlier and with more to say; this is for C code that keeps
    the interpreter lock, so that no thread of ours can run.
    """

    def __init__(self, leases: Leases, window: float) -> None:
        self._leases = leases
        self._window = window
        self._setting = threading.Lock()
        self._timer = ExitTimer()

    def start(self) -> None:
        """Begin."""
        self._leases.on_first = self._first

    def proven(self, since: float) -> None:
        """A beat was made that renewed what was held ``since`` then, in monotonic seconds."""
        with self._setting:
            if len(self._leases):
                self._timer.set(since + self._window - time.monotonic())
            else:
                self._timer.clear()

    def look(self) -> None:
        """End nothing while nothing is held."""
        with self._setting:
            if not len(self._leases):
                self._timer.clear()

    def stop(self) -> None:
        """End nothing any more."""
        with self._setting:
            self._leases.on_first = None
            self._timer.clear()

    def _first(self) -> None:
        # Set already: it was left as it is when the last one was settled, which the next look finds out.
        if not self._timer.is_set:
            with self._setting:
                self._timer.set(self._window)
