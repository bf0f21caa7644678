"""Ending a group: asked once its processes drain, a second time they hurry, a third time they are killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from taskqd.supervisor.board import Board
from taskqd.supervisor.child import Child
from taskqd.supervisor.events import Event, Kill, Stop
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.slot import ALIVE, State
from taskqd.supervisor.stopping import deadlines, hurry, last_moment


class StopRequests:
    """Takes requests at any time, and acts on them once a round."""

    def __init__(
        self,
        plan: Callable[[], Plan],
        children: Sequence[Child],
        apply: Callable[[Child, Event], None],
        board: Board,
        journal: Journal,
    ) -> None:
        self._plan = plan
        self._children = children
        self._apply = apply
        self._board = board
        self._journal = journal
        self._requests: list[str] = []
        self._done = 0
        self.last_moment: float | None = None
        """When the supervisor ends, whatever is left; None before the first request."""

    def add(self, reason: str) -> None:
        """Ask once more."""
        self._requests.append(reason)

    @property
    def any(self) -> bool:
        """True once the group was asked to end."""
        return bool(self._requests)

    @property
    def begun(self) -> bool:
        """True once its processes were."""
        return self._done > 0

    def over(self, now: float) -> bool:
        """True when every process has ended, or there is no time left to wait for them."""
        if self.last_moment is None:
            return False
        return now >= self.last_moment or not {child.slot.state for child in self._children} & (ALIVE - {State.LOST})

    def take(self, now: float) -> None:
        """Act on the requests that came since the last call."""
        while self._done < len(self._requests):
            reason = self._requests[self._done]
            self._done += 1
            if self._done == 1:
                self._begin(reason, now)
            elif self._done == 2:
                self._hurry(reason, now)
            else:
                self._journal.tell("shutdown-kill", "warning", reason=reason)
                for child in self._children:
                    self._apply(child, Kill(f"third request to stop: {reason}"))

    def _begin(self, reason: str, now: float) -> None:
        grace = self._plan().grace
        self._board.phase = "stopping"
        self.last_moment = self._board.stops_by = last_moment(now, grace)
        self._journal.tell("shutdown-begin", reason=reason, within_s=round(self.last_moment - now, 2))
        for child in self._children:
            child.deadlines = deadlines(now, grace, child.spec.graces)
            self._apply(child, Stop(child.deadlines.kill))

    def _hurry(self, reason: str, now: float) -> None:
        self._journal.tell("shutdown-hurry", "warning", reason=reason)
        for child in self._children:
            if child.deadlines is not None:
                child.deadlines = hurry(now, child.deadlines, child.spec.graces)
                self._apply(child, Stop(child.deadlines.kill))
