"""When each step of a worker's shutdown begins."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

from taskqd.observe import logs

TAIL = 3.0
"""Seconds for the closes at the end; they run concurrently, each bounded by this."""
LAST_SECOND = 1.0
"""Seconds that the interpreter may take to end once everything of ours is closed."""


@dataclass(slots=True)
class ShutdownPlan:
    """Absolute monotonic times: running tasks are cancelled at ``cancel_at``, released at ``force_at``; the process is
    gone by ``deadline``. Times only ever move earlier."""

    cancel_at: float
    force_at: float
    deadline: float

    @classmethod
    def from_now(cls, cancellation_grace: float, cleanup_grace: float, termination_grace: float) -> ShutdownPlan:
        """Return the plan of a worker that was asked to stop now."""
        now = time.monotonic()
        cancel_at = now + cancellation_grace
        return cls(cancel_at, cancel_at + cleanup_grace, now + termination_grace)

    def tighten(self, cancel_at: float, force_at: float, deadline: float) -> None:
        """Take each time that is earlier than the one planned."""
        self.cancel_at = min(self.cancel_at, cancel_at)
        self.force_at = min(self.force_at, force_at)
        self.deadline = min(self.deadline, deadline)

    def hurry(self) -> None:
        """Begin the next step now, and keep the length of the one after it."""
        now = time.monotonic()
        if now < self.cancel_at:
            length = self.force_at - self.cancel_at
            self.cancel_at = now
            self.force_at = min(self.force_at, now + length)
        else:
            self.force_at = min(self.force_at, now)


def exit_within(seconds: float, code: int) -> None:
    """End the process with ``code`` after ``seconds``, unless it has ended by itself; at once for 0."""

    def end() -> None:
        time.sleep(seconds)
        sys.stdout.flush()
        sys.stderr.flush()
        logs.flush()
        os._exit(code)

    if seconds <= 0:
        end()
    threading.Thread(target=end, name="taskqd-exit", daemon=True).start()
