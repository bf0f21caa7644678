"""A declared actor, and what of its jobs travels through the database."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from taskqd.actors.admission import Admission
from taskqd.actors.context import JobContext
from taskqd.actors.di.dependency import Dependency
from taskqd.actors.faithful import find_loss
from taskqd.actors.hooks import Hooks
from taskqd.actors.options import Isolation
from taskqd.domain.arguments import holds_nul
from taskqd.domain.errors import PayloadNotStorableError, PayloadValidationError, ResultTooLarge
from taskqd.domain.reservation import ConcurrencyReservation
from taskqd.domain.retry import RetryOverride, RetryPolicy
from taskqd.domain.status import JobStatus

if TYPE_CHECKING:
    from taskqd.actors.schedules import DeclaredSchedule

P = TypeVar("P", bound=BaseModel)
R = TypeVar("R")

RetryClassifier: TypeAlias = Callable[[BaseException, int], RetryOverride | None]

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024


class ActorRef(Generic[P, R]):
    """A declared actor: what to call, with which payload, under which options. Made by :func:`taskqd.actor`.

    Awaiting a call runs the function itself, without a queue: ``await resize(Payload(...))`` in a test.
    """

    __slots__ = (
        "admission",
        "dependencies",
        "fn",
        "has_hooks",
        "hooks",
        "is_sync",
        "isolated",
        "max_concurrent",
        "memory_limit",
        "name",
        "non_retryable_exceptions",
        "payload_type",
        "priority",
        "queue",
        "reservations",
        "result_adapter",
        "result_ttl",
        "retry",
        "retry_classifier",
        "schedules",
        "start_to_close",
        "wants_ctx",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str,
        queue: str,
        payload_type: type[P],
        result_adapter: TypeAdapter[R] | None,
        wants_ctx: bool,
        dependencies: Mapping[str, Dependency],
        retry: RetryPolicy,
        priority: int,
        start_to_close: timedelta | None,
        non_retryable_exceptions: tuple[type[BaseException], ...],
        retry_classifier: RetryClassifier | None,
        max_concurrent: int | None,
        result_ttl: timedelta | None,
        reservations: tuple[ConcurrencyReservation, ...],
        hooks: Hooks,
        admission: Admission,
        isolation: Isolation = "none",
        memory_limit: int | None = None,
    ) -> None:
        self.fn = fn
        self.name = name
        self.queue = queue
        self.payload_type = payload_type
        self.result_adapter = result_adapter
        self.wants_ctx = wants_ctx
        self.dependencies = dependencies
        self.is_sync = not inspect.iscoroutinefunction(fn)
        self.retry = retry
        self.priority = priority
        self.start_to_close = start_to_close
        self.non_retryable_exceptions = non_retryable_exceptions
        self.retry_classifier = retry_classifier
        self.max_concurrent = max_concurrent
        self.result_ttl = result_ttl
        self.reservations = reservations
        self.hooks = hooks
        self.has_hooks = bool(hooks)
        self.schedules: list[DeclaredSchedule] = []
        """When it runs by itself; see ``cron`` and ``every``."""
        self.admission = admission
        self.isolated = isolation == "process"
        self.memory_limit = memory_limit

    def __repr__(self) -> str:
        return f"ActorRef({self.name!r}, queue={self.queue!r})"

    async def __call__(self, payload: P, ctx: JobContext[P] | None = None, **dependencies: Any) -> R:
        """Run the function on ``payload`` here and now, with ``ctx`` and ``dependencies`` where it takes them."""
        if self.wants_ctx != (ctx is not None):
            raise TypeError(f"actor {self.name!r} {'needs' if self.wants_ctx else 'takes no'} JobContext")
        for name in self.dependencies.keys() ^ dependencies.keys():
            raise TypeError(f"actor {self.name!r} {'needs' if name in self.dependencies else 'takes no'} {name!r}")
        result = self.fn(payload, *((ctx,) if self.wants_ctx else ()), **dependencies)
        return typing.cast(R, await result if inspect.isawaitable(result) else result)

    # -- what enqueue lets in -----------------------------------------------------------------------

    @property
    def singleton(self) -> bool:
        """Whether at most one of its jobs may be under way."""
        return self.admission.singleton

    @property
    def max_pending(self) -> int | None:
        """How many of its jobs may be queued, where the database does not say otherwise."""
        return self.admission.max_pending

    @property
    def unique_for(self) -> timedelta | None:
        """The window in which one job for each ``identity_key`` is enough."""
        return self.admission.unique_for

    @property
    def unique_states(self) -> tuple[JobStatus, ...]:
        """Where a job within that window has to be to be enough."""
        return self.admission.unique_states

    # -- what travels through the database ----------------------------------------------------------

    def encode_payload(self, payload: P | Mapping[str, Any]) -> str:
        """Return the JSON text to store for ``payload`` (the model, or a mapping that fits it).

        Raises ``PayloadValidationError`` naming each bad field, and ``PayloadNotStorableError`` for what would not come
        back as it went in (NUL, lone surrogates, NaN, infinity, masked secrets) or is larger than 16 MiB.
        """
        try:
            if not isinstance(payload, self.payload_type):
                payload = self.payload_type.model_validate(payload)
            text = payload.model_dump_json(by_alias=False, round_trip=True)
        except ValidationError as error:
            raise PayloadValidationError(self.name, _safe_errors(error)) from None
        except ValueError as error:
            raise PayloadNotStorableError(f"payload of actor {self.name!r} does not encode as JSON: {error}") from None
        if holds_nul(text):
            raise PayloadNotStorableError(
                f"payload of actor {self.name!r} holds a NUL character (\\u0000), which Postgres cannot store"
            )
        if loss := find_loss(text, lambda: payload.model_dump(by_alias=False, round_trip=True)):
            raise PayloadNotStorableError(f"payload of actor {self.name!r} {loss}")
        size = len(text) if text.isascii() else len(text.encode())
        if size > MAX_PAYLOAD_BYTES:
            raise PayloadNotStorableError(
                f"payload of actor {self.name!r} is {size} bytes, the limit is {MAX_PAYLOAD_BYTES}; "
                "store large data elsewhere and pass a reference"
            )
        return text

    def decode_payload(self, text: str) -> P:
        """Return the payload stored as ``text``. Raises ``PayloadValidationError`` when it does not fit the model.

        A field may go by its name, as ``encode_payload`` writes it, or by its alias, as SQL may.
        """
        try:
            return self.payload_type.model_validate_json(text, by_alias=True, by_name=True)
        except ValidationError as error:
            raise PayloadValidationError(self.name, _safe_errors(error)) from None

    def encode_result(self, result: Any, limit: int) -> str | None:
        """Return the JSON text to store for ``result``, None for no result.

        Raises ``ResultTooLarge`` past ``limit`` bytes, pydantic's ``ValidationError`` or ``TypeError`` when the result
        is not of the declared type, ``ValueError`` for what JSON cannot carry.
        """
        adapter = self.result_adapter
        if adapter is None:
            if result is not None:
                raise TypeError(f"actor {self.name!r} is declared to return None but returned {type(result).__name__}")
            return None
        if result is None or type(result) is not self.result_type:
            result = adapter.validate_python(result)
        data = adapter.dump_json(result, by_alias=False, round_trip=True)
        if len(data) > limit:
            raise ResultTooLarge(self.name, len(data), limit)
        text = data.decode()
        if loss := find_loss(text, lambda: adapter.dump_python(result, by_alias=False, round_trip=True)):
            raise ValueError(f"result of actor {self.name!r} {loss}")
        return text

    def decode_result(self, text: str | None) -> R:
        """Return the result stored as ``text``."""
        if self.result_adapter is None or text is None:
            return typing.cast(R, None)
        return self.result_adapter.validate_json(text, by_alias=True, by_name=True)

    @property
    def result_type(self) -> Any:
        """The declared return type, None for an actor that returns nothing."""
        return None if self.result_adapter is None else self.result_adapter._type


def _safe_errors(error: ValidationError) -> list[dict[str, Any]]:
    """The errors without the rejected input, which may be secret."""
    return [
        {"loc": item["loc"], "msg": item["msg"], "type": item["type"]}
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
