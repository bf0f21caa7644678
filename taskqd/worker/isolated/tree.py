"""Processes and what they have started, as /proc tells it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36
_AGAIN = 0.002
_PAGE = os.sysconf("SC_PAGE_SIZE")


def children_of() -> dict[int, list[int]]:
    """Return the living children of every process that this one may see."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split(maxsplit=2)[:2]
                if state not in (b"Z", b"X"):
                    found.setdefault(int(parent), []).append(int(name))
    return found


def descendants(root: int, children: dict[int, list[int]]) -> Iterable[int]:
    """Yield ``root`` and everything below it."""
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children.get(pid, ())


def memory_above(limit: int, processes: Iterable[int]) -> int | None:
    """Return how many bytes these processes share with no other, None when it is at most ``limit``."""
    processes = list(processes)
    if sum(map(_resident, processes)) <= limit:  # cheap; the kernel walks the whole address space for the other
        return None
    private = sum(map(_private, processes))
    return private if private > limit else None


def kill(pid: int) -> None:
    """Kill a process that is not buried yet, and the process group that it leads."""
    for send in (os.kill, os.killpg):
        # It may not lead its group yet, or only what changed its user is left there.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def become_subreaper() -> None:
    """Have what descendants of this process leave behind come to it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_all(deadline: float) -> None:
    """Kill and bury every child of this process, and what comes to it then, until there is none."""
    while time.monotonic() < deadline:
        for pid in children_of().get(os.getpid(), ()):
            kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(_AGAIN)


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _private(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(b"Private_")) * 1024
    except OSError:
        return 0
