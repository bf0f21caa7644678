"""What the supervisor counts: ends by their reason, stalls, kills, how long starts and stops take."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The upper bounds of every histogram, in seconds."""

Labels = Mapping[str, object]

_EXITS = "taskqd_child_exits_total"
_RESTARTS = "taskqd_child_restarts_total"
_RECYCLES = "taskqd_child_recycles_total"
_REFUSED = "taskqd_child_spawn_failures_total"
_STALLS = "taskqd_child_stalls_total"
_KILLS = "taskqd_child_kills_total"
_LOST_JOBS = "taskqd_jobs_killed_at_shutdown_total"
_RELOADS = "taskqd_reload_total"

_COUNTERS = {
    _EXITS: "Ends of processes, by what they say.",
    _RESTARTS: "Starts after an end that nobody had asked for, by the class of that end.",
    _RECYCLES: "Processes that made room for a fresh one.",
    _REFUSED: "Processes that the system refused to make.",
    _STALLS: "What processes suffered from; brief: silent, but not for long enough to be judged.",
    _KILLS: "Deadly signals that the supervisor sent, and what for.",
    _LOST_JOBS: "Jobs that ran in a process which was asked to end and had to be killed.",
    _RELOADS: "Reloads, by what came of them.",
}

_COUNTED: dict[str, tuple[str, Callable[[Mapping[str, Any]], Labels]]] = {
    "child-exit": (_EXITS, lambda fields: {"class": fields.get("class", "stopped")}),
    "restart-scheduled": (_RESTARTS, lambda fields: {"reason": fields["reason"]}),
    "recycle": (_RECYCLES, lambda _: {}),
    "spawn-failed": (_REFUSED, lambda _: {}),
    "verdict": (_STALLS, lambda fields: {"kind": str(fields["verdict"]).partition(":")[0]}),
    "kill": (_KILLS, lambda fields: {"signal": fields["signal"], "why": fields["cause"]}),
}

_BOOT = "taskqd_child_boot_seconds"
_BACK = "taskqd_child_ready_seconds_since_crash"
_DRAIN = "taskqd_drain_seconds"
_GAP = "taskqd_supervisor_tick_gap_seconds"

_RESULTS: dict[int | None, str] = {0: "done", 1: "aborted", 78: "refused", None: "failed"}

_HISTOGRAMS = {
    _BOOT: "Seconds from the start of a process until it was ready.",
    _BACK: "Seconds from a crash until a process stood ready in that place again.",
    _DRAIN: "Seconds from asking a process to end until it had, and what came of it.",
    _GAP: "Seconds between two rounds of the supervisor; half a second when it has nothing to do.",
}


_FROM_ZERO: tuple[tuple[str, Labels], ...] = (
    (_EXITS, {"class": "crash"}),
    (_EXITS, {"class": "oom"}),
    (_RESTARTS, {"reason": "crash"}),
    (_RECYCLES, {}),
    (_KILLS, {"signal": "SIGABRT", "why": "stall"}),
    (_KILLS, {"signal": "SIGKILL", "why": "drain"}),
)


class Histogram:
    """How often something took how long."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one of ``seconds``."""
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Return it in the Prometheus text format."""
        total = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels}{"," if labels else ""}le="{bound}"}} {total}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {round(self._sum, 3)}"
        yield f"{name}_count{braces} {total}"


class Tally:
    """Counts the events that the supervisor tells of its processes."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._histograms: dict[tuple[str, str], Histogram] = {}
        for result in _RESULTS.values():
            self._count(_RELOADS, {"result": result}, 0)

    def expect(self, child: str, index: int) -> None:
        """Begin at 0 what alerts look at: of a counter that appears with its first event nobody sees it rise."""
        place = {"name": child, "index": index}
        for name, labels in _FROM_ZERO:
            self._count(name, {**place, **labels}, 0)
        self._count(_LOST_JOBS, {"name": child}, 0)

    def told(self, child: str, index: int, event: str, fields: Mapping[str, Any], *, inflight: int = 0) -> None:
        """Count one event of process ``index`` of those called ``child``, which ran ``inflight`` jobs."""
        place = {"name": child, "index": index}
        if event in _COUNTED:
            name, labels = _COUNTED[event]
            self._count(name, {**place, **labels(fields)})
        if event == "recovered" and not fields["judged"]:
            self._count(_STALLS, {**place, "kind": "brief"})
        if event == "ready":
            self._observe(_BOOT, fields["boot_s"], {"name": child})
            if "after_crash_s" in fields:
                self._observe(_BACK, fields["after_crash_s"], {"name": child})
        if "drain_s" in fields:
            self._observe(_DRAIN, fields["drain_s"], {"name": child, "outcome": fields["drained"]})
            if fields["drained"] == "killed" and inflight:
                self._count(_LOST_JOBS, {"name": child}, inflight)

    def reloaded(self, exit_code: int) -> None:
        """Count a reload that ended with ``exit_code``."""
        self._count(_RELOADS, {"result": _RESULTS.get(exit_code, _RESULTS[None])})

    def round(self, gap: float) -> None:
        """Count a round of the supervisor, ``gap`` seconds after the one before."""
        self._observe(_GAP, gap, {})

    @property
    def jobs_killed(self) -> int:
        """Jobs that ran in processes which were asked to end and had to be killed."""
        return sum(count for (name, _), count in self._counts.items() if name == _LOST_JOBS)

    def lines(self) -> list[str]:
        """Return everything in the Prometheus text format."""
        lines = []
        for name, meaning in _COUNTERS.items():
            samples = [f"{name}{{{labels}}} {count}" for (of, labels), count in self._counts.items() if of == name]
            if samples:
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter", *samples]
        for name, meaning in _HISTOGRAMS.items():
            found = [(labels, each) for (of, labels), each in self._histograms.items() if of == name]
            if found:
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"]
                lines += [line for labels, each in found for line in each.lines(name, labels)]
        return lines

    def _count(self, name: str, labels: Labels, by: int = 1) -> None:
        self._counts[name, _text(labels)] += by

    def _observe(self, name: str, seconds: float, labels: Labels) -> None:
        self._histograms.setdefault((name, _text(labels)), Histogram()).observe(float(seconds))


def _text(labels: Labels) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())
