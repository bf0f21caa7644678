"""Ends the process at a set time, whatever Python does then: also while C code keeps the interpreter lock."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import sys
from typing import Any

from taskqd.domain.exit_codes import ExitCode

STACKS_BEFORE = 0.1
"""Seconds before the end at which every thread's stack is shown."""
_SIGEV_THREAD = 2
_CLOCK_MONOTONIC = 1


class _Event(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 32),
    )


class _Times(ctypes.Structure):
    """``struct itimerspec``: the interval, then the first time."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("again_s", "again_ns", "seconds", "nanoseconds"))


class ExitTimer:
    """Once :meth:`set`, ends the process with 70 when its time has come; :meth:`clear` takes that back.

    A timer of the system calls ``_exit`` on a thread that knows nothing of Python. Where there is none, that of
    ``faulthandler`` does, whose exit code is 1.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._library = _library()
        self._timer: ctypes.c_void_p | None = None

    def set(self, seconds: float) -> None:
        """End the process in so many seconds; replaces what was set before."""
        self.is_set = True
        seconds = max(seconds, 0.001)
        if self._timer is None:
            self._make()
        if self._library is None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
            return
        whole = int(seconds)
        times = _Times(seconds=whole, nanoseconds=int((seconds - whole) * 1e9))
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)
        faulthandler.dump_traceback_later(max(0.001, seconds - STACKS_BEFORE), file=sys.stderr)

    def _make(self) -> None:
        # Only now: it comes with a thread, and a process that is forked must have none.
        self._timer = ctypes.c_void_p()
        if self._library is not None:
            end = ctypes.cast(self._library._exit, ctypes.c_void_p)
            event = _Event(value=int(ExitCode.INTERNAL), notify=_SIGEV_THREAD, function=end)
            if self._library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
                self._library = None

    def clear(self) -> None:
        """Do not end the process after all."""
        if self.is_set:
            self.is_set = False
            faulthandler.cancel_dump_traceback_later()
            if self._library is not None:
                self._library.timer_settime(self._timer, 0, ctypes.byref(_Times()), None)


def _library() -> Any:
    """Return the C library that has the timers, None where they are not as they are described here."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    for name in (None, "librt.so.1"):  # a library of its own before glibc 2.34
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            library.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
            library.timer_create.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
            return library
    return None
