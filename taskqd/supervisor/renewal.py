"""When a process makes room for a fresh one: it has done enough, is wedged, or holds the most of too little memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from taskqd.domain.jitter import jitter
from taskqd.supervisor.child import Child
from taskqd.supervisor.events import Event, Recycle, Tell
from taskqd.supervisor.machine import Machine
from taskqd.supervisor.memory import RARE_INTERVAL, SAMPLE_INTERVAL, held_by
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.recycle import JITTER, overdue
from taskqd.supervisor.slot import State
from taskqd.supervisor.stopping import deadlines

RELIEF_PAUSE = 30.0
"""Seconds that a successor has, once it is up, to show what was won before the next process is taken for memory.

Twice as many each time that it did not help for as long.
"""

LONGEST_PAUSE = 3600.0
"""The most that these become: a group that needs more memory than it has is not worn down."""

LEAST_RELIEF = 0.05
"""The share of the memory limit that a process must hold by itself, so that its end is worth its jobs' trouble."""

_TRY_AGAIN = 60.0
"""Seconds until the next attempt to replace a process whose successor did not come up."""

_REPLACED = frozenset({State.READY, State.FATAL, State.DOWN, State.RETIRED, State.LOST})
"""The states in which a process that was replaced keeps nobody else waiting."""


@dataclass(slots=True)
class _Note:
    """What is remembered of one process."""

    sampled_at: float | None = None
    replace_at: float = 0.0
    factor: float = field(default_factory=lambda: jitter(1 - JITTER, 1 + JITTER))


class Renewal:
    """Measures the processes, and replaces one of them at a time."""

    def __init__(
        self,
        plan: Callable[[], Plan],
        apply: Callable[[Child, Event], None],
        machine: Machine,
        *,
        is_wedged: Callable[[Child, float], str],
        tell: Callable[[Child, Tell], None],
    ) -> None:
        self._plan = plan
        self._apply = apply
        self._machine = machine
        self._is_wedged = is_wedged
        self._tell = tell
        self._notes: dict[int, _Note] = {}
        self._leaving: Child | None = None
        self._relief_at = 0.0
        self._relief_pause = RELIEF_PAUSE
        self.in_change: Callable[[], bool] = bool
        """True while somebody else starts and ends processes."""
        self.succeed: Callable[[Child, str], bool] = _no_room
        """Starts a successor of a process before that one ends, and says whether there is room for both."""

    def round(self, children: Sequence[Child], now: float) -> None:
        """Measure one process, and replace one where it is time."""
        pids = [child.slot.pid for child in children if child.slot.pid is not None]
        self._notes = {pid: self._notes.get(pid) or _Note() for pid in pids}
        self._sample(children, now)
        if not self.in_change() and not self._waits(children, now):
            self._replace_one(children, now)

    def _sample(self, children: Sequence[Child], now: float) -> None:
        """Measure one process, the one whose turn it is: each look takes the kernel a while.

        A silent one is not measured: who holds its memory map could hold the supervisor too.
        """
        wanted = bool(self._machine.want_of_memory())
        due: list[tuple[float, Child]] = []
        for child in children:
            if child.slot.state is State.READY:
                at = self._note(child).sampled_at
                often = wanted or child.spec.recycle.max_private_mb is not None
                if at is None or now - at >= (SAMPLE_INTERVAL if often else RARE_INTERVAL):
                    due.append((0.0 if at is None else at, child))
        if due:
            _, child = min(due, key=lambda pair: pair[0])
            self._note(child).sampled_at = now
            if child.slot.pid is not None:
                child.held = held_by(child.slot.pid)

    def _waits(self, children: Sequence[Child], now: float) -> bool:
        """True while a process that was replaced is not back."""
        leaving = self._leaving
        if leaving is None:
            return False
        if leaving in children and leaving.slot.state not in _REPLACED and not leaving.slot.degraded:
            return True
        self._leaving = None
        self._relief_at = now + self._relief_pause
        self._relief_pause = min(2 * self._relief_pause, LONGEST_PAUSE)
        return False

    def _replace_one(self, children: Sequence[Child], now: float) -> None:
        for child in children:
            why = self._why_replace(child, now)
            if why:
                self._replace(child, why, now)
                return
        want = self._machine.want_of_memory()
        if now < self._relief_at:
            return
        if want:
            self._relieve(children, want, now)
        else:
            self._relief_pause = RELIEF_PAUSE

    def _replace(self, child: Child, why: str, now: float) -> None:
        """Let a successor start first where there is room for both; else the process ends, and is followed."""
        if self.succeed(child, why):
            self._note(child).replace_at = now + _TRY_AGAIN
            self._tell(child, Tell("recycle", fields={"pid": child.slot.pid, "why": why, "successor": "first"}))
            return
        self._drain(child, why, now)

    def _relieve(self, children: Sequence[Child], want: str, now: float) -> None:
        """End the worker that holds the most, without a successor beside it: that would need more memory."""
        limit = 0 if self._machine.memory is None else self._machine.memory.limit
        steady = [child for child in children if child.spec.role == "worker" and self._is_steady(child, now)]
        holders = [(child.held.dirty, child) for child in steady if child.held is not None]
        dirty, largest = max(holders, key=lambda holder: holder[0], default=(0, None))
        if largest is None or dirty < LEAST_RELIEF * limit:
            return
        self._drain(largest, f"{want}, and it the most of them, {dirty / 1024**2:.0f} MB", now)

    def _drain(self, child: Child, why: str, now: float) -> None:
        self._leaving = child
        child.deadlines = deadlines(now, self._plan().grace, child.spec.graces)
        self._apply(child, Recycle(child.deadlines.kill, why))

    def _why_replace(self, child: Child, now: float) -> str:
        slot, note = child.slot, self._note(child)
        if slot.state is not State.READY or slot.ready_at is None or slot.trial or now < note.replace_at:
            return ""
        if wedged := self._is_wedged(child, now):
            return wedged
        if not self._is_steady(child, now):
            return ""  # one that is over its limits when it starts must not be replaced without end
        jobs = sum(count for key in ("done", "failed") if isinstance(count := child.beat.get(key), int))
        private = None if child.held is None else child.held.private
        return overdue(child.spec.recycle, note.factor, jobs=jobs, age=now - slot.ready_at, private=private)

    def _is_steady(self, child: Child, now: float) -> bool:
        slot = child.slot
        if slot.state is not State.READY or slot.ready_at is None or slot.trial:
            return False
        return now - slot.ready_at >= slot.timing.restart.stable_after

    def _note(self, child: Child) -> _Note:
        pid = child.slot.pid or 0
        if pid not in self._notes:
            self._notes[pid] = _Note()
        return self._notes[pid]


def _no_room(_child: Child, _why: str) -> bool:
    return False
