"""What a process holds of the machine's memory, and whether the kernel killed for want of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

SAMPLE_INTERVAL = 15.0
"""Seconds between two looks at one process: the kernel walks its whole address space for each."""

RARE_INTERVAL = 60.0
"""The same for a process that has no limit, so that the figure is for people alone."""

_CGROUPS = "/sys/fs/cgroup"


def private_bytes(pid: int) -> int | None:
    """Return the memory that would be free if the process ended, or None where the system does not say.

    Not the resident size, which counts what processes share once for each of them.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = file.readlines()
    except OSError:  # it has ended, changed its user, or this is no Linux
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith((b"Private_Clean:", b"Private_Dirty:"))]
    return sum(found) * 1024 if found else None


class OomCounter:
    """How many processes of our control group the kernel has killed for want of memory. Version 1 and 2."""

    def __init__(self, paths: list[str] | None = None) -> None:
        self._path = next((path for path in paths or _counter_files() if _count(path) is not None), None)
        self._blamed = self._before = self._now()

    def take(self) -> bool:
        """True when there was a kill that no process was blamed on yet; it is from now on."""
        if self._now() <= self._blamed:
            return False
        self._blamed += 1
        return True

    def forget(self) -> None:
        """Blame nobody for kills that were counted before the last call already: the victim was not ours to bury."""
        self._blamed = max(self._blamed, self._before)
        self._before = self._now()

    def _now(self) -> int:
        return (_count(self._path) or 0) if self._path is not None else 0


def _counter_files() -> Iterator[str]:
    """Yield where the count of our own control group may be, best first; a container may see its own as the root."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if not controllers:
                yield f"{_CGROUPS}{path.rstrip('/')}/memory.events"
                yield f"{_CGROUPS}/memory.events"
            elif "memory" in controllers.split(","):
                yield f"{_CGROUPS}/memory{path.rstrip('/')}/memory.oom_control"
                yield f"{_CGROUPS}/memory/memory.oom_control"


def _count(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            fields = dict(line.split()[:2] for line in file)
    except (OSError, ValueError):
        return None
    return int(fields["oom_kill"]) if "oom_kill" in fields else None
