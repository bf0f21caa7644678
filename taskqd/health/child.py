"""The first lines of a supervised child: it must not outlive its supervisor, and must be able to show its
stack.

Imports little and runs before everything else, so that no slow or broken import comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from types import TracebackType
from typing import TextIO

_PR_SET_PDEATHSIG = 1
_ORPHANED = 75
_OOM_SCORE = "300"


_words: TextIO | None = None


def leave_word(text: str) -> None:
    """Add ``text`` to what the supervisor reads of this process besides its messages; nothing without one."""
    if _words is not None:
        os.write(_words.fileno(), text.encode())


def can_leave_words() -> bool:
    """True when the supervisor reads what :func:`leave_word` is given."""
    return _words is not None


def arm() -> None:
    """Bind this process to its supervisor; without one, only make ``SIGUSR1`` dump every thread's stack.

    The kernel kills this process when the supervisor ends, whatever this process does then (idle, spinning,
    blocked in C). Ends the process with 75 when the supervisor is gone already.
    """
    supervisor = os.environ.pop("TASKQD_SUPERVISOR_PID", None)
    if supervisor is not None:
        die_with_parent()
        # Only now: a parent that died before the signal was armed would never be noticed.
        if os.getppid() != int(supervisor):
            os._exit(_ORPHANED)
        _prefer_as_oom_victim()
        name = os.environ.get("TASKQD_NAME")
        show_name(f"{name}.{os.environ.get('TASKQD_INDEX', '0')}" if name else "helper")
    _show_stacks_in(_dump_file())


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process ``number`` when its parent ends. It may have ended already: look afterwards."""
    # The signal follows the parent's *thread* that made this process: the supervisor has only one. It
    # survives exec and is cleared by fork, so that what this process starts has to arm its own.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def leave_supervisor() -> None:
    """In a fork of a supervised child: show stacks on standard error, as the supervisor reads those of the child."""
    global _words
    words, _words = _words, None
    sys.excepthook = sys.__excepthook__
    _show_stacks_in(sys.stderr)
    if words is not None:
        os.close(words.fileno())


def show_name(name: str) -> None:
    """Be found in process lists by name: the command line of a forked process is that of what it was forked from."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="utf-8") as file:
        file.write(f"taskqd {name}")


def _prefer_as_oom_victim() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(_OOM_SCORE)
    except OSError:
        return  # no such file outside Linux, or read-only in a sandbox: the kernel chooses by size then


def _dump_file() -> TextIO:
    """Return the file that the supervisor reads after this process hung or died, else standard error."""
    number = os.environ.pop("TASKQD_DUMP_FD", None)
    if number is None:
        return sys.stderr
    os.set_inheritable(int(number), False)
    return open(int(number), "a", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _show_stacks_in(file: TextIO) -> None:
    # Both work from C, so that a stack is shown even while the interpreter lock is held.
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    if file is sys.stderr:
        return
    global _words
    _words = file

    def show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None, /) -> None:
        traceback.print_exception(kind, error, trace, file=file)
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = show_uncaught
