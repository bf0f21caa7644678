"""The statuses of a job and the groups that SQL and Python speak of."""

from __future__ import annotations

from enum import StrEnum


class JobStatus(StrEnum):
    """Where a job is in its life. The names are the values of the database enum ``job_status``."""

    SCHEDULED = "scheduled"
    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CRASHED = "crashed"
    ABANDONED = "abandoned"


TERMINAL = frozenset(
    {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.CRASHED, JobStatus.ABANDONED}
)
"""A job in one of these never runs again unless an operator retries it."""

ACTIVE = frozenset({JobStatus.SCHEDULED, JobStatus.PENDING, JobStatus.RUNNING})
"""A job in one of these still has work ahead."""
