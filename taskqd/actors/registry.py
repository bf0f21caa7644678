"""The actors that a worker knows, loaded from ``module:attribute``."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from taskqd.actors.actor import ActorRef
from taskqd.actors.di.dependency import Scope
from taskqd.actors.di.providers import ProviderRegistry
from taskqd.actors.reporter import ErrorReporter
from taskqd.domain.errors import RegistryError, ScopeViolation
from taskqd.domain.names import nearest
from taskqd.settings.model import Settings


class Registry(dict[str, ActorRef[Any, Any]]):
    """Actors by name, and the providers of what they depend on: ``Registry([send, resize], providers=providers)``.

    Name it for a worker as ``module:attribute``. Without dependencies a plain list of actors does as well. Raises
    ``RegistryError``.
    """

    def __init__(
        self, actors: object = (), *, providers: ProviderRegistry | None = None, source: str = "actors"
    ) -> None:
        super().__init__()
        if providers is not None and not isinstance(providers, ProviderRegistry):
            raise RegistryError(f"{source}: providers = {providers!r} must be a ProviderRegistry")
        self.providers = ProviderRegistry() if providers is None else providers
        for ref in _members(actors, source):
            _check(ref, source)
            if self.setdefault(ref.name, ref) is not ref:
                raise RegistryError(f"{source}: two actors are named {ref.name!r}; give one @actor(name=...)")

    def validate(self) -> list[str]:
        """Check that everything actors depend on can be provided; see :meth:`ProviderRegistry.validate`."""
        if ErrorReporter in self.providers and self.providers[ErrorReporter].scope not in (Scope.PROCESS, Scope.LOOP):
            raise ScopeViolation("an ErrorReporter lives as long as its worker: register it with PROCESS or LOOP scope")
        for ref in self.values():
            if ref.isolated and self.providers.wants_slot_connection(ref):
                raise RegistryError(
                    f"actor {ref.name!r} has isolation='process' and asks for the connection of its transaction, which "
                    "stays in the worker; open one of its own, or run it in the worker"
                )
        return self.providers.validate(self.values(), values=PROVIDED)

    @property
    def is_transactional(self) -> bool:
        """True when some actor runs inside a transaction of its own, for which a worker opens more connections."""
        return any(self.runs_in_transaction(ref) for ref in self.values())

    def runs_in_transaction(self, ref: ActorRef[Any, Any]) -> bool:
        """Whether an actor does: async, not isolated, with a hand in the transaction by its connection or ``ctx``."""
        providers = self.providers
        if ref.is_sync or ref.isolated or not providers.is_transactional:
            return False
        return ref.wants_ctx or providers.wants_slot_connection(ref)


PROVIDED: tuple[type[Any], ...] = (Settings,)
"""What a worker provides by itself."""


def load_registry(reference: str) -> Registry:
    """Import ``module:attribute`` and return its actors by name.

    The attribute is a :class:`Registry`, a mapping of name to actor, or a list, tuple, set or frozenset of actors. The
    working directory is importable, as it is for ``python -m``. Raises ``RegistryError``; an error inside the module
    itself is its ``__cause__``. What the actors depend on can be provided, else ``DIError`` is raised.
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
    """Return ``value`` (a mapping, or a reusable collection of actors) as actors by name, checked with their providers.

    Raises ``RegistryError`` and ``DIError``.
    """
    registry = value if isinstance(value, Registry) else Registry(value, source=source)
    if not registry:
        raise RegistryError(f"{source} holds no actors")
    registry.validate()
    reservations_of(registry)
    return registry


def _members(value: object, source: str) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for key, ref in value.items():
            _check(ref, source)
            if key != ref.name:
                raise RegistryError(f"{source}: key {key!r} does not match its actor's name {ref.name!r}")
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        raise RegistryError(
            f"{source} is a {type(value).__name__}, which can be read only once; make it a list, a tuple or a mapping"
        )
    if isinstance(value, ActorRef):
        raise RegistryError(f"{source} is a single actor; put it into a list: [{value.name}]")
    raise RegistryError(f"{source} is a {type(value).__name__}; it must be a list, a tuple or a mapping of actors")


def reservations_of(registry: Registry) -> dict[str, int]:
    """The slots of every reservation that these actors name. Raises ``RegistryError`` where two differ."""
    slots: dict[str, int] = {}
    for ref in registry.values():
        for reservation in ref.reservations:
            if slots.setdefault(reservation.name, reservation.slots) != reservation.slots:
                raise RegistryError(
                    f"reservation {reservation.name!r} has {reservation.slots} slots for actor {ref.name!r} "
                    f"and {slots[reservation.name]} for another; declare it once and name it from both"
                )
    return slots


def _check(ref: object, source: str) -> None:
    if not isinstance(ref, ActorRef):
        hint = "; decorate it with @actor" if callable(ref) else ""
        raise RegistryError(f"{source} holds {ref!r}, which is not an actor{hint}")
