"""``@actor``: what it takes, what it makes of it, and how it says what is wrong."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Annotated, Any
from uuid import uuid4

import pytest
from pydantic import BaseModel

from taskqd import ActorDefinitionError, ActorRef, ConfigError, JobContext, RetryPolicy, actor


class Mail(BaseModel):
    to: str


class Receipt(BaseModel):
    id: int


class Other(BaseModel):
    n: int


async def classify_later(error: BaseException, attempt: int) -> None: ...


# -- what works -------------------------------------------------------------------------------------


def test_bare_actor_takes_its_name_and_defaults() -> None:
    @actor
    async def send(payload: Mail) -> Receipt:
        return Receipt(id=1)

    assert isinstance(send, ActorRef)
    assert send.name.endswith("send")
    assert (send.queue, send.priority, send.start_to_close) == ("default", 0, None)
    assert send.retry == RetryPolicy()
    assert send.payload_type is Mail
    assert not send.is_sync
    assert not send.wants_ctx


def test_options_reach_the_actor() -> None:
    policy = RetryPolicy(max_attempts=7)

    @actor(
        name="mail.send",
        queue="mail.high-1",
        retry=policy,
        priority=-5,
        start_to_close=timedelta(minutes=5),
        non_retryable_exceptions=(KeyError, OSError),
    )
    def send(payload: Mail, ctx: JobContext[Mail]) -> None: ...

    assert send.name == "mail.send"
    assert send.queue == "mail.high-1"
    assert send.retry is policy
    assert send.priority == -5
    assert send.start_to_close == timedelta(minutes=5)
    assert send.non_retryable_exceptions == (KeyError, OSError)
    assert send.is_sync
    assert send.wants_ctx
    assert send.result_type is None


def test_a_context_may_be_bare_annotated_or_come_with_a_default() -> None:
    @actor
    async def bare(payload: Mail, context: JobContext) -> None: ...  # type: ignore[type-arg]

    @actor
    async def annotated(payload: Annotated[Mail, "what to send"], ctx: Annotated[JobContext[Mail], "mine"]) -> None: ...

    assert bare.wants_ctx
    assert annotated.wants_ctx
    assert annotated.payload_type is Mail


@pytest.mark.parametrize("result", [int, str | None, list[Receipt], dict[str, Any], Any, tuple[int, str]])
def test_any_type_that_pydantic_knows_may_be_the_result(result: Any) -> None:
    async def compute(payload: Mail) -> None: ...

    compute.__annotations__["return"] = result

    assert actor(compute).result_type == result


async def test_an_actor_is_called_directly_in_a_test() -> None:
    @actor
    async def double(payload: Other) -> int:
        await asyncio.sleep(0)
        return payload.n * 2

    @actor
    def triple(payload: Other) -> int:
        return payload.n * 3

    assert await double(Other(n=2)) == 4
    assert await triple(Other(n=2)) == 6


async def test_a_direct_call_says_when_the_context_is_missing_or_too_much() -> None:
    @actor(name="with")
    async def with_context(payload: Other, ctx: JobContext[Other]) -> None: ...

    @actor(name="without")
    async def without(payload: Other) -> None: ...

    with pytest.raises(TypeError, match="actor 'with' needs JobContext"):
        await with_context(Other(n=1))
    with pytest.raises(TypeError, match="actor 'without' takes no JobContext"):
        await without(Other(n=1), object())  # type: ignore[arg-type]


def test_a_wrapped_async_function_stays_async() -> None:
    def traced(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        async def wrapper(*args: Any) -> Any:
            return await fn(*args)

        return wrapper

    @actor
    @traced
    async def send(payload: Mail, ctx: JobContext[Mail]) -> None: ...

    assert not send.is_sync
    assert send.wants_ctx


def test_the_repr_names_the_actor() -> None:
    @actor(name="a.b", queue="q")
    async def send(payload: Mail) -> None: ...

    assert repr(send) == "ActorRef('a.b', queue='q')"


# -- what is refused --------------------------------------------------------------------------------


def no_payload() -> None: ...
def bare_payload(payload) -> None: ...  # type: ignore[no-untyped-def]
def dict_payload(payload: dict[str, Any]) -> None: ...
def context_first(ctx: JobContext[Mail], payload: Mail) -> None: ...
def no_return(payload: Mail): ...  # type: ignore[no-untyped-def]
def other_context(payload: Mail, ctx: JobContext[Other]) -> None: ...
def two_contexts(payload: Mail, ctx: JobContext[Mail], more: JobContext[Mail]) -> None: ...
def stray_parameter(payload: Mail, session: int) -> None: ...
def bare_parameter(payload: Mail, session) -> None: ...  # type: ignore[no-untyped-def]
def optional_parameter(payload: Mail, session: Other | None) -> None: ...
def default_parameter(payload: Mail, session: Other = None) -> None: ...  # type: ignore[assignment]
def late_context(payload: Mail, session: Other, ctx: JobContext[Mail]) -> None: ...
def many_payloads(*payloads: Mail) -> None: ...
def keyword_context(payload: Mail, *, ctx: JobContext[Mail]) -> None: ...
def any_keyword(payload: Mail, **rest: Any) -> None: ...
def unknown_name(payload: Mail) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821
def unencodable_result(payload: Mail) -> asyncio.Lock: ...  # type: ignore[empty-body]
def method(self, payload: Mail) -> None: ...  # type: ignore[no-untyped-def]


def generator(payload: Mail) -> Any:
    yield 1


async def async_generator(payload: Mail) -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "fix"),
    [
        (no_payload, "its first parameter must be a pydantic model"),
        (bare_payload, "parameter 'payload' needs an annotation: a pydantic model"),
        (dict_payload, "a payload must be a pydantic BaseModel"),
        (context_first, "a payload must be a pydantic BaseModel"),
        (no_return, "needs a return annotation: a pydantic model, or None"),
        (other_context, r"JobContext\[Other\] does not match its payload; write JobContext\[Mail\]"),
        (two_contexts, "takes two JobContexts; keep one"),
        (stray_parameter, "parameter 'session' is a plain int; put it into the payload"),
        (bare_parameter, "parameter 'session' needs an annotation: the class that it depends on"),
        (optional_parameter, "parameter 'session' is .*; it must be a JobContext, or the class that the actor depends"),
        (default_parameter, "parameter 'session' is provided by name: it takes no default"),
        (late_context, "its JobContext must stand right after the payload"),
        (many_payloads, r"parameter \*payloads: .* remove the '\*'"),
        (keyword_context, "parameter ctx: .* must be positional"),
        (any_keyword, r"parameter \*\*rest: .* remove the '\*'"),
        (unknown_name, "name 'Nowhere' is not defined; define or import it in the module itself"),
        (unencodable_result, "pydantic cannot encode its result .*Lock"),
        (method, "is a method; an actor is a function outside of any class"),
        (generator, "is a generator; return one value instead of yielding"),
        (async_generator, "is a generator; return one value instead of yielding"),
    ],
)
def test_a_wrong_signature_is_refused_with_its_fix(function: Callable[..., Any], fix: str) -> None:
    with pytest.raises(ActorDefinitionError, match=fix) as caught:
        actor(function)
    assert function.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"queue": "a:b"}, "queue = 'a:b' must be 1 to 200 letters"),
        ({"queue": ""}, "queue = '' must be"),
        ({"queue": "1st"}, "starting with a letter or '_'"),
        ({"queue": "q" * 201}, "1 to 200 letters"),
        ({"queue": "mail\n"}, "must be"),
        ({"queue": 7}, "queue = 7 must be"),
        ({"priority": 32768}, "priority = 32768 must be a whole number between -32768 and 32767"),
        ({"priority": -32769}, "between -32768 and 32767"),
        ({"priority": True}, "priority = True must be a whole number"),
        ({"priority": "high"}, "priority = 'high' must be a whole number"),
        ({"priority": 1.5}, "priority = 1.5 must be a whole number"),
        ({"retry": 5}, "retry = 5 must be a RetryPolicy"),
        ({"start_to_close": 30}, "start_to_close = 30 must be a timedelta"),
        ({"start_to_close": timedelta(0)}, "must be a timedelta above zero, up to 365 days"),
        ({"start_to_close": timedelta(days=366)}, "up to 365 days"),
        ({"non_retryable_exceptions": [ValueError]}, "must be a tuple of exception classes"),
        ({"non_retryable_exceptions": ValueError}, "must be a tuple of exception classes"),
        ({"non_retryable_exceptions": (ValueError("x"),)}, "must be a tuple of exception classes"),
        ({"retry_classifier": "no"}, r"retry_classifier = 'no' must be a plain function of \(exception, attempt\)"),
        ({"retry_classifier": classify_later}, "retry_classifier = .* must be a plain function"),
        ({"on_success": "no"}, "on_success = 'no' must be a function"),
        ({"on_success": lambda row: None}, r"must take \(row, result\)"),
        ({"on_retry_exhausted": lambda: None}, r"must take \(row, error\)"),
        ({"on_cancel": lambda row, why: None}, r"must take \(row\)"),
        ({"on_cancel_timeout": 0}, "on_cancel_timeout = 0 must be seconds above zero, up to 300"),
        ({"on_retry_exhausted_timeout": 301}, "must be seconds above zero, up to 300"),
        ({"on_success_timeout": "3"}, "on_success_timeout = '3' must be seconds"),
        ({"name": ""}, r"name must be 1 to 200 bytes of text; give one @actor\(name=...\)"),
        ({"name": "  "}, "name must be 1 to 200 bytes"),
        ({"name": "é" * 101}, "name must be 1 to 200 bytes"),
        ({"name": "a\x00b"}, "name must be 1 to 200 bytes"),
        ({"name": "a\x1fb"}, "name must be 1 to 200 bytes"),
        ({"name": "\ud800"}, "name must be 1 to 200 bytes"),
        ({"name": 7}, "name must be 1 to 200 bytes"),
        ({"prioritty": 1}, r"@actor has no option 'prioritty' \(did you mean 'priority'\?\)"),
        ({"timeout": 1}, "@actor has no option 'timeout'"),
    ],
)
def test_a_wrong_option_is_refused_with_its_range(options: dict[str, Any], fix: str) -> None:
    async def send(payload: Mail) -> None: ...

    with pytest.raises(ActorDefinitionError, match=fix):
        actor(**options)(send)


@pytest.mark.parametrize(
    ("thing", "fix"),
    [
        ("mail", r"@actor takes its options by keyword: @actor\(name='mail'\)"),
        (Mail, "@actor decorates a function, not .*write it as 'async def' or 'def'"),
        (functools.partial(print), "@actor decorates a function"),
    ],
)
def test_only_a_function_is_decorated(thing: Any, fix: str) -> None:
    with pytest.raises(ActorDefinitionError, match=fix):
        actor(thing)


def test_decorating_twice_is_refused() -> None:
    @actor
    async def send(payload: Mail) -> None: ...

    with pytest.raises(ActorDefinitionError, match="decorates a function, not ActorRef"):
        actor(send)  # type: ignore[call-overload]


def test_the_error_is_a_type_error_and_a_refused_configuration() -> None:
    with pytest.raises(TypeError) as caught:
        actor(no_return)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 78


def test_a_payload_defined_in_a_function_says_where_to_define_it() -> None:
    class Local(BaseModel):
        n: int

    async def compute(payload: Local) -> None: ...

    with pytest.raises(ActorDefinitionError, match="'Local' is not defined; define or import it in the module itself"):
        actor(compute)


def test_names_may_be_reused_by_actors_of_different_registries() -> None:
    name = f"n{uuid4().hex}"

    @actor(name=name)
    async def one(payload: Mail) -> None: ...

    @actor(name=name)
    async def two(payload: Mail) -> None: ...

    assert one.name == two.name
    assert one is not two
