"""What may happen to a slot, and what the shell is then told to do."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from taskqd.domain.exit_codes import ExitCode


@dataclass(frozen=True, slots=True)
class Start:
    """Bring the slot up. On ``trial`` it is not started again when it ends."""

    trial: bool = False


@dataclass(frozen=True, slots=True)
class Spawned:
    """Its process exists."""

    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The system refused to make a process."""

    why: str
    jitter: float = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The process reported that booting goes on."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process reported that it works."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The process's event loop is alive."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the process to end; it is killed at ``deadline``."""

    deadline: float


@dataclass(frozen=True, slots=True)
class Retire:
    """Ask the process to end while the group goes on; it is killed at ``deadline`` and stays away until started.

    ``replaced``: why a fresh process has taken its place, if that is the reason.
    """

    deadline: float
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class Settle:
    """The trial is over: from now on the process is started again when it ends."""


@dataclass(frozen=True, slots=True)
class Recycle:
    """Put a fresh process in the place of one that works: it drains, is killed at ``deadline``, and is followed."""

    deadline: float
    why: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """It is known what a silent process suffers from."""

    what: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process now, for good."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The process cannot be watched any more: it does not speak our protocol."""

    why: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone. ``came_up``: one of its kind was ready once. ``goodbye``: it had said it would end.

    ``oom``: the kernel killed it for want of memory.
    """

    code: int
    came_up: bool
    goodbye: bool = False
    jitter: float = 1.0
    oom: bool = False


@dataclass(frozen=True, slots=True)
class Due:
    """The deadline has passed."""


@dataclass(frozen=True, slots=True)
class Rearm:
    """The supervisor itself stood still for ``gap`` seconds: nobody can be blamed for silence."""

    gap: float


Event = (
    Start
    | Spawned
    | SpawnFailed
    | Progress
    | Ready
    | Beat
    | Settle
    | Stop
    | Retire
    | Recycle
    | Suspected
    | Kill
    | Broken
    | Exited
    | Due
    | Rearm
)


# -- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the process a signal; SIGKILL goes to its whole group."""

    number: signal.Signals


@dataclass(frozen=True, slots=True)
class AskToDrain:
    """Pass the stop request on, with its deadlines."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Log an event."""

    event: str
    level: str = "info"
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndGroup:
    """The whole group must end with ``code``."""

    code: ExitCode
    why: str


Effect = Send | AskToDrain | Tell | EndGroup
