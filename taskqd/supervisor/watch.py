"""Watching how the processes of a running group do: verdicts, and what follows from them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from taskqd.supervisor.cgroup import Cgroup
from taskqd.supervisor.child import Child
from taskqd.supervisor.events import Event, Suspected, Tell
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.machine import Machine
from taskqd.supervisor.memory import SAMPLE_INTERVAL, OomCounter
from taskqd.supervisor.pardon import Pardons
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.renewal import Renewal
from taskqd.supervisor.slot import State
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
)

_STANDSTILL = 2.0
"""Seconds between two rounds after which the supervisor itself stood still, and nobody else is blamed."""


class Watch:
    """Looks at every process once a round and applies what follows."""

    def __init__(
        self,
        plan: Callable[[], Plan],
        children: Callable[[], Sequence[Child]],
        apply: Callable[[Child, Event], None],
        journal: Journal,
        cgroup: Cgroup,
    ) -> None:
        self._children = children
        self._apply = apply
        self._journal = journal
        self._claiming: dict[int, Claiming] = {}
        self._looked_at: float | None = None
        self._oom = OomCounter(cgroup.oom_kills)
        self._oom_checked = 0.0
        self._pardons = Pardons(apply, journal, dump=lambda child: child.send_signal(signal.SIGUSR1))
        self.machine = Machine(cgroup, journal)
        """What the kernel grants the group."""
        self.renewal = Renewal(plan, apply, self.machine, is_wedged=self._wedged, tell=self._tell)
        """Replaces processes by fresh ones."""
        self.tally = Tally()
        """What was counted since the start."""

    def round(self, now: float) -> None:
        """Look at everything. Call it before deadlines are applied, so that whoever is killed has his verdict."""
        stood_still = self._looked_at is not None and now - self._looked_at > _STANDSTILL
        self._looked_at = now
        children = self._children()
        living = {child.slot.pid: child for child in children if child.slot.pid is not None}
        fresh = Claiming(None, now)
        self._claiming = {pid: fresh if stood_still else self._claiming.get(pid) or fresh for pid in living}
        self.machine.look(now)
        self._pardons.round(children, now, throttled=self.machine.withholds)
        for child in living.values():
            self._judge(child, now)
        if now - self._oom_checked >= SAMPLE_INTERVAL:
            self._oom_checked = now
            self._oom.forget()
        self.renewal.round(children, now)

    def told(self, child: Child, effect: Tell) -> None:
        """Count what is logged of a process."""
        inflight = child.beat.get("inflight")
        self.tally.told(
            child.spec.name,
            child.index,
            effect.event,
            effect.fields,
            inflight=inflight if isinstance(inflight, int) else 0,
        )

    def stopped(self, child: Child, stopped: bool) -> None:
        """The kernel says that the process was stopped, or goes on."""
        child.stopped = stopped
        event, level = ("stopped", "warning") if stopped else ("continued", "info")
        self._journal.tell(event, level, child=child.name, pid=child.slot.pid)

    def died_of_memory(self, child: Child, code: int) -> bool:
        """True when the kernel killed the process, which has just ended with ``code``, for want of memory."""
        return code == -signal.SIGKILL and child.slot.kill_reason is None and self._oom.take()

    def claim_age(self, child: Child, now: float) -> float | None:
        """Return for how long a worker that could has not looked for work, or None for what claims nothing."""
        claiming = self._claiming.get(child.slot.pid or 0)
        return None if claiming is None or claiming.polls is None else now - claiming.since

    def _judge(self, child: Child, now: float) -> None:
        slot, pid = child.slot, child.slot.pid or 0
        if slot.state is State.STALLED:
            settled = now - slot.since >= SETTLED_AFTER or (slot.deadline is not None and slot.deadline <= now)
            if not slot.suspicion and settled:
                child.look_for_words()
                found = judge_silence(stopped=child.stopped, canary=child.has_canary, word=child.spoke_up)
                child.verdict = found
                self._apply(child, Suspected(f"{found}: {MEANING[found]}"))
            self._claiming[pid] = Claiming(None, now)
        elif slot.state is State.READY:
            stale_after = child.spec.database_stale_after
            self._claiming[pid] = follow(self._claiming[pid], child.beat, now, stale_after=stale_after)
            cut_off = is_cut_off(child.beat, stale_after)
            if cut_off and child.verdict is not Verdict.ENVIRONMENT:
                self._tell_verdict(child, Verdict.ENVIRONMENT)
            child.verdict = Verdict.ENVIRONMENT if cut_off else None

    def _wedged(self, child: Child, now: float) -> str:
        """Return why a worker that beats is of no use, or an empty string."""
        if not is_wedged(self._claiming.get(child.slot.pid or 0) or Claiming(None, now), child.beat, now):
            return ""
        child.verdict = Verdict.WEDGED
        self._tell_verdict(child, Verdict.WEDGED)
        return f"{Verdict.WEDGED}: {MEANING[Verdict.WEDGED]}"

    def _tell_verdict(self, child: Child, found: Verdict) -> None:
        self._tell(child, Tell("verdict", "warning", {"pid": child.slot.pid, "verdict": f"{found}: {MEANING[found]}"}))

    def _tell(self, child: Child, effect: Tell) -> None:
        self.told(child, effect)
        self._journal.tell(effect.event, effect.level, child=child.name, **effect.fields)
