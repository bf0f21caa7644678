"""Watching how the processes of a running group do: verdicts, memory, and when one makes room for a fresh one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from taskqd.domain.jitter import jitter
from taskqd.supervisor.child import Child
from taskqd.supervisor.events import Event, Rearm, Recycle, Suspected, Tell
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.memory import RARE_INTERVAL, SAMPLE_INTERVAL, OomCounter, private_bytes
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.recycle import JITTER, overdue
from taskqd.supervisor.slot import State
from taskqd.supervisor.stopping import deadlines
from taskqd.supervisor.tally import Tally
from taskqd.supervisor.verdict import (
    MEANING,
    SETTLED_AFTER,
    Claiming,
    Verdict,
    follow,
    is_cut_off,
    is_wedged,
    judge_silence,
    stalled_together,
)

_STANDSTILL = 1.5
"""Seconds between two rounds after which the supervisor itself stood still, and nobody else is blamed."""

_TRY_AGAIN = 60.0
"""Seconds until the next attempt to replace a process whose successor did not come up."""

_REPLACED = frozenset({State.READY, State.FATAL, State.DOWN, State.RETIRED, State.LOST})
"""The states in which a process that was replaced keeps nobody else waiting."""


@dataclass(slots=True)
class _Note:
    """What is remembered of one process."""

    claiming: Claiming = field(default_factory=Claiming)
    sampled_at: float | None = None
    stalled_at: float | None = None
    pardoned: bool = False
    replace_at: float = 0.0
    factor: float = field(default_factory=lambda: jitter(1 - JITTER, 1 + JITTER))


class Watch:
    """Looks at every process once a round and applies what follows."""

    def __init__(
        self,
        plan: Callable[[], Plan],
        children: Callable[[], Sequence[Child]],
        apply: Callable[[Child, Event], None],
        journal: Journal,
    ) -> None:
        self._plan = plan
        self._children = children
        self._apply = apply
        self._journal = journal
        self._notes: dict[int, _Note] = {}
        self._leaving: Child | None = None
        self._looked_at: float | None = None
        self._oom = OomCounter()
        self._oom_checked = 0.0
        self.tally = Tally()
        """What was counted since the start."""
        self.in_change: Callable[[], bool] = bool
        """True while somebody else starts and ends processes."""
        self.succeed: Callable[[Child, str], bool] = _no_room
        """Starts a successor of a process before that one ends, and says whether there is room for both."""

    def round(self, now: float) -> None:
        """Look at everything. Call it before deadlines are applied, so that whoever is killed has his verdict."""
        stood_still = self._looked_at is not None and now - self._looked_at > _STANDSTILL
        self._looked_at = now
        children = self._children()
        living = {child.slot.pid: child for child in children if child.slot.pid is not None}
        self._notes = {pid: self._notes.get(pid) or _Note() for pid in living}
        if stood_still:
            for note in self._notes.values():
                note.claiming = Claiming(None, now)
        self._pardon_all(children, now)
        for child in living.values():
            self._judge(child, now)
        self._sample(children, now)
        self._replace_one(children, now)

    def told(self, child: Child, effect: Tell) -> None:
        """Count what is logged of a process."""
        self.tally.told(child.spec.name, child.index, effect.event, effect.fields)

    def stopped(self, child: Child, stopped: bool) -> None:
        """The kernel says that the process was stopped, or goes on."""
        child.stopped = stopped
        event, level = ("stopped", "warning") if stopped else ("continued", "info")
        self._journal.tell(event, level, child=child.name, pid=child.slot.pid)

    def died_of_memory(self, child: Child, code: int) -> bool:
        """True when the kernel killed the process, which has just ended with ``code``, for want of memory."""
        return code == -signal.SIGKILL and child.slot.kill_reason is None and self._oom.take()

    # -- verdicts ---------------------------------------------------------------------------------

    def _judge(self, child: Child, now: float) -> None:
        slot, note = child.slot, self._note(child)
        if slot.state is State.STALLED:
            settled = now - slot.since >= SETTLED_AFTER or (slot.deadline is not None and slot.deadline <= now)
            if not slot.suspicion and settled:
                child.look_for_words()
                found = judge_silence(stopped=child.stopped, canary=child.has_canary, word=child.spoke_up)
                child.verdict = found
                self._apply(child, Suspected(f"{found}: {MEANING[found]}"))
            note.claiming = Claiming(None, now)
        elif slot.state is State.READY:
            note.claiming = follow(note.claiming, child.beat, now, stale_after=child.spec.database_stale_after)
            cut_off = is_cut_off(child.beat, child.spec.database_stale_after)
            if cut_off and child.verdict is not Verdict.ENVIRONMENT:
                self._tell_verdict(child, Verdict.ENVIRONMENT)
            child.verdict = Verdict.ENVIRONMENT if cut_off else None

    def _pardon_all(self, children: Sequence[Child], now: float) -> None:
        """Give everybody more time when most went silent together: then it is the machine that stands still."""
        silent = [child for child in children if child.slot.state is State.STALLED]
        if len(silent) < 2:
            return
        for child in silent:
            note = self._note(child)
            if note.stalled_at != child.slot.since:
                note.stalled_at, note.pardoned = child.slot.since, False
        watched = sum(child.slot.state in (State.READY, State.STALLED) for child in children)
        if all(self._note(child).pardoned for child in silent):
            return
        if not stalled_together([child.slot.since for child in silent], watched):
            return
        names = [child.name for child in silent]
        more = max(child.slot.timing.hang_kill_after for child in silent)
        self._journal.tell("correlated-stall", "error", children=names, of=watched, kill_in=more)
        for child in silent:
            note = self._note(child)
            if not note.pardoned:
                note.pardoned = True
                self._apply(child, Rearm(more))

    def _tell_verdict(self, child: Child, found: Verdict) -> None:
        fields = {"pid": child.slot.pid, "verdict": f"{found}: {MEANING[found]}"}
        self.told(child, Tell("verdict", fields=fields))
        self._journal.tell("verdict", "warning", child=child.name, **fields)

    # -- making room for a fresh one --------------------------------------------------------------

    def _sample(self, children: Sequence[Child], now: float) -> None:
        """Measure one process, the one whose turn it is: each look takes the kernel a while.

        A silent one is not measured: who holds its memory map could hold the supervisor too.
        """
        if now - self._oom_checked >= SAMPLE_INTERVAL:
            self._oom_checked = now
            self._oom.forget()
        due: list[tuple[float, Child]] = []
        for child in children:
            if child.slot.state is State.READY:
                at = self._note(child).sampled_at
                limited = child.spec.recycle.max_private_mb is not None
                if at is None or now - at >= (SAMPLE_INTERVAL if limited else RARE_INTERVAL):
                    due.append((0.0 if at is None else at, child))
        if due:
            _, child = min(due, key=lambda pair: pair[0])
            self._note(child).sampled_at = now
            if child.slot.pid is not None:
                child.private_bytes = private_bytes(child.slot.pid)

    def _replace_one(self, children: Sequence[Child], now: float) -> None:
        """Replace one process that has done enough, when no other is being replaced."""
        if self.in_change():
            return
        leaving = self._leaving
        if leaving is not None:
            back = leaving.slot.state in _REPLACED or leaving.slot.degraded
            if not back and leaving in children:
                return
            self._leaving = None
        for child in children:
            why = self._why_replace(child, now)
            if why:
                self._replace(child, why, now)
                return

    def _replace(self, child: Child, why: str, now: float) -> None:
        """Let a successor start first where there is room for both; else the process ends, and is followed."""
        if self.succeed(child, why):
            self._note(child).replace_at = now + _TRY_AGAIN
            told = Tell("recycle", fields={"pid": child.slot.pid, "why": why, "successor": "first"})
            self.told(child, told)
            self._journal.tell("recycle", child=child.name, **told.fields)
            return
        self._leaving = child
        child.deadlines = deadlines(now, self._plan().grace, child.spec.graces)
        self._apply(child, Recycle(child.deadlines.kill, why))

    def _why_replace(self, child: Child, now: float) -> str:
        slot, note = child.slot, self._note(child)
        if slot.state is not State.READY or slot.ready_at is None or slot.trial or now < note.replace_at:
            return ""
        if is_wedged(note.claiming, child.beat, now):
            child.verdict = Verdict.WEDGED
            self._tell_verdict(child, Verdict.WEDGED)
            return f"{Verdict.WEDGED}: {MEANING[Verdict.WEDGED]}"
        age = now - slot.ready_at
        if age < slot.timing.restart.stable_after:
            return ""  # one that is over its limits when it starts must not be replaced without end
        jobs = sum(count for key in ("done", "failed") if isinstance(count := child.beat.get(key), int))
        return overdue(child.spec.recycle, note.factor, jobs=jobs, age=age, private=child.private_bytes)

    def _note(self, child: Child) -> _Note:
        return self._notes.setdefault(child.slot.pid or 0, _Note())


def _no_room(_child: Child, _why: str) -> bool:
    return False
