"""Replacing processes of a running group, starting more of them, and letting some go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from taskqd.domain.errors import TaskQError
from taskqd.supervisor.child import Child
from taskqd.supervisor.line import Change
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.slot import ALIVE, State

AWAY = frozenset({State.RETIRED, State.DOWN, State.LOST})
"""The states in which a process that was asked to end need not be waited for any more."""


class AbortedError(TaskQError):
    """A new process did not come up. What it was to replace still runs, or runs again."""


class Ground(Protocol):
    """What a roll needs of the running group."""

    def hire(self, spec: ChildSpec, index: int) -> Child:
        """Start a process on trial."""

    def seat(self, child: Child, instead_of: Child | None = None) -> None:
        """End its trial and give it its place."""

    def retire(self, child: Child, replaced: str | None = None) -> None:
        """Ask a process to end, within the time that a stop of the group would give it.

        ``replaced``: why it makes room for a fresh one, where it does.
        """

    def dismiss(self, child: Child) -> None:
        """Take away its place."""

    def rehire(self, child: Child) -> None:
        """Start a retired process again."""


class Roll:
    """The steps of one change."""

    def __init__(self, ground: Ground, change: Change) -> None:
        self._ground = ground
        self._change = change

    async def replace(self, old: Child, spec: ChildSpec, *, surge: bool, recycled: str | None = None) -> None:
        """Put a process of ``spec`` in the place of ``old``, which has done enough where it is ``recycled``.

        With ``surge`` the new one works before the old one is asked to drain; without, the old one is gone before
        the new one starts. Raises ``AbortedError`` when the new one fails; the old one then goes on.
        """
        if old.drained:
            old.spec = spec
            self._change.tell(f"{old.name} is drained: it will be the new one once it is resumed", child=old.name)
            return
        if not surge:
            await self._end_all([old], replaced=recycled)
            if old.slot.state is State.LOST:
                raise AbortedError(f"{old.name} cannot be ended, so that its successor cannot start")
        new = self._ground.hire(spec, old.index)
        new.set_quiet(old.quiet)
        self._change.tell(f"{new.name}: its successor starts", child=new.name, step="start")
        fault = await self._prove(new)
        if fault:
            if not surge:
                self._ground.rehire(old)
            raise AbortedError(f"{new.name}: the new process {fault}; the old one {'goes on' if surge else 'is back'}")
        self._ground.seat(new, old)
        if surge:
            self._change.tell(f"{new.name}: process {new.slot.pid} is ready, {old.slot.pid} drains", child=new.name)
            await self._end_all([old], replaced=recycled)
        self._change.tell(f"{new.name} is replaced", child=new.name, step="replaced", pid=new.slot.pid)

    async def grow(self, spec: ChildSpec, indexes: Sequence[int]) -> None:
        """Start the processes of ``spec`` with these indexes. When one fails none stays, and ``AbortedError`` is
        raised."""
        hired = [self._ground.hire(spec, index) for index in indexes]
        for new in hired:
            self._change.tell(f"{new.name} starts", child=new.name, step="start")
        faults = []
        for new in hired:
            fault = await self._prove(new)
            if fault:
                faults.append(f"{new.name} {fault}")
                break
            self._ground.seat(new)
            self._change.tell(f"{new.name} is ready", child=new.name, step="added", pid=new.slot.pid)
        if faults:
            seated = [new for new in hired if new.slot.state in ALIVE and not new.slot.trial]
            await self.shrink(seated)
            await self._end_all([new for new in hired if new not in seated])
            raise AbortedError(faults[0])

    async def shrink(self, members: Sequence[Child]) -> None:
        """Let members go for good, all at once."""
        for child in members:
            self._ground.dismiss(child)
            self._change.tell(f"{child.name} drains", child=child.name, step="drain")
        await self._end_all(members)

    async def _end_all(self, children: Sequence[Child], *, replaced: str | None = None) -> None:
        """Ask processes to end and wait for them; the slot of one that is late kills it."""
        for child in children:
            self._ground.retire(child, replaced)
        for child in children:
            await reached(child, AWAY)
            tell_end(self._change, child)

    async def _prove(self, new: Child) -> str:
        """Wait until ``new`` was ready for long enough; return what went wrong, or an empty string."""
        while new.slot.state not in AWAY:
            left: float | None = None
            if new.slot.state is State.READY and new.slot.ready_at is not None:
                left = new.slot.ready_at + new.spec.settle_after - time.monotonic()
                if left <= 0:
                    return ""
            await new.moves(left)
        if new.slot.state is State.LOST:
            return "hangs in the kernel and cannot be ended"
        end = new.slot.last_exit
        return f"did not come up: {end.why}" if end is not None else "could not be started"


async def reached(child: Child, states: frozenset[State]) -> None:
    """Return once ``child`` is in one of ``states``. Its slot's deadlines bound the wait."""
    while child.slot.state not in states:
        await child.moves(None)


def tell_end(change: Change, child: Child) -> None:
    """Say how a process that was asked to end has ended."""
    if child.slot.state is State.LOST:
        change.tell(f"{child.name}: process {child.slot.pid} cannot be ended", child=child.name, unclean=True)
    elif child.slot.unclean and child.slot.last_exit is not None:
        change.tell(f"{child.name} did not end well: {child.slot.last_exit.why}", child=child.name, unclean=True)
