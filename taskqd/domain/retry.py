"""How often and how long apart a failed job runs again."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from taskqd.domain.arguments import is_number

RetryKind = Literal["transient", "indefinite", "non_retryable"]
BackoffKind = Literal["exponential", "linear", "fixed"]
KINDS: tuple[str, ...] = ("transient", "indefinite", "non_retryable")
BACKOFFS: tuple[str, ...] = ("exponential", "linear", "fixed")

MAX_ATTEMPTS = 1_000_000
"""The largest ``max_attempts``; use ``kind="indefinite"`` for work that must never give up."""


@dataclass(frozen=True, slots=True)
class RetryOverride:
    """What an actor's ``retry_classifier`` makes of one error; None leaves the policy's own.

    ``kind``
        ``"non_retryable"`` ends the job, ``"indefinite"`` retries it whatever its attempts, ``"transient"`` until they
        are spent.
    ``delay``
        Wait before the next attempt, instead of the curve's; at most ``TASKQ_MAX_RETRY_BACKOFF``.

    Raises ``ValueError`` naming the field, the value and the range.
    """

    kind: RetryKind | None = None
    delay: timedelta | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"retry kind = {self.kind!r} must be one of {', '.join(KINDS)}")
        if self.delay is not None and (not isinstance(self.delay, timedelta) or self.delay < timedelta(0)):
            raise ValueError(f"retry delay = {self.delay!r} must be a timedelta that is not negative")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The retry curve of an actor. It is stamped on each job at enqueue, so a crashed job waits on it too.

    ``kind``
        ``transient`` retries until ``max_attempts``; ``indefinite`` until the job's deadline; ``non_retryable`` never.
    ``max_attempts``
        Claims a job may spend, 1 to 1,000,000; default 3.
    ``time_budget``
        Lifetime of an ``indefinite`` job from its enqueue; None (default) is unbounded. Refused for other kinds.
    ``backoff``, ``base``, ``cap``
        Delay after attempt n: ``base * 2**(n-1)``, ``base * n`` or ``base``, at most ``cap``. Defaults 5 s and 1 h.
    ``jitter``
        Share 0 to 1 (default 0.2): the delay is multiplied by a number drawn from ``1 - jitter`` to ``1 + jitter``.
        ``"full"`` draws from 0 to the delay, which disperses a cohort that failed together (AWS, "Exponential
        Backoff And Jitter", 2015).

    Raises ``ValueError`` naming the field, the value and the range.
    """

    kind: RetryKind = "transient"
    max_attempts: int = 3
    time_budget: timedelta | None = None
    backoff: BackoffKind = "exponential"
    base: timedelta = timedelta(seconds=5)
    cap: timedelta = timedelta(hours=1)
    jitter: float | Literal["full"] = 0.2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"retry kind = {self.kind!r} must be one of {', '.join(KINDS)}")
        if self.backoff not in BACKOFFS:
            raise ValueError(f"retry backoff = {self.backoff!r} must be one of {', '.join(BACKOFFS)}")
        whole = isinstance(self.max_attempts, int) and not isinstance(self.max_attempts, bool)
        if not whole or not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise ValueError(f"retry max_attempts = {self.max_attempts!r} must be between 1 and {MAX_ATTEMPTS}")
        for name, value in (("base", self.base), ("cap", self.cap)):
            if not isinstance(value, timedelta):
                raise ValueError(f"retry {name} = {value!r} must be a timedelta")
        if self.time_budget is not None and not isinstance(self.time_budget, timedelta):
            raise ValueError(f"retry time_budget = {self.time_budget!r} must be a timedelta, or None")
        if self.base < timedelta(0):
            raise ValueError(f"retry base = {self.base} must not be negative")
        if self.cap < self.base:
            raise ValueError(f"retry cap = {self.cap} must be at least base = {self.base}")
        if self.jitter != "full" and not (is_number(self.jitter) and 0 <= self.jitter <= 1):
            raise ValueError(f"retry jitter = {self.jitter!r} must be between 0 and 1, or 'full'")
        if self.time_budget is not None and self.kind != "indefinite":
            raise ValueError(f"retry time_budget needs kind='indefinite', not {self.kind!r}")
        if self.time_budget is not None and self.time_budget <= timedelta(0):
            raise ValueError(f"retry time_budget = {self.time_budget} must be positive")

    @property
    def stored_jitter(self) -> float:
        """The jitter as stored: a share, or -1 for ``"full"``."""
        return -1.0 if self.jitter == "full" else float(self.jitter)
