"""What the kernel grants our control group, versions 1 and 2: processor time, memory, and whom it killed for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

ROOT = "/sys/fs/cgroup"
OWN = "/proc/self/cgroup"

_NO_LIMIT = 2**60
"""Version 1 writes some number near 2**63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use, without the files that the kernel can drop at any time, and the limit."""

    used: int
    limit: int


class Cgroup:
    """The control group that this process is in. Every answer is None where the system does not say."""

    def __init__(self, root: str = ROOT, own: str = OWN) -> None:
        self._memory_1, self._memory_2, self._cpu_1, self._cpu_2 = "", "", "", ""
        self._root = root
        with contextlib.suppress(OSError), open(own, encoding="utf-8") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if not controllers:
                    self._memory_2 = _find(root, path, "memory.current", "memory.events")
                    self._cpu_2 = _find(root, path, "cpu.stat")
                if "memory" in controllers.split(","):
                    self._memory_1 = _find(f"{root}/memory", path, "memory.usage_in_bytes", "memory.oom_control")
                if "cpu" in controllers.split(","):
                    self._cpu_1 = _find(f"{root}/cpu", path, "cpu.stat")

    def throttled(self) -> float | None:
        """Return the seconds for which the group had to wait for processor time since it exists."""
        if self._cpu_1:
            nanoseconds = _field(f"{self._cpu_1}/cpu.stat", "throttled_time")
            return None if nanoseconds is None else nanoseconds / 1e9
        microseconds = _field(f"{self._cpu_2}/cpu.stat", "throttled_usec") if self._cpu_2 else None
        return None if microseconds is None else microseconds / 1e6

    def memory(self) -> Memory | None:
        """Return how full the group is, or the one around it that is fullest; None where none has a limit."""
        found = [level for level in self._levels() if level is not None]
        return max(found, key=lambda level: level.used / level.limit, default=None)

    def pressure(self) -> float | None:
        """Return the share of the last ten seconds, in percent, in which something waited for memory. Version 2."""
        if not self._memory_2:
            return None
        with contextlib.suppress(OSError, ValueError), open(f"{self._memory_2}/memory.pressure") as file:
            for line in file:
                kind, *fields = line.split()
                if kind == "some":
                    return float(dict(field.split("=", 1) for field in fields)["avg10"])
        return None

    def oom_kills(self) -> int | None:
        """Return how many processes of the group the kernel has killed for want of memory."""
        if self._memory_1:
            return _field(f"{self._memory_1}/memory.oom_control", "oom_kill")
        return _field(f"{self._memory_2}/memory.events", "oom_kill") if self._memory_2 else None

    def _levels(self) -> Iterator[Memory | None]:
        for directory in self._upwards(self._memory_2):
            used, limit = _number(f"{directory}/memory.current"), _number(f"{directory}/memory.max")
            yield _memory(used, limit, _field(f"{directory}/memory.stat", "inactive_file"))
        for directory in self._upwards(self._memory_1):
            used, limit = _number(f"{directory}/memory.usage_in_bytes"), _number(f"{directory}/memory.limit_in_bytes")
            yield _memory(used, limit, _field(f"{directory}/memory.stat", "total_inactive_file"))

    def _upwards(self, directory: str) -> Iterator[str]:
        """Yield a directory and those around it, up to the root."""
        while len(directory) >= len(self._root):
            yield directory
            directory = os.path.dirname(directory)


def _find(base: str, path: str, *files: str) -> str:
    """Return where our own group's files are, or nothing; a container may see its own group as the root."""
    for directory in (f"{base}{path.rstrip('/')}", base):
        if any(os.path.exists(f"{directory}/{file}") for file in files):
            return directory
    return ""


def _memory(used: int | None, limit: int | None, droppable: int | None) -> Memory | None:
    if used is None or limit is None or not 0 < limit < _NO_LIMIT:
        return None
    return Memory(max(used - (droppable or 0), 0), limit)


def _number(path: str) -> int | None:
    """Return the number in a file; None when there is none, or it says ``max``."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _field(path: str, name: str) -> int | None:
    """Return the number behind a name in a file of ``name number`` lines."""
    try:
        with open(path, encoding="ascii") as file:
            fields = dict(line.split()[:2] for line in file)
        return int(fields[name])
    except (OSError, ValueError, KeyError):
        return None
