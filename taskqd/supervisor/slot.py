"""One place for one process: the states it may be in, its limits, and what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from taskqd.supervisor.exits import Exit
from taskqd.supervisor.restart import RestartRule


class State(StrEnum):
    """Where a slot is. ``deadline`` of the slot means something else in each."""

    DOWN = "down"
    """Nothing runs and nothing will."""
    SPAWNING = "spawning"
    """Waits for its turn to be started."""
    BOOTING = "booting"
    """Runs, not ready yet; deadline: killed then."""
    READY = "ready"
    """Does its work; deadline: stalled then, each beat moves it."""
    STALLED = "stalled"
    """Sends no beats; deadline: killed then."""
    DRAINING = "draining"
    """Was asked to stop; deadline: killed then."""
    KILLING = "killing"
    """Was sent a deadly signal; deadline: a deadlier one, or lost."""
    BACKOFF = "backoff"
    """Ended; deadline: started again then."""
    FATAL = "fatal"
    """Given up; only an operator starts it again."""
    RETIRED = "retired"
    """Was asked to end while the group goes on; only an operator starts it again."""
    LOST = "lost"
    """SIGKILL did not end it; its slot stays taken."""


ALIVE = frozenset(
    {State.BOOTING, State.READY, State.STALLED, State.DRAINING, State.KILLING, State.LOST},
)
"""The states in which a process exists."""

RUNNING = frozenset({State.BOOTING, State.READY, State.STALLED})
"""The states in which a process exists and is meant to go on."""


class KillCause(StrEnum):
    """What the supervisor kills for."""

    STALL = "stall"
    """It sent no beats for too long."""
    BOOT = "boot"
    """It was not ready in time."""
    PROTOCOL = "protocol"
    """It does not speak our protocol."""
    DRAIN = "drain"
    """It did not end in time after it was asked to."""
    STOP = "stop"
    """Somebody asked for the third time that the group end."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The limits of a slot, in seconds."""

    boot_timeout: float = 60.0
    boot_limit: float = 300.0
    """The most that a boot may take, whatever progress it reports."""
    stall_after: float = 3.0
    hang_kill_after: float = 30.0
    restart: RestartRule = field(default_factory=RestartRule)


@dataclass(frozen=True, slots=True)
class Slot:
    """One place for one process. ``since`` and every other time is monotonic, in seconds."""

    name: str
    timing: Timing = field(default_factory=Timing)
    state: State = State.DOWN
    since: float = 0.0
    deadline: float | None = None
    pid: int | None = None
    spawned_at: float = 0.0
    ready_at: float | None = None
    stopping: bool = False
    """The group stops: nothing is started again."""
    retiring: bool = False
    """Its process was asked to end for good, though the group goes on."""
    trial: bool = False
    """Its process has yet to prove itself; when it ends before, it is not started again."""
    replaced: str | None = None
    """Why its process was asked to make room for a fresh one."""
    suspicion: str = ""
    """What a silent process suffers from, once that is known."""
    kill_reason: str | None = None
    """Why the supervisor sent this process a deadly signal."""
    kill_cause: KillCause | None = None
    """The same in one word."""
    drain_since: float | None = None
    """When its process was asked to end."""
    crashed_at: float | None = None
    """When it ended without being asked to; None once it is ready again."""
    hard: bool = False
    """SIGKILL was sent."""
    unstable: int = 0
    degraded: bool = False
    restarts: int = 0
    """Starts after an end that nobody had asked for."""
    recycled: int = 0
    """Starts after an end that made room for a fresh process."""
    recent: tuple[float, ...] = ()
    """When the last restarts happened, as many as the burst guard needs."""
    unclean: bool = False
    """Its process had to be killed, or failed, after it was asked to end."""
    last_exit: Exit | None = None

    def dies_unasked(self, now: float) -> bool:
        """True when an end of its process now would be one of a process that had been stable and was to go on.

        Where ``stable_after`` is 0 there is no telling.
        """
        stable = self.timing.restart.stable_after
        up = None if self.ready_at is None else now - self.ready_at
        return self.state in RUNNING and up is not None and 0 < stable <= up

    def enter(self, state: State, now: float, deadline: float | None = None, **changes: Any) -> Slot:
        """Return the slot in ``state`` since ``now``."""
        return replace(self, state=state, since=now, deadline=deadline, **changes)

    def wanted(self, now: float, *, trial: bool = False) -> Slot:
        """Return the slot as it waits for its first start: nothing that happened before counts any more."""
        return self.enter(
            State.SPAWNING,
            now,
            unstable=0,
            degraded=False,
            crashed_at=None,
            recent=(),
            retiring=False,
            trial=trial,
            unclean=False,
        )
