"""What the machine does to the whole group: it withholds the processor, or has hardly any memory left."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from taskqd.supervisor.cgroup import Cgroup, Memory
from taskqd.supervisor.journal import Journal

LOOK_INTERVAL = 2.0
"""Seconds between two looks."""

LIMIT_INTERVAL = 10.0
"""Seconds between two looks whether the memory is limited, while it is not."""

THROTTLED_ABOVE = 0.5
"""The share of the time without the processor from which on nobody is blamed for being slow."""

FULL_ABOVE = 0.9
"""The share of its memory limit from which on a group is near the kernel's killing."""

PRESSURE_ABOVE = 30.0
"""The share of the time, in percent, in which something waits for memory, from which on the group suffers."""


class Machine:
    """Looks at the control group now and then, and tells when it begins and ends to withhold the processor."""

    def __init__(self, cgroup: Cgroup, journal: Journal) -> None:
        self._cgroup = cgroup
        self._journal = journal
        self._before: tuple[float, float] | None = None
        self._memory_at = float("-inf")
        self.throttled = 0.0
        """The share of the time since the last look in which the group had to wait for processor time."""
        self.memory: Memory | None = None
        self.pressure: float | None = None

    @property
    def withholds(self) -> bool:
        """True while the group waits for the processor more than it runs."""
        return self.throttled > THROTTLED_ABOVE

    def look(self, now: float) -> None:
        """Look again when it is time."""
        if self._before is not None and now - self._before[0] < LOOK_INTERVAL:
            return
        if self.memory is not None or now - self._memory_at >= LIMIT_INTERVAL:
            self._memory_at = now
            self.memory, self.pressure = self._cgroup.memory(), self._cgroup.pressure()
        waited = self._cgroup.throttled()
        if waited is None:
            self._before = (now, 0.0)
            return
        did = self.withholds
        if self._before is not None:
            self.throttled = min(max(waited - self._before[1], 0.0) / (now - self._before[0]), 1.0)
        self._before = (now, waited)
        if self.withholds and not did:
            share = round(self.throttled, 2)
            self._journal.tell("throttled", "warning", share=share, deadlines="doubled", why="the processor's limit")
        elif did and not self.withholds:
            self._journal.tell("throttled-no-more", share=round(self.throttled, 2), deadlines="as set")

    def describe(self) -> dict[str, Any]:
        """Return what the status says of it."""
        memory = None if self.memory is None else asdict(self.memory)
        return {"cpu_throttled": round(self.throttled, 3), "memory": memory}

    def want_of_memory(self) -> str:
        """Return how the group suffers for want of memory, or an empty string."""
        memory = self.memory
        if memory is None:
            return ""
        used = f"the group holds {memory.used / 1024**2:.0f} of {memory.limit / 1024**2:.0f} MB"
        if memory.used > FULL_ABOVE * memory.limit:
            return used
        if self.pressure is not None and self.pressure > PRESSURE_ABOVE:
            return f"{used} and waits for memory {self.pressure:.0f} % of the time"
        return ""
