"""How many processors the group may use: for ``replicas = "auto"``, and for how many workers boot at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNIFIED = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_LEGACY = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")


@dataclass(frozen=True, slots=True)
class Cpus:
    """``count`` is at least 1; ``source`` says in a few words what it follows from."""

    count: int
    source: str


def usable_cpus(root: str = "/") -> Cpus:
    """Return the processors that this process may use, less what a quota of its control groups takes away.

    A quota counts with whole processors alone, at least one: 2.5 are 2. Read anew by each call.
    """
    usable = _schedulable()
    quotas = sorted(_quotas(Path(root)), key=lambda quota: quota[0])
    if quotas and int(quotas[0][0]) < usable:
        granted, file = quotas[0]
        return Cpus(max(1, int(granted)), f"{file} grants {granted:.4g} CPUs")
    return Cpus(usable, f"{usable} usable CPU{'s' if usable > 1 else ''}")


def _schedulable() -> int:
    """Return on how many processors the system, or ``PYTHON_CPU_COUNT`` from Python 3.13 on, lets us run."""
    if hasattr(os, "process_cpu_count"):
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    """Yield each quota, in processors, with its file, of our control group and of those around it. Version 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _around(root, _UNIFIED, path):
                yield from _quota(root, group / "cpu.max")
        elif "cpu" in controllers.split(","):
            for group in _around(root, _LEGACY, path):
                yield from _quota(root, group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")


def _around(root: Path, mounts: tuple[str, ...], path: str) -> Iterator[Path]:
    """Yield where a control group may be and, outwards, those that hold it; a container may see its own as the root."""
    for mount in mounts:
        group = Path(path.lstrip("/"))
        yield root / mount / group
        for outer in group.parents if group.parts else ():
            yield root / mount / outer


def _quota(root: Path, *files: Path) -> Iterator[tuple[float, str]]:
    try:
        words = " ".join(file.read_text(encoding="ascii") for file in files).split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):  # there is none, or it says "max"
        return
    if quota > 0 and period > 0:
        yield quota / period, f"/{files[0].relative_to(root)}"
