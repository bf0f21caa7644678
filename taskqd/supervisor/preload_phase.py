"""What a zygote is doing, and how a worker is started then."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """What the zygote is doing."""

    OFF = "off"
    """No worker wants it."""
    IMPORTING = "importing"
    READY = "ready"
    UNFIT = "unfit"
    """It said why it must not be forked. This does not change until the group is started anew."""
    DOWN = "down"
    """It ended; it is started again in a moment."""


class Way(StrEnum):
    """How a worker is started."""

    FORK = "fork"
    EXEC = "exec"
    WAIT = "wait"
    """Not now."""
    NONE = "none"
    """Not at all: it must be forked, and cannot be."""
