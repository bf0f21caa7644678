"""What an actor raises to say *when* instead of *failed*."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from taskqd.domain.arguments import check_flag, seconds_of


class CancelOrigin(StrEnum):
    """Who asked a running job to stop."""

    SHUTDOWN = "shutdown"
    """The worker stops; the job is released and runs again elsewhere."""
    OPERATOR = "operator"
    """A person or a program cancelled the job."""
    TIMEOUT = "timeout"
    """The attempt outran its start_to_close; only a plain function sees this, its outcome is decided already."""
    LEASE_LOST = "lease_lost"
    """The worker no longer owns the job; what the attempt still does is not recorded."""


MAX_DELAY = timedelta(days=365)
"""The longest a job may put itself off in one step."""


class Snooze(Exception):
    """Raise it to run again after ``delay`` (timedelta, or seconds) without spending an attempt.

    A snooze that lands past the job's ``schedule_to_close`` ends it as failed with ``DeadlineExceeded``. Raises
    ``ValueError`` for a delay that is not 0 to 365 days.
    """

    def __init__(self, delay: timedelta | float) -> None:
        self.delay = seconds_of("delay", delay, MAX_DELAY)
        super().__init__(f"snooze for {self.delay:g} s")


class RetryAfter(Exception):
    """Raise it to retry after exactly ``delay`` (timedelta, or seconds), whatever the retry policy's curve says.

    With ``consume_budget`` (default) the attempt is spent and the job fails with ``MaxAttemptsExceeded`` when none
    is left; without it this is a snooze.
    """

    def __init__(self, delay: timedelta | float, *, consume_budget: bool = True) -> None:
        self.delay = seconds_of("delay", delay, MAX_DELAY)
        check_flag("consume_budget", consume_budget)
        self.consume_budget = consume_budget
        super().__init__(f"retry after {self.delay:g} s")
