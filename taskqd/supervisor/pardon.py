"""More time for processes that are slow through no fault of theirs: the machine stands still, or runs hardly at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taskqd.supervisor.child import Child
from taskqd.supervisor.events import Event, Rearm
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.slot import RUNNING, State
from taskqd.supervisor.verdict import stalled_together

KILLS_APART = 10.0
"""Seconds between two kills of processes that went silent together."""


@dataclass(slots=True)
class _Note:
    """What one process was granted already."""

    stalled_at: float | None = None
    pardoned: bool = False
    doubled: tuple[object, ...] = ()


class Pardons:
    """Looks at every process once a round, before its deadline is applied. ``dump`` makes one show its stacks."""

    def __init__(
        self, apply: Callable[[Child, Event], None], journal: Journal, *, dump: Callable[[Child], None]
    ) -> None:
        self._apply = apply
        self._dump = dump
        self._journal = journal
        self._notes: dict[int, _Note] = {}
        self._next_kill = 0.0

    def round(self, children: Sequence[Child], now: float, *, throttled: bool) -> None:
        """Grant what is due. ``throttled``: the group gets hardly any processor time."""
        pids = [child.slot.pid for child in children if child.slot.pid is not None]
        self._notes = {pid: self._notes.get(pid) or _Note() for pid in pids}
        self._pardon_together(children)
        for child in children:
            due = child.slot.deadline is not None and child.slot.deadline <= now
            if not due or child.slot.state not in RUNNING:
                continue
            if throttled:
                self._double(child)
            if child.slot.state is State.STALLED and self._note(child).pardoned:
                self._keep_apart(child, now)

    def _pardon_together(self, children: Sequence[Child]) -> None:
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
        more = max(child.slot.timing.hang_kill_after for child in silent)
        names = [child.name for child in silent]
        self._journal.tell("correlated-stall", "error", children=names, of=watched, kill_in=more)
        for child in children:
            if child.slot.state is State.READY:  # the silent ones have shown theirs already
                self._dump(child)
        for child in silent:
            note = self._note(child)
            if not note.pardoned:
                note.pardoned = True
                self._apply(child, Rearm(more))

    def _keep_apart(self, child: Child, now: float) -> None:
        """Of those that went silent together kill one, and look for a while whether that helped the others."""
        deadline = child.slot.deadline
        if deadline is None or deadline > now:
            return
        if now < self._next_kill:
            self._apply(child, Rearm(self._next_kill - deadline))
        else:
            self._next_kill = now + KILLS_APART

    def _double(self, child: Child) -> None:
        """Grant the limit that has passed once more."""
        slot, note = child.slot, self._note(child)
        limit = (slot.state, slot.since, child.beat_at)
        if note.doubled == limit:
            return
        note.doubled = limit
        limits = {
            State.BOOTING: slot.timing.boot_timeout,
            State.READY: slot.timing.stall_after,
            State.STALLED: slot.timing.hang_kill_after,
        }
        self._apply(child, Rearm(limits[slot.state]))

    def _note(self, child: Child) -> _Note:
        return self._notes.setdefault(child.slot.pid or 0, _Note())
