"""The actors that a worker knows, loaded from ``module:attribute``."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from taskqd.actors.actor import ActorRef
from taskqd.domain.errors import RegistryError
from taskqd.domain.names import nearest

Registry = dict[str, ActorRef[Any, Any]]


def load_registry(reference: str) -> Registry:
    """Import ``module:attribute`` and return its actors by name.

    The attribute is a mapping of name to actor, or a list, tuple, set or frozenset of actors. The working directory
    is importable, as it is for ``python -m``. Raises ``RegistryError``; an error inside the module itself is its
    ``__cause__``.
    """
    module_name, separator, attribute = reference.partition(":")
    if not separator or not module_name or not attribute:
        raise RegistryError(f"actors = {reference!r} must be written 'module:attribute', as in 'myapp.actors:registry'")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise RegistryError(
                f"actors = {reference!r}: no module named {error.name!r}{_nearest_module(error.name)}; "
                "is it installed, or the working directory (app_dir) right?"
            ) from None
        raise RegistryError(f"actors = {reference!r} does not import: {error}") from error
    except SystemExit as error:
        raise RegistryError(
            f"actors = {reference!r} does not import: it ends the process (sys.exit({error.code!r})); "
            "put what it runs under if __name__ == '__main__'"
        ) from error
    except Exception as error:
        raise RegistryError(f"actors = {reference!r} does not import: {type(error).__name__}: {error}") from error
    try:
        value = getattr(module, attribute)
    except AttributeError:
        raise RegistryError(
            f"actors = {reference!r}: module {module_name!r} has no attribute {attribute!r}"
            f"{nearest(attribute, vars(module))}"
        ) from None
    return build_registry(value, reference)


def _nearest_module(missing: str) -> str:
    parent, _, name = missing.rpartition(".")
    places = getattr(sys.modules.get(parent), "__path__", ()) if parent else [os.getcwd()]
    return nearest(name, (module.name for module in pkgutil.iter_modules(places)))


def build_registry(value: object, source: str = "actors") -> Registry:
    """Return ``value`` (a mapping, or a reusable collection of actors) as actors by name. Raises ``RegistryError``."""
    if isinstance(value, Mapping):
        for key, ref in value.items():
            _check(ref, source)
            if key != ref.name:
                raise RegistryError(f"{source}: key {key!r} does not match its actor's name {ref.name!r}")
        members: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = value
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        raise RegistryError(
            f"{source} is a {type(value).__name__}, which can be read only once; make it a list, a tuple or a mapping"
        )
    elif isinstance(value, ActorRef):
        raise RegistryError(f"{source} is a single actor; put it into a list: [{value.name}]")
    else:
        raise RegistryError(f"{source} is a {type(value).__name__}; it must be a list, a tuple or a mapping of actors")
    registry: Registry = {}
    for ref in members:
        _check(ref, source)
        if registry.setdefault(ref.name, ref) is not ref:
            raise RegistryError(f"{source}: two actors are named {ref.name!r}; give one @actor(name=...)")
    if not registry:
        raise RegistryError(f"{source} holds no actors")
    return registry


def _check(ref: object, source: str) -> None:
    if not isinstance(ref, ActorRef):
        hint = "; decorate it with @actor" if callable(ref) else ""
        raise RegistryError(f"{source} holds {ref!r}, which is not an actor{hint}")
