"""What a process holds of the machine's memory, and whether the kernel killed for want of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SAMPLE_INTERVAL = 15.0
"""Seconds between two looks at one process: the kernel walks its whole address space for each."""

RARE_INTERVAL = 60.0
"""The same for a process that has no limit, so that the figure is for people alone."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that one process holds."""

    private: int
    """What it shares with no other process: free once it ends. Not the resident size, which counts what processes
    share once for each of them."""
    dirty: int
    """What of that exists nowhere else, such as on a disk: it cannot be taken from the process."""


def held_by(pid: int) -> Held | None:
    """Measure a process; None where the system does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file if line.startswith(b"Private_")]
    except OSError:  # it has ended, changed its user, or this is no Linux
        return None
    sizes = {line[0]: int(line[1]) * 1024 for line in lines}
    dirty = sizes.get(b"Private_Dirty:")
    return None if dirty is None else Held(dirty + sizes.get(b"Private_Clean:", 0), dirty)


class OomCounter:
    """Blames each kill that the kernel made for want of memory, as ``count`` says, on one process."""

    def __init__(self, count: Callable[[], int | None]) -> None:
        self._count = count
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
        return self._count() or 0
