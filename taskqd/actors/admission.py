"""How many jobs of an actor, and which, enqueue lets in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from taskqd.actors.options import limit_problem
from taskqd.domain.status import ACTIVE, JobStatus

UNIQUE_STATES = (JobStatus.PENDING, JobStatus.SCHEDULED, JobStatus.RUNNING)
MAX_PENDING = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits that an actor sets on the enqueue of its jobs."""

    singleton: bool = False
    max_pending: int | None = None
    unique_for: timedelta | None = None
    unique_states: tuple[JobStatus, ...] = UNIQUE_STATES

    def problem(self) -> str:
        """Say what is wrong with them, ``""`` when nothing is."""
        if self.singleton not in (True, False):
            return f"singleton = {self.singleton!r} must be True or False"
        whole = isinstance(self.max_pending, int) and not isinstance(self.max_pending, bool)
        if self.max_pending is not None and not (whole and 0 <= self.max_pending <= MAX_PENDING):
            return f"max_pending = {self.max_pending!r} must be a whole number between 0 and {MAX_PENDING}"
        if problem := limit_problem("unique_for", self.unique_for):
            return problem
        states = self.unique_states
        if not isinstance(states, tuple) or not states or not all(state in tuple(JobStatus) for state in states):
            return f"unique_states = {states!r} must be a tuple of JobStatus, such as {tuple(map(str, sorted(ACTIVE)))}"
        if states != UNIQUE_STATES and self.unique_for is None:
            return "unique_states needs unique_for"
        return ""
