"""One attempt in its process, as the worker sees it."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field

from taskqd.domain.errors import ActorProcessDied, MemoryLimitExceeded
from taskqd.domain.signals import CancelOrigin
from taskqd.worker.attempt import Attempt
from taskqd.worker.isolated.statements import Lender
from taskqd.worker.outcome import Outcome, Overran


@dataclass(slots=True, eq=False)
class Session:
    """One attempt in its process."""

    attempt: Attempt
    number: int
    ended: asyncio.Future[tuple[int | None, int | None]]
    """The status of the process, None when nobody knows it, and the memory it was killed for."""
    lender: Lender
    writer: asyncio.StreamWriter | None = None
    outcome: Outcome | BaseException | None = None
    overdue: float | None = None
    """Its ``start_to_close``, once that is over."""
    stopped: bool = False
    """True once it was made to end by us, or asked with a signal."""
    fault: str = ""
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    answer_by: asyncio.TimerHandle | None = None

    def end(self) -> Outcome | BaseException:
        """Return its outcome, or what to make one of, once its process has ended."""
        attempt = self.attempt
        status, used = self.ended.result()
        outcome = self.outcome
        cancelled = self.stopped if outcome is None else isinstance(outcome, asyncio.CancelledError)
        if outcome is not None and not cancelled:
            return outcome
        if self.fault:
            return ActorProcessDied(f"the actor's process sent what is no message: {self.fault}")
        if cancelled:
            limit = self.overdue
            return asyncio.CancelledError("its process was ended") if limit is None else Overran(limit)
        if used is not None:
            assert attempt.ref.memory_limit is not None  # noqa: S101 - it was killed for it
            return MemoryLimitExceeded(attempt.ref.name, used, attempt.ref.memory_limit)
        if status is None:
            return ActorProcessDied("the actor's process ended with the one that it was forked from")
        code = os.waitstatus_to_exitcode(status)
        stopping = attempt.cancellation.origin is CancelOrigin.SHUTDOWN
        if stopping and -code in (signal.SIGTERM, signal.SIGKILL):  # whoever stops the worker may stop all of it
            return asyncio.CancelledError("its process was ended")
        if code < 0:
            return ActorProcessDied(f"the actor's process was killed by {_signal_name(-code)}")
        return ActorProcessDied(f"the actor's process ended with exit code {code} before its actor did")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
