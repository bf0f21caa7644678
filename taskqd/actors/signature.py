"""What the signature of a function says of the actor that it is to be."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, TypeAdapter

from taskqd.actors.context import JobContext
from taskqd.actors.di.dependency import Dependency, read_dependency
from taskqd.domain.errors import ActorDefinitionError

MAX_NAME = 200


def is_actor_name(label: object) -> bool:
    """Whether an actor may be called this: 1 to 200 bytes of text without control characters."""
    if not isinstance(label, str) or not label.strip() or any(character < " " for character in label):
        return False
    try:
        return len(label.encode()) <= MAX_NAME
    except UnicodeEncodeError:
        return False


def read_signature(fn: Callable[..., Any], where: str) -> tuple[type[BaseModel], Any, bool, dict[str, Dependency]]:
    """Return the payload's type, the result's (None for none), whether the function takes a ``JobContext``, and what
    else it depends on.

    Raises ``ActorDefinitionError`` that begins with ``where`` and names the fix.
    """
    try:
        hints = typing.get_type_hints(fn)
    except Exception as error:
        raise ActorDefinitionError(
            f"{where}: an annotation does not resolve: {error}; define or import it in the module itself, "
            "not in a function or under TYPE_CHECKING"
        ) from error
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters:
        raise ActorDefinitionError(f"{where} takes no payload; its first parameter must be a pydantic model")
    first, *rest = parameters
    for parameter in parameters:
        is_own = parameter is first or _is_context(hints.get(parameter.name))
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (
            is_own and parameter.kind is parameter.KEYWORD_ONLY
        ):
            raise ActorDefinitionError(
                f"{where}: parameter {parameter} must be positional; an actor is called with a payload and, "
                "if it wants, a JobContext: remove the '*'"
            )
    payload_type = hints.get(first.name)
    if payload_type is None and first.name in ("self", "cls"):
        raise ActorDefinitionError(f"{where} is a method; an actor is a function outside of any class")
    if payload_type is None:
        raise ActorDefinitionError(f"{where}: parameter {first.name!r} needs an annotation: a pydantic model")
    if not (isinstance(payload_type, type) and issubclass(payload_type, BaseModel)):
        raise ActorDefinitionError(
            f"{where}: parameter {first.name!r} is {payload_type!r}; a payload must be a pydantic BaseModel"
        )
    wants_ctx = False
    dependencies: dict[str, Dependency] = {}
    for parameter in rest:
        hint = hints.get(parameter.name)
        if not _is_context(hint):
            dependencies[parameter.name] = _dependency(fn, parameter, where)
            continue
        if dependencies:
            raise ActorDefinitionError(f"{where}: its JobContext must stand right after the payload")
        if wants_ctx:
            raise ActorDefinitionError(f"{where} takes two JobContexts; keep one")
        arguments = typing.get_args(hint)
        if arguments and arguments[0] is not payload_type:
            raise ActorDefinitionError(
                f"{where}: JobContext[{getattr(arguments[0], '__name__', arguments[0])}] does not match its payload; "
                f"write JobContext[{payload_type.__name__}]"
            )
        wants_ctx = True
    if "return" not in hints:
        raise ActorDefinitionError(f"{where} needs a return annotation: a pydantic model, or None")
    result_type = hints["return"]
    return payload_type, None if result_type is type(None) else result_type, wants_ctx, dependencies


def _is_context(hint: Any) -> bool:
    return hint is JobContext or typing.get_origin(hint) is JobContext


def _dependency(fn: Callable[..., Any], parameter: inspect.Parameter, where: str) -> Dependency:
    name = parameter.name
    hint = typing.get_type_hints(fn, include_extras=True).get(name)
    if hint is None:
        raise ActorDefinitionError(f"{where}: parameter {name!r} needs an annotation: the class that it depends on")
    wanted = read_dependency(hint)
    if wanted is None:
        raise ActorDefinitionError(
            f"{where}: parameter {name!r} is {hint!r}; it must be a JobContext, or the class that the actor depends on"
        )
    if wanted.type.__module__ == "builtins":
        raise ActorDefinitionError(
            f"{where}: parameter {name!r} is a plain {wanted.type.__name__}; put it into the payload"
        )
    if parameter.default is not parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
        raise ActorDefinitionError(
            f"{where}: parameter {name!r} is provided by name: it takes no default and stands after no '/'"
        )
    return wanted


def result_adapter(result_type: Any, where: str) -> TypeAdapter[Any]:
    """Return what encodes results of this type. Raises ``ActorDefinitionError`` for what pydantic cannot encode."""
    try:
        return TypeAdapter(result_type)
    except Exception as error:
        raise ActorDefinitionError(
            f"{where}: pydantic cannot encode its result {result_type!r}; return a pydantic model, or None"
        ) from error
