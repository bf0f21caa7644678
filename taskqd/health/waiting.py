"""Waiting for the ends of child processes."""

from __future__ import annotations

import os


def next_ended() -> int | None:
    """Return a child that has ended and is not buried yet, None when there is none.

    Until it is buried its number is nobody else's, so that its process group can still be killed.
    """
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid
