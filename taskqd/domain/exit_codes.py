"""The exit codes of every taskqd command, in one place."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process says when it ends.

    The numbers above 63 follow ``sysexits.h`` so that systemd and people who know it read them alike.
    """

    DONE = 0
    """The work is done."""
    ERROR = 1
    """An unexpected error, or a negative answer (health probes return 0 or 1 only)."""
    USAGE = 2
    """The command line is wrong."""
    KILLED = 3
    """Stopped, but something had to be killed; or ``--until-idle`` saw failed jobs."""
    TIMED_OUT = 4
    """A wait ended by its timeout."""
    DEGRADED = 5
    """``doctor`` found something."""
    UNAVAILABLE = 69
    """The database or another service cannot be reached; a restart with backoff may help."""
    INTERNAL = 70
    """A watchdog trip or an internal failure."""
    TRY_AGAIN = 75
    """A later try may succeed: recycle, already running, schema outside the range, connections taken by others."""
    REFUSED = 78
    """Refused for good: configuration, registry, target, a budget that can never fit. Never restarted."""
