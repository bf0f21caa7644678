"""What the end of a process says about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from taskqd.domain.exit_codes import ExitCode


class ExitClass(StrEnum):
    """Why a process ended, as far as a restart is concerned."""

    CLEAN = "clean"
    """It ended well, though nobody had asked it to."""
    PERMANENT = "permanent"
    """It refuses its configuration for good: a restart cannot help."""
    ENVIRONMENT = "environment"
    """The database or another service is away; not the process's fault."""
    RECYCLE = "recycle"
    """It asks to be started afresh."""
    INTERNAL = "internal"
    """Its own watchdog ended it, or an error that is a bug."""
    HUNG = "hung"
    """It was killed because it hung."""
    OOM = "oom"
    """The kernel killed it for want of memory."""
    CRASH = "crash"
    """Anything else: a signal, an unknown code."""


@dataclass(frozen=True, slots=True)
class Exit:
    """One end of a process. ``code`` is negative for a signal, as in ``subprocess``."""

    code: int
    kind: ExitClass
    why: str


_CLASSES = {
    int(ExitCode.DONE): ExitClass.CLEAN,
    int(ExitCode.UNAVAILABLE): ExitClass.ENVIRONMENT,
    int(ExitCode.INTERNAL): ExitClass.INTERNAL,
    int(ExitCode.TRY_AGAIN): ExitClass.RECYCLE,
    int(ExitCode.REFUSED): ExitClass.PERMANENT,
}
_TEXTS = {
    ExitClass.CLEAN: "ended by itself",
    ExitClass.PERMANENT: "refuses its configuration",
    ExitClass.ENVIRONMENT: "database or service unavailable",
    ExitClass.RECYCLE: "asks to be started afresh",
    ExitClass.INTERNAL: "its watchdog ended it, or an internal failure",
}


WELL_RECYCLED = frozenset({int(ExitCode.DONE), int(ExitCode.TRY_AGAIN)})
"""How a process ends that was asked to make room for a fresh one, and did."""


def classify(code: int, *, killed_because: str | None = None, oom: bool = False) -> Exit:
    """Return what exit ``code`` means; ``killed_because`` is set when the supervisor itself killed the process."""
    if killed_because is not None and code < 0:
        return Exit(code, ExitClass.HUNG, f"{killed_because}, ended by {signal_name(-code)}")
    if oom and code == -signal.SIGKILL:
        return Exit(code, ExitClass.OOM, "killed by the kernel: out of memory")
    if code < 0:
        return Exit(code, ExitClass.CRASH, f"ended by {signal_name(-code)}")
    kind = _CLASSES.get(code, ExitClass.CRASH)
    text = _TEXTS.get(kind, "failed")
    return Exit(code, kind, f"exit code {code}: {text}")


def group_code(last: Exit) -> ExitCode:
    """Return what the supervisor ends with when a process never came up and ``last`` was its last end."""
    return {
        ExitClass.PERMANENT: ExitCode.REFUSED,
        ExitClass.ENVIRONMENT: ExitCode.UNAVAILABLE,
        ExitClass.RECYCLE: ExitCode.TRY_AGAIN,
    }.get(last.kind, ExitCode.INTERNAL)


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
