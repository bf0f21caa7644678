"""When a process has done enough and makes room for a fresh one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

JITTER = 0.1
"""The share by which each process's limits are moved, so that those started together do not end together."""


@dataclass(frozen=True, slots=True)
class RecycleLimits:
    """``[workers.recycle]``: what one process may come to before it is replaced; None is no limit."""

    max_jobs: int | None = None
    """Jobs that it ran to their end."""
    max_age: float | None = None
    """Seconds since it was ready."""
    max_private_mb: int | None = None
    """Mebibytes that it shares with no other process."""


NO_LIMITS = RecycleLimits()
"""Nothing is ever recycled."""


def overdue(limits: RecycleLimits, factor: float, *, jobs: int, age: float, private: int | None) -> str:
    """Return why a process is to be replaced, or an empty string. ``factor`` moves its limits, ``private`` is bytes."""
    if limits.max_jobs is not None and jobs >= max(1.0, limits.max_jobs * factor):
        return f"it ran {jobs} jobs, max_jobs = {limits.max_jobs}"
    if limits.max_age is not None and age >= limits.max_age * factor:
        return f"it is {age:.0f} s old, max_age = {limits.max_age:g}"
    if limits.max_private_mb is not None and private is not None:
        megabytes = private / 1024**2
        if megabytes >= limits.max_private_mb * factor:
            return f"it holds {megabytes:.0f} MB for itself, max_private_mb = {limits.max_private_mb}"
    return ""
