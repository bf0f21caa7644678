"""Ends a process whose event loop is dead or whose shutdown overruns, from a thread that neither can block."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from taskqd.domain.exit_codes import ExitCode
from taskqd.observe.logs import flush, get_logger
from taskqd.worker.stall import ADVICE, Stalls, find_stall

_log = get_logger("taskqd.watchdog")


def trip(detector: str, why: str, code: ExitCode = ExitCode.INTERNAL) -> None:
    """Dump every thread's stack to standard error and end the process at once."""
    _log.critical("worker-watchdog-trip", detector=detector, why=why, exit_code=int(code))
    flush()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(code)


class Watchdog:
    """Watches the event loop it is started on.

    A lag over ``warn`` seconds is logged with every thread's stack, once an episode, and attributed to the actor whose
    handler is to blame; over ``budget`` seconds it trips. A stall of the whole machine is told from a blocked loop by
    this thread's own clock and trips nothing. ``ended()``, asked on the loop, names what has ended that should run.
    """

    def __init__(self, *, budget: float, warn: float, check_interval: float, ended: Callable[[], str]) -> None:
        self._budget = budget
        self._warn = warn
        self._check_interval = check_interval
        self._ended = ended
        self._pulse = time.monotonic()
        self._stop = threading.Event()
        self._deadline: float | None = None
        self._warned = False
        self._watched = 0
        self.stalls = Stalls()
        """Whose handlers have blocked the loop so far."""
        self._thread = threading.Thread(target=self._watch, name="taskqd-watchdog", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start watching the running loop."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def set_deadline(self, deadline: float) -> None:
        """Trip when the process still lives at ``deadline`` (monotonic seconds); an earlier one stays."""
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    @property
    def lag(self) -> float:
        """Seconds since the loop last answered."""
        return time.monotonic() - self._pulse

    def _beat(self) -> None:
        self._pulse = time.monotonic()
        if found := self._ended():
            trip("part-ended", found)
        if self._loop is not None and not self._stop.is_set():
            self._loop.call_later(min(0.25, self._check_interval), self._beat)

    def _watch(self) -> None:
        checked = time.monotonic()
        while not self._stop.wait(self._check_interval):
            now = time.monotonic()
            stalled = now - checked > 2 * self._check_interval + 0.5
            checked = now
            if self._deadline is not None and now > self._deadline:
                trip("shutdown-deadline", "the shutdown overran its budget")
            if stalled:
                self._pulse = max(self._pulse, now - self._check_interval)
                continue
            lag = now - self._pulse
            if lag > self._budget:
                trip("event-loop-lag", f"the event loop has not run for {lag:.1f} s")
            if lag > self._warn and not self._warned:
                self._warned = True
                _log.warning("worker-watchdog-lag-warn", lag=round(lag, 2))
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._attribute()
            elif lag <= self._warn:
                self._warned = False

    def _attribute(self) -> None:
        stall = find_stall(self._watched)
        if stall is None:
            return
        self.stalls.add(stall)
        _log.error(
            "event-loop-stall-attributed",
            actor=stall.attempt.ref.name,
            job_id=str(stall.attempt.job_id),
            kind=stall.kind,
            line=stall.line,
            advice=ADVICE[stall.kind],
        )
