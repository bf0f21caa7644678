"""``@actor``: declares a typed function that jobs run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, Concatenate, Protocol, TypeVar, overload

from pydantic import BaseModel

from taskqd.actors.actor import ActorRef, RetryClassifier
from taskqd.actors.admission import UNIQUE_STATES, Admission
from taskqd.actors.hooks import DEFAULT_TIMEOUT, Hook, Hooks
from taskqd.actors.options import (
    Isolation,
    isolation_problem,
    limit_problem,
    limits_problem,
    priority_problem,
    queue_problem,
)
from taskqd.actors.signature import MAX_NAME, is_actor_name, read_signature, result_adapter
from taskqd.domain.errors import ActorDefinitionError
from taskqd.domain.names import nearest
from taskqd.domain.reservation import ConcurrencyReservation
from taskqd.domain.retry import RetryPolicy
from taskqd.domain.status import JobStatus

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R")


class ActorDecorator(Protocol):
    """What ``@actor(...)`` returns: it turns a function into an :class:`ActorRef` of its payload and result."""

    @overload
    def __call__(self, fn: Callable[Concatenate[P, ...], Coroutine[Any, Any, R]], /) -> ActorRef[P, R]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[P, ...], R], /) -> ActorRef[P, R]: ...


@overload
def actor(fn: Callable[Concatenate[P, ...], Coroutine[Any, Any, R]], /) -> ActorRef[P, R]: ...


@overload
def actor(fn: Callable[Concatenate[P, ...], R], /) -> ActorRef[P, R]: ...


@overload
def actor(
    *,
    name: str | None = None,
    queue: str = "default",
    retry: RetryPolicy | None = None,
    priority: int = 0,
    start_to_close: timedelta | None = None,
    isolation: Isolation = "none",
    memory_limit: int | None = None,
    non_retryable_exceptions: tuple[type[BaseException], ...] = (),
    retry_classifier: RetryClassifier | None = None,
    max_concurrent: int | None = None,
    result_ttl: timedelta | None = None,
    reservations: tuple[ConcurrencyReservation, ...] = (),
    on_success: Hook | None = None,
    on_success_timeout: float = DEFAULT_TIMEOUT,
    on_retry_exhausted: Hook | None = None,
    on_retry_exhausted_timeout: float = DEFAULT_TIMEOUT,
    on_cancel: Hook | None = None,
    on_cancel_timeout: float = DEFAULT_TIMEOUT,
    singleton: bool = False,
    max_pending: int | None = None,
    unique_for: timedelta | None = None,
    unique_states: tuple[JobStatus, ...] = UNIQUE_STATES,
) -> ActorDecorator: ...


def actor(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    queue: str = "default",
    retry: RetryPolicy | None = None,
    priority: int = 0,
    start_to_close: timedelta | None = None,
    isolation: Isolation = "none",
    memory_limit: int | None = None,
    non_retryable_exceptions: tuple[type[BaseException], ...] = (),
    retry_classifier: RetryClassifier | None = None,
    max_concurrent: int | None = None,
    result_ttl: timedelta | None = None,
    reservations: tuple[ConcurrencyReservation, ...] = (),
    on_success: Hook | None = None,
    on_success_timeout: float = DEFAULT_TIMEOUT,
    on_retry_exhausted: Hook | None = None,
    on_retry_exhausted_timeout: float = DEFAULT_TIMEOUT,
    on_cancel: Hook | None = None,
    on_cancel_timeout: float = DEFAULT_TIMEOUT,
    singleton: bool = False,
    max_pending: int | None = None,
    unique_for: timedelta | None = None,
    unique_states: tuple[JobStatus, ...] = UNIQUE_STATES,
    **unknown: Any,
) -> Any:
    """Declare an actor, bare or with options.

    The function, ``async def`` or plain ``def``, takes a pydantic model and, if it wants, a ``JobContext``::

        @actor(queue="mail", retry=RetryPolicy(max_attempts=5))
        async def send(payload: Mail, ctx: JobContext[Mail]) -> Receipt: ...

    Further parameters, each annotated with a class, are provided by the worker: see ``ProviderRegistry``.

    ``name``
        What its jobs are stored under; default the function's qualified name. Set it where that may change.
    ``queue``
        Where its jobs wait; letters, digits, ``_ . -``. Default ``"default"``.
    ``retry``
        Its :class:`RetryPolicy`; default three attempts from 5 s on.
    ``priority``
        -32768 to 32767, higher first; default 0. Stamped on each job at enqueue.
    ``start_to_close``
        Longest run of one attempt; None (default) falls through to ``TASKQ_DEFAULT_START_TO_CLOSE``.
    ``isolation``
        ``"process"`` runs each attempt in a process of its own, which is killed when it must end, with everything that
        it has started; ``"none"`` (default) runs it in the worker.
    ``memory_limit``
        Bytes of memory of its own that an isolated attempt may hold, its programs included; one that holds more is
        killed and has failed with ``MemoryLimitExceeded``. From 16 MiB on; None (default) is no limit.
    ``non_retryable_exceptions``
        Exception classes, subclasses included, that fail the job at once.
    ``retry_classifier``
        Called with any other error and the attempt's number; what :class:`RetryOverride` it returns comes before the
        policy, None leaves it. It runs on the event loop: keep it quick. One that raises is logged and passed over.
    ``max_concurrent``
        How many of its jobs may run at once in the whole fleet, 0 to 1,000,000; 0 runs none, None (default) sets no
        limit. It is what a new installation starts with: once stored, the operator's value counts.
    ``result_ttl``
        How long a result is kept after its job has succeeded, up to 365 days; None (default) keeps it as long as the
        job. What a new installation starts with, as ``max_concurrent``.
    ``reservations``
        Limits that it shares with other actors, each a :class:`ConcurrencyReservation`; at most 16.
    ``on_success(row, result)``, ``on_retry_exhausted(row, error)``, ``on_cancel(row)``
        Called with the job's row once it has succeeded, failed or crashed for good, or was cancelled while it ran; as
        a rule in the worker that ran it, once. An end that no worker saw, such as a crash or a deadline that passed in
        the queue, is told to some worker later, at least once. Each has its ``…_timeout``, default 3 seconds, at most
        300. What it raises is logged and changes nothing.
    ``singleton``
        At most one of its jobs may be queued or running; enqueueing another raises ``SingletonCollisionError``. Default
        False.
    ``max_pending``
        How many of its jobs may be queued, 0 refuses all; one more raises ``MaxPendingExceededError``. None (default)
        is no limit. It is stored with the actor when that first starts; from then on what is stored wins.
    ``unique_for``
        Within this time of the enqueue of a job, enqueueing another with the same ``identity_key`` answers with that
        one. None (default) is no such window; a job without an ``identity_key`` is never answered so.
    ``unique_states``
        The statuses in which it has to be then, a tuple; default all but the ended ones.

    Raises ``ActorDefinitionError``, at import time, with a message that names the fix.
    """
    if unknown:
        option = next(iter(unknown))
        raise ActorDefinitionError(f"@actor has no option {option!r}{nearest(option, _OPTIONS)}")

    def declare(function: Callable[..., Any]) -> ActorRef[Any, Any]:
        return _declare(
            function,
            name,
            queue=queue,
            retry=RetryPolicy() if retry is None else retry,
            priority=priority,
            start_to_close=start_to_close,
            isolation=isolation,
            memory_limit=memory_limit,
            non_retryable_exceptions=non_retryable_exceptions,
            retry_classifier=retry_classifier,
            max_concurrent=max_concurrent,
            result_ttl=result_ttl,
            reservations=reservations,
            hooks=Hooks(
                on_success,
                on_success_timeout,
                on_retry_exhausted,
                on_retry_exhausted_timeout,
                on_cancel,
                on_cancel_timeout,
            ),
            admission=Admission(singleton, max_pending, unique_for, unique_states),
        )

    return declare if fn is None else declare(fn)


_OPTIONS = tuple(
    parameter.name
    for parameter in inspect.signature(actor).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY
)


def _declare(fn: Callable[..., Any], name: str | None, **options: Any) -> ActorRef[Any, Any]:
    if isinstance(fn, str):
        raise ActorDefinitionError(f"@actor takes its options by keyword: @actor(name={fn!r})")
    if not inspect.isfunction(fn):
        raise ActorDefinitionError(f"@actor decorates a function, not {fn!r}; write it as 'async def' or 'def'")
    label = name if name is not None else fn.__qualname__
    where = f"actor {label!r} ({fn.__module__}.{fn.__qualname__})"
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise ActorDefinitionError(f"{where} is a generator; return one value instead of yielding")
    if not is_actor_name(label):
        raise ActorDefinitionError(f"{where}: name must be 1 to {MAX_NAME} bytes of text; give one @actor(name=...)")
    if problem := _problem(**options):
        raise ActorDefinitionError(f"{where}: {problem}")
    payload_type, result_type, wants_ctx, dependencies = read_signature(fn, where)
    return ActorRef(
        fn,
        name=label,
        payload_type=payload_type,
        result_adapter=None if result_type is None else result_adapter(result_type, where),
        wants_ctx=wants_ctx,
        dependencies=dependencies,
        **options,
    )


def _problem(
    *,
    queue: Any,
    retry: Any,
    priority: Any,
    start_to_close: Any,
    isolation: Any,
    memory_limit: Any,
    non_retryable_exceptions: Any,
    retry_classifier: Any,
    max_concurrent: Any,
    result_ttl: Any,
    reservations: Any,
    hooks: Hooks,
    admission: Admission,
) -> str:
    """Say what is wrong with the options, ``""`` when nothing is."""
    if problem := queue_problem(queue) or priority_problem(priority) or limit_problem("start_to_close", start_to_close):
        return problem
    if problem := isolation_problem(isolation, memory_limit):
        return problem
    if not isinstance(retry, RetryPolicy):
        return f"retry = {retry!r} must be a RetryPolicy"
    if not isinstance(non_retryable_exceptions, tuple) or not all(
        isinstance(item, type) and issubclass(item, BaseException) for item in non_retryable_exceptions
    ):
        return "non_retryable_exceptions must be a tuple of exception classes"
    if retry_classifier is not None and (
        not callable(retry_classifier) or inspect.iscoroutinefunction(retry_classifier)
    ):
        return f"retry_classifier = {retry_classifier!r} must be a plain function of (exception, attempt)"
    if problem := limit_problem("result_ttl", result_ttl):
        return problem
    return limits_problem(max_concurrent, reservations) or hooks.problem() or admission.problem()
