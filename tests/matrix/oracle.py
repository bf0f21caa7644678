"""What must hold after every fault, whatever the test was about.

No process is left that carries the group's tag in its environment, and nothing in its runtime directory; the exit code
is the declared one; every event in the log is a declared one; the supervisor holds no more descriptors and threads
before its stop than after its start.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from taskqd.supervisor.vocabulary import EVENTS
from tests.supervisor.conftest import TAG, Group
from tests.support import wait_until

GONE_WITHIN = 10.0
"""Seconds until the last process of a group must be gone, on a busy machine, once its supervisor has ended."""

_PER_CHILD, _PER_SPARE = 2, 1
"""Descriptors that the supervisor holds for each of its processes: the link, and the file for last words, which one
that is only laid in does not have."""

_LEAKS = ("exception was never retrieved", "Exception in callback", "was destroyed but it is pending")


@contextlib.contextmanager
def oracle(group: Group, *, ready: int = 1, ends: int | tuple[int, ...] = 0) -> Iterator[Group]:
    """Give ``group`` to a test once ``ready`` of its processes were ready, stop it, and look at what is left.

    ``ends``: the exit code, whether the test stops the group, the group ends by itself, or it is stopped here. With
    ``ready=0`` the test begins at once, and descriptors and threads are not compared.
    """
    before = None
    if ready:
        group.wait_for("ready", ready, timeout=60)
        before = vitals(group.command.pid)
    yield group
    if group.command.process.poll() is None:
        if before is not None:
            check_flat(group.command.pid, before)
        group.stop()
    code = group.command.wait()
    declared = ends if isinstance(ends, tuple) else (ends,)
    assert code in declared, f"exit code {code} instead of {ends}\n{group.command.stderr}"
    check_nothing_left(group)
    check_log(group)


def check_nothing_left(group: Group) -> None:
    """Fail while a process of the group lives, and when a file is left in its runtime directory."""
    wait_until(lambda: not tagged(group.tag), GONE_WITHIN, "no process of the group is left")
    left = group.left_over()
    assert not left, f"left: {left}"


def check_log(group: Group) -> None:
    """Fail when a supervisor of this group has logged what nobody has declared, or lost an exception."""
    unknown = {event["event"] for event in group.all_events() if "group" in event} - EVENTS.keys()
    assert not unknown, f"not in taskqd/supervisor/vocabulary.py: {sorted(unknown)}"
    text = group.everything_logged()
    assert not [leak for leak in _LEAKS if leak in text], text


@dataclass(frozen=True)
class Vitals:
    """What a supervisor holds, but for what each of its processes costs."""

    descriptors: int
    threads: int


def vitals(pid: int) -> Vitals:
    """Measure a supervisor, when nothing comes or goes: a process is laid in soon after the last one is ready."""
    with contextlib.suppress(AssertionError):  # where none can be
        wait_until(lambda: _names(pid) & {"taskqd zygote", "taskqd spare"} != {"taskqd zygote"}, 3)
    found = [_look(pid)]

    def settled() -> bool:
        time.sleep(0.2)
        found.append(_look(pid))
        return found[-1] == found[-2]

    wait_until(settled, 10)
    return found[-1]


def _names(pid: int) -> set[str]:
    names = set()
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(child.name())
    return names


def _look(pid: int) -> Vitals:
    process = psutil.Process(pid)
    with process.oneshot():
        held = sum(costs(child) for child in process.children())
        return Vitals(process.num_fds() - held, process.num_threads())


def costs(child: psutil.Process) -> int:
    """Return how many descriptors the supervisor holds for a process: none for what has ended."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            return 0
        return _PER_SPARE if child.name() == "taskqd spare" else _PER_CHILD
    except psutil.NoSuchProcess:
        return 0


def check_flat(pid: int, before: Vitals) -> None:
    """Fail when a supervisor goes on holding more than ``before``."""

    def flat() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # a child has ended between two looks
            now = _look(pid)
            return now.descriptors <= before.descriptors and now.threads <= before.threads
        return False

    try:
        wait_until(flat, 10)
    except AssertionError:
        held = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        raise AssertionError(f"{_look(pid)} after {before}: {held}") from None


def tagged(tag: str) -> list[int]:
    """Return every living process that carries the tag: descendants, adopted ones, and those in other sessions."""
    wanted = f"{TAG}={tag}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile, or another user's
                if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def needs(present: bool, what: str) -> None:
    """Skip the test, and say why, on a machine that lacks ``what`` it needs."""
    if not present:
        pytest.skip(f"this machine lacks {what}")


def works(*command: str) -> bool:
    """True when this machine lets us run ``command`` to a good end."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=False)
    except OSError:
        return False
    return done.returncode == 0
