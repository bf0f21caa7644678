"""The parent of the zygote, to which falls what that leaves behind when somebody kills it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from taskqd.health.child import die_with_parent, show_name
from taskqd.worker.isolated.tree import become_subreaper, bury_all

LOOK_EVERY = 5.0
"""Seconds between two looks at the worker, should no signal tell of its end."""
CLEAR_TIME = 10.0
"""Seconds that everything may take to die."""
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def keep(worker: int, serve: Callable[[int], NoReturn]) -> NoReturn:
    """Fork a process that calls ``serve(its parent)``; end with it, with the ``worker`` or at SIGTERM, after all else.

    The orphans of an attempt fall to the zygote, and those of a zygote that was killed fall to this process. It runs
    no code of actors and does nothing but wait, and should it be killed itself, the zygote ends everything.
    """
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    warden = os.getpid()
    zygote = os.fork()
    if not zygote:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        serve(warden)
    show_name("warden")
    die_with_parent(signal.SIGTERM)
    # Only now: an end of the worker before the signal was armed is never told.
    while os.getppid() == worker and _runs(zygote):
        told = signal.sigtimedwait(_SIGNALS, LOOK_EVERY)
        if told is not None and told.si_signo == signal.SIGTERM:
            break
    bury_all(time.monotonic() + CLEAR_TIME)
    os._exit(0)


def _runs(zygote: int) -> bool:
    """Bury what has ended; False once that is the zygote."""
    while True:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid in (0, zygote):
            return pid == 0
