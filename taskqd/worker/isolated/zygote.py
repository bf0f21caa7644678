"""The process that isolated attempts are forked from, and that sees to it that nothing of them is left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from taskqd.health.child import die_with_parent, show_name
from taskqd.health.forked import reseed
from taskqd.health.lines import encode
from taskqd.health.waiting import next_ended
from taskqd.worker.isolated.tree import become_subreaper, bury_all, children_of, descendants, kill, memory_above

LOOK_EVERY = 0.2
"""Seconds between two looks at the memory of attempts that have a limit."""
STRANGERS_TIME = 2.0
"""Seconds that what an attempt left behind may take to die; its end is told then all the same."""
_AGAIN = 0.002
_IDLE = 5.0
_OOM_SCORE = "600"
_ORPHANED, _INTERNAL = 75, 70


@dataclass(slots=True)
class _Attempt:
    """One process of the zygote's. ``used`` is the memory that it was killed for."""

    number: int
    memory_limit: int | None
    used: int | None = None


@dataclass(slots=True)
class _Ended:
    attempt: _Attempt
    status: int
    tell_by: float


class Zygote:
    """Forks at the other end of ``link``'s request: ``{"op": "fork", "number", "memory_limit"}``, with a descriptor.

    Answers ``forked`` with the process id, or ``failed``; tells ``ended`` once nothing of an attempt is left. ``kill``
    and ``term`` name an attempt. ``run(socket)`` is called in each new process with the descriptor that was sent.
    """

    def __init__(self, link: socket.socket, warden: int, run: Callable[[socket.socket], None]) -> None:
        self._link = link
        self._warden = warden
        self._run = run
        self._pid = os.getpid()
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._text = b""
        self._fds: list[int] = []
        self._attempts: dict[int, _Attempt] = {}
        self._ended: list[_Ended] = []
        self._look_at = 0.0

    def serve(self) -> NoReturn:
        """Work until the worker ends, or the warden, then end everything."""
        become_subreaper()
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _note)
        die_with_parent(signal.SIGTERM)
        while os.getppid() == self._warden:
            ready = select.select([self._link.fileno(), self._wake], [], [], self._pause())[0]
            if self._wake in ready:
                os.read(self._wake, 4096)
            if self._link.fileno() in ready and not self._receive():
                break
            self._bury()
            self._tell_ends()
            self._look_at_memory()
        self._end()

    def _pause(self) -> float:
        if self._ended:
            return _AGAIN
        limited = any(attempt.memory_limit is not None for attempt in self._attempts.values())
        return LOOK_EVERY if limited else _IDLE

    # -- what the worker asks for -------------------------------------------------------------------

    def _receive(self) -> bool:
        try:
            data, numbers, _, _ = socket.recv_fds(self._link, 65536, 4, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        self._fds += numbers
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, message: dict[str, Any]) -> None:
        if message["op"] == "fork":
            self._fork(message["number"], message["memory_limit"])
            return
        for pid, attempt in self._attempts.items():
            if attempt.number == message["number"]:
                if message["op"] == "kill":
                    kill(pid)
                else:
                    with contextlib.suppress(ProcessLookupError):  # it has ended, which is told in a moment
                        os.kill(pid, signal.SIGTERM)

    def _fork(self, number: int, memory_limit: int | None) -> None:
        passed = self._fds.pop(0)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(passed)
            self._tell(op="failed", number=number, why=error.strerror or str(error))
            return
        if not pid:
            self._become_attempt(passed)
        os.close(passed)
        self._attempts[pid] = _Attempt(number, memory_limit)
        self._tell(op="forked", number=number, pid=pid)

    def _tell(self, **message: object) -> None:
        with contextlib.suppress(OSError):  # the worker is gone, which the next look at the link shows
            self._link.sendall(encode(message))

    # -- ends ---------------------------------------------------------------------------------------

    def _bury(self) -> None:
        while (pid := next_ended()) is not None:
            attempt = self._attempts.pop(pid, None)
            if attempt is not None:
                kill(pid)  # what is left of its group: until it is buried no other can have this number
            status = os.waitpid(pid, 0)[1]
            if attempt is not None:
                self._ended.append(_Ended(attempt, status, time.monotonic() + STRANGERS_TIME))

    def _tell_ends(self) -> None:
        if not self._ended:
            return
        strangers = self._kill_strangers()
        ended, self._ended = self._ended, []
        for end in ended:
            if strangers and time.monotonic() < end.tell_by:
                self._ended.append(end)
            else:
                self._tell(op="ended", number=end.attempt.number, status=end.status, used=end.attempt.used)

    def _kill_strangers(self) -> bool:
        """Kill what has outlived its attempt; True when there was any."""
        if not _has_children(len(self._attempts)):
            return False
        strangers = [pid for pid in children_of().get(os.getpid(), ()) if pid not in self._attempts]
        for pid in strangers:
            kill(pid)
        return bool(strangers)

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        limited = [one for one in self._attempts.items() if one[1].memory_limit is not None and one[1].used is None]
        if not limited or now < self._look_at:
            return
        children = children_of()
        for pid, attempt in limited:
            assert attempt.memory_limit is not None  # noqa: S101 - looked at above
            attempt.used = memory_above(attempt.memory_limit, descendants(pid, children))
            if attempt.used is not None:
                kill(pid)
        # Looking costs more the more there is; it may take a tenth of a processor.
        took = time.monotonic() - now
        self._look_at = now + max(LOOK_EVERY - 0.01, 10 * took)

    def _end(self) -> NoReturn:
        bury_all(time.monotonic() + STRANGERS_TIME)
        os._exit(0)

    # -- in the new process -------------------------------------------------------------------------

    def _become_attempt(self, passed: int) -> NoReturn:
        code = _INTERNAL
        try:
            os.setsid()
            become_subreaper()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            die_with_parent()
            if os.getppid() != self._pid:  # only now: an end before the signal was armed is never told
                os._exit(_ORPHANED)
            os.close(self._wake)
            os.close(self._waker)
            self._link.close()
            show_name("isolated")
            _prefer_as_oom_victim()
            reseed()
            gc.enable()
            self._run(socket.socket(fileno=passed))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                    stream.flush()
            os._exit(code)


def _prefer_as_oom_victim() -> None:
    # Before the worker and the zygote: its end costs one attempt.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_SCORE)


def _note(_number: int, _frame: object) -> None:
    """The descriptor that signals are written to wakes the loop."""


def _has_children(known: int) -> bool:
    """False when there is certainly no child besides the ``known`` ones."""
    if known:
        return True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
