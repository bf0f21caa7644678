"""What a parameter asks for."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any


class Scope(IntEnum):
    """How long an instance lives, the longest first. What lives longer cannot depend on what lives shorter."""

    PROCESS = 0
    """One in each worker process."""
    THREAD = 1
    """One in each thread that runs actors: the event loop's, and each of those of plain functions."""
    LOOP = 2
    """One on the event loop of the worker."""
    TRANSIENT = 3
    """One for each attempt, shared by all that the attempt is given."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """An instance of ``type`` is wanted: that of ``scope``, None for the scope that its provider is registered with."""

    type: type[Any]
    scope: Scope | None = None

    def __str__(self) -> str:
        return type_name(self.type)


def read_dependency(hint: Any) -> Dependency | None:
    """Return what an annotation asks for: a class, or ``Annotated[class, Scope.X]``; None for anything else."""
    scope = None
    if typing.get_origin(hint) is Annotated:
        hint, *more = typing.get_args(hint)
        scope = next((each for each in more if isinstance(each, Scope)), None)
    return Dependency(hint, scope) if isinstance(hint, type) else None


def read_parameters(make: Callable[..., Any]) -> dict[str, Dependency | None]:
    """Return what each parameter of a factory or a class asks for; None where its annotation is no class.

    A parameter with a default is left to it. Raises ``NameError`` and the like for what does not resolve.
    """
    function: Any = make
    if isinstance(make, type):
        function = vars(next(each for each in make.__mro__ if "__init__" in vars(each)))["__init__"]
    hints = typing.get_type_hints(function, include_extras=True)
    return {
        name: read_dependency(hints.get(name))
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def type_name(kind: type[Any]) -> str:
    """What messages call a class."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
