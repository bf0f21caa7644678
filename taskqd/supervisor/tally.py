"""What the supervisor counts: ends by their reason, stalls, kills, how long starts take."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The upper bounds of the histogram of starts, in seconds."""

_COUNTED = {
    "child-exit": ("taskqd_child_exits_total", "Ends of processes, by what they say.", "class"),
    "stalled": ("taskqd_child_stalls_total", "Silences beyond their limit.", None),
    "verdict": ("taskqd_child_verdicts_total", "What processes suffered from.", "verdict"),
    "kill": ("taskqd_child_kills_total", "Processes that had to be killed.", None),
    "recycle": ("taskqd_child_recycles_total", "Processes that made room for a fresh one.", None),
    "spawn-failed": ("taskqd_child_spawn_failures_total", "Processes that the system refused to make.", None),
}
_BOOT = "taskqd_child_boot_seconds"


class Tally:
    """Counts the events that the supervisor tells of its processes."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._boots: dict[str, list[int]] = {}
        self._boot_sums: dict[str, float] = {}

    def told(self, child: str, index: int, event: str, fields: Mapping[str, Any]) -> None:
        """Count one event of process ``index`` of those called ``child``."""
        if event == "ready" and "boot_s" in fields:
            seconds = float(fields["boot_s"])
            self._boots.setdefault(child, [0] * (len(BOUNDS) + 1))[bisect_left(BOUNDS, seconds)] += 1
            self._boot_sums[child] = self._boot_sums.get(child, 0.0) + seconds
        if event in _COUNTED:
            label = _COUNTED[event][2]
            labels = f'name="{child}",index="{index}"'
            if label is not None:
                labels += f',{label}="{fields.get(label, "stopped")}"'
            self._counts[event, labels] += 1

    def lines(self) -> list[str]:
        """Return everything in the Prometheus text format."""
        lines = []
        for event, (name, meaning, _) in _COUNTED.items():
            samples = [f"{name}{{{labels}}} {count}" for (of, labels), count in self._counts.items() if of == event]
            if samples:
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter", *samples]
        if self._boots:
            lines += [f"# HELP {_BOOT} Seconds from the start of a process until it was ready."]
            lines += [f"# TYPE {_BOOT} histogram"]
        for child, counts in self._boots.items():
            total = 0
            for bound, count in zip((*map(str, BOUNDS), "+Inf"), counts, strict=True):
                total += count
                lines.append(f'{_BOOT}_bucket{{name="{child}",le="{bound}"}} {total}')
            lines.append(f'{_BOOT}_sum{{name="{child}"}} {round(self._boot_sums[child], 3)}')
            lines.append(f'{_BOOT}_count{{name="{child}"}} {total}')
        return lines
