"""What became of an attempt, by what its actor returned or raised."""

from __future__ import annotations

import asyncio
import time
import traceback
from typing import Any

from pydantic import ValidationError

from taskqd.domain.errors import PayloadFactoryError, PayloadValidationError, ResultTooLarge
from taskqd.domain.retry import RetryOverride
from taskqd.domain.signals import CancelOrigin, RetryAfter, Snooze
from taskqd.observe.logs import get_logger
from taskqd.worker.attempt import Attempt
from taskqd.worker.outcome import SHUTDOWN, Failed, Outcome, Overran, Released, Snoozed, Succeeded

MAX_TRACEBACK = 8_000
NEVER_RETRIED = (PayloadFactoryError, PayloadValidationError, ResultTooLarge, ValidationError)
OURS = frozenset({"taskqd.worker.consumer", "taskqd.worker.in_context"})
"""Modules whose frames stand above the actor's own in a traceback."""

_log = get_logger("taskqd.consumer")


class Explainer:
    """Makes outcomes; what is stored of a result, a message and a delay is bounded. ``keeps_errors``: somebody is told
    of every error."""

    def __init__(
        self, *, result_max_bytes: int, message_max_chars: int, max_backoff: float, keeps_errors: bool = False
    ) -> None:
        self._result_max_bytes = result_max_bytes
        self._message_max_chars = message_max_chars
        self._max_backoff = max_backoff
        self._keeps_errors = keeps_errors

    def success(self, attempt: Attempt, result: Any) -> Succeeded:
        """Return the outcome of an attempt whose actor returned ``result``. Raises what ``encode_result`` does."""
        ref = attempt.ref
        text = ref.encode_result(result, self._result_max_bytes)
        return Succeeded(attempt, ran(attempt), text, result if ref.hooks.on_success is not None else None)

    def failure(self, attempt: Attempt, error: BaseException) -> Outcome | None:
        """Return the outcome of an attempt whose actor raised ``error``; None when nobody wants it any more."""
        if isinstance(error, Overran):
            return self.timed_out(attempt, error.limit)
        if isinstance(error, Snooze):
            return Snoozed(attempt, ran(attempt), error.delay)
        if isinstance(error, RetryAfter):
            if not error.consume_budget:
                return Snoozed(attempt, ran(attempt), error.delay)
            return Failed(
                attempt,
                ran(attempt),
                "RetryAfter",
                str(error),
                None,
                delay=error.delay,
                exhausted_class="MaxAttemptsExceeded",
                error=self._kept(attempt, error),
            )
        if isinstance(error, asyncio.CancelledError):
            if attempt.cancellation.origin is CancelOrigin.SHUTDOWN:
                return Released(attempt, ran(attempt), SHUTDOWN)
            if attempt.cancellation.origin is CancelOrigin.LEASE_LOST:
                return None  # another attempt decides the job
        override = self._classify(attempt, error)
        return Failed(
            attempt,
            ran(attempt),
            type(error).__name__,
            storable(message_of(error), self._message_max_chars),
            storable(_traceback(error), MAX_TRACEBACK),
            override.kind,
            None if override.delay is None else min(override.delay.total_seconds(), self._max_backoff),
            error=self._kept(attempt, error),
        )

    def _kept(self, attempt: Attempt, error: BaseException) -> BaseException | None:
        """The error, when somebody is to be told of it: it holds the frames that it came through."""
        return error if self._keeps_errors or attempt.ref.hooks.on_retry_exhausted is not None else None

    def timed_out(self, attempt: Attempt, limit: float) -> Failed:
        """Return the outcome of an attempt that ran for longer than ``limit`` seconds."""
        error = self._kept(attempt, TimeoutError("start_to_close"))
        return Failed(attempt, limit, "TimeoutError", "start_to_close", None, error=error)

    def _classify(self, attempt: Attempt, error: BaseException) -> RetryOverride:
        """Return what the actor says of retrying after this error; what it leaves open is the policy's."""
        ref = attempt.ref
        if isinstance(error, (*ref.non_retryable_exceptions, *NEVER_RETRIED)):
            return RetryOverride(kind="non_retryable")
        if ref.retry_classifier is None:
            return RetryOverride()
        try:
            override = ref.retry_classifier(error, attempt.number)
            if override is None or isinstance(override, RetryOverride):
                return override or RetryOverride()
            raise TypeError(f"returned {type(override).__name__}, not a RetryOverride or None")
        except Exception as broken:
            _log.warning("retry-classifier-failed", actor=ref.name, job_id=str(attempt.job_id), error=repr(broken))
            return RetryOverride()


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, or what went wrong in asking for it: an exception's own code may be broken too."""
    try:
        return str(error)
    except Exception as broken:
        return f"<the message of this {type(error).__name__} cannot be read: {type(broken).__name__}>"


def storable(text: str, limit: int) -> str:
    """Return ``text`` as Postgres can store it: no NUL, no lone surrogate, at most ``limit`` characters."""
    if len(text) > limit:
        text = text[:limit] + "…"
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def ran(attempt: Attempt) -> float:
    """Seconds since the attempt began."""
    assert attempt.started_at is not None  # noqa: S101
    return time.monotonic() - attempt.started_at


def _traceback(error: BaseException) -> str:
    """The traceback from the actor's own frame on, without ours."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__") in OURS:
        frames = frames.tb_next
    try:
        lines = traceback.format_exception(type(error), error, frames)
    except Exception:
        lines = traceback.format_tb(frames)
    text = "".join(lines)
    return text if len(text) <= MAX_TRACEBACK else "…" + text[-MAX_TRACEBACK + 1 :]
