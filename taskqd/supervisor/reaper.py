"""The only place that waits for processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from taskqd.health.waiting import next_ended

_SWEEP_INTERVAL = 5.0


class Reaper:
    """Calls back when a watched process has ended, and buries every other one that this process inherits.

    Before an ended process is buried, what is left of its group is killed: until then the zombie keeps its
    pid, so that no other group can carry that number.
    """

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[int], None]] = {}
        self._stops: dict[int, Callable[[bool], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.unknown = 0
        """Ended processes that nobody watched: grandchildren that came to this process as init."""

    def start(self) -> None:
        """Begin on the running loop: at each SIGCHLD, and now and then in case one was lost."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.sweep)
        self._again()

    def stop(self) -> None:
        """Wait for nothing more."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        if self._timer is not None:
            self._timer.cancel()

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call ``on_exit(code)`` once when the child ``pid`` has ended; the code is negative for a signal."""
        self._watched[pid] = on_exit

    def watch_adopted(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Like :meth:`watch`, for a child that another process has made: it may have ended and be buried already.

        Nobody knows its code then: it is told as killed, which is what ends a process that early.
        """
        self.watch(pid, on_exit)
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            del self._watched[pid]
            asyncio.get_running_loop().call_soon(on_exit, -signal.SIGKILL)

    def watch_stops(self, pid: int, on_stop: Callable[[bool], None]) -> None:
        """Call ``on_stop(True)`` whenever a signal stops the watched child ``pid``, and with False when it goes on."""
        self._stops[pid] = on_stop

    def sweep(self) -> None:
        """Bury everything that has ended by now, and tell who was stopped or goes on."""
        while (change := _next_change()) is not None:
            on_stop = self._stops.get(change[0])
            if on_stop is not None:
                on_stop(change[1])
        while (pid := next_ended()) is not None:
            on_exit = self._watched.pop(pid, None)
            self._stops.pop(pid, None)
            if on_exit is None:
                self.unknown += 1
            else:
                kill_group(pid)
            _, status = os.waitpid(pid, 0)
            if on_exit is not None:
                on_exit(os.waitstatus_to_exitcode(status))

    def _again(self) -> None:
        self.sweep()
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_INTERVAL, self._again)


def kill_group(pid: int) -> None:
    """Send SIGKILL to the whole process group that ``pid`` leads."""
    # Nobody may be left in it, or only what changed its user and is no longer ours to kill.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _next_change() -> tuple[int, bool] | None:
    """Return a child that was stopped, with True, or goes on, with False; each change is returned once."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
    except ChildProcessError:
        return None
    return None if found is None else (found.si_pid, found.si_code != os.CLD_CONTINUED)
