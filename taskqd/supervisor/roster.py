"""Who belongs to the group: its members, and the processes that come or go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from taskqd.supervisor.child import Child
from taskqd.supervisor.slot import ALIVE, State


class Roster:
    """Every process that the supervisor looks after.

    A *member* holds a place, such as ``io.0``. A process on trial has none yet, and one that was dismissed none
    any more; for a while two processes of one name may live side by side.
    """

    def __init__(self) -> None:
        self.all: list[Child] = []
        """Members, newcomers and leavers. Always this one list."""
        self.members: list[Child] = []
        """One process for each place, in the order of the plan. Always this one list."""

    def place(self, child: Child) -> None:
        """Look after a process that has its place from the first."""
        self.all.append(child)
        self.members.append(child)

    def admit(self, child: Child) -> None:
        """Look after a newcomer, which has no place yet."""
        self.all.append(child)

    def seat(self, child: Child, instead_of: Child | None = None) -> None:
        """Give a newcomer the place of another, which becomes a leaver, or one of its own."""
        if instead_of is not None:
            self.members[self.members.index(instead_of)] = child
            return
        names = [member.spec.name for member in self.members]
        name = child.spec.name
        last = max((position for position, other in enumerate(names) if other == name), default=len(names) - 1)
        self.members.insert(last + 1, child)

    def dismiss(self, child: Child) -> None:
        """Take away a member's place; it is looked after until it has ended."""
        self.members.remove(child)

    def sweep(self) -> None:
        """Forget whoever has no place and has ended."""
        if len(self.all) == len(self.members):
            return
        self.all[:] = [child for child in self.all if child in self.members or child.slot.state is not State.RETIRED]

    def named(self, name: str) -> list[Child]:
        """Return the members of one name, the lowest index first."""
        return [member for member in self.members if member.spec.name == name]

    def others(self) -> list[Child]:
        """Return the newcomers and leavers."""
        return [child for child in self.all if child not in self.members]

    def next_to_start(self, max_booting: int, waits: Callable[[Child], bool]) -> Iterator[Child]:
        """Yield what may start now: boots compete for CPU, so only so many workers at a time, and none that ``waits``.

        Others may come and go while one is started.
        """
        booting = sum(child.slot.state is State.BOOTING for child in self.all if child.spec.role == "worker")
        for child in list(self.all):
            if child.slot.state is not State.SPAWNING or not self.may_start(child):
                continue
            if child.spec.role == "worker":
                if booting >= max_booting or waits(child):
                    continue
                booting += 1
            yield child

    def may_start(self, child: Child) -> bool:
        """False for a scheduler while another one lives, were it one that cannot be ended: never two at a time."""
        return child.spec.role == "worker" or self.rival(child) is None

    def rival(self, child: Child) -> Child | None:
        """Return another living process of the same name and index, if there is one."""
        for other in self.all:
            if other is not child and other.name == child.name and other.slot.state in ALIVE:
                return other
        return None
