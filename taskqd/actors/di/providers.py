"""``ProviderRegistry``: how what actors depend on is made, declared once and checked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg

from taskqd.actors.di.dependency import Dependency, Scope, read_parameters, type_name
from taskqd.domain.arguments import is_number
from taskqd.domain.errors import DependencyCycle, DIError, MissingProvider, ScopeViolation
from taskqd.domain.names import nearest

if TYPE_CHECKING:
    from taskqd.actors.actor import ActorRef

LONGEST_TIMEOUT = 3600.0
FACTORY_TIMEOUT = 30.0
"""Seconds that a factory, or the teardown of what it made, may take."""


@dataclass(frozen=True, slots=True)
class Provider:
    """How instances of ``type`` come to be."""

    type: type[Any]
    scope: Scope
    make: Callable[..., Any] | None
    """Called with its parameters by name; None where ``value`` is given."""
    value: Any = None
    parameters: Mapping[str, Dependency] = field(default_factory=dict)
    is_async: bool = False
    """The factory is a coroutine function or an async generator."""
    is_generator: bool = False
    """``make`` gives a context manager that was a generator function."""
    timeout: float = FACTORY_TIMEOUT


Node = tuple[type[Any], Scope]
"""One instance of each while its scope lasts."""


class ProviderRegistry:
    """What actors may depend on::

        providers = ProviderRegistry()
        providers.register_value(Config, Scope.PROCESS, Config(region="eu"))
        providers.register_factory(httpx.AsyncClient, Scope.LOOP, lambda: httpx.AsyncClient(timeout=5))
        providers.register_class(Mailer, Scope.TRANSIENT)     # its __init__ takes a Config and a client

        @actor
        async def send(payload: Mail, *, mailer: Mailer) -> None: ...

        registry = Registry([send], providers=providers)      # what --actors names

    Parameters of factories and classes are provided too, by their annotations; one with a default keeps it.
    ``Annotated[Mailer, Scope.LOOP]`` asks for the instance of another scope than the registered one.

    What is made is entered when it is an async context manager, and at the end of its scope left, or closed by its
    ``aclose()``, else its ``close()``, the last first. A generator function yields once; what stands after its yield
    is the teardown, which sees the error of an attempt that failed. A value is its owner's to close.
    """

    def __init__(self) -> None:
        self._providers: dict[type[Any], Provider] = {}
        self._sealed = False

    def __iter__(self) -> Iterator[Provider]:
        return iter(self._providers.values())

    def __contains__(self, kind: type[Any]) -> bool:
        return kind in self._providers

    # -- registration ---------------------------------------------------------------------------------

    def register_value(self, kind: type[Any], scope: Scope, value: Any) -> None:
        """Give out ``value`` where a ``kind`` is asked for. Raises ``DIError`` when it is none."""
        _check_kind(kind)
        if not getattr(kind, "_is_protocol", False) and isinstance(kind, type) and not isinstance(value, kind):
            raise DIError(f"the value for {type_name(kind)} is a {type_name(type(value))}")
        self._add(Provider(kind, scope, None, value))

    def register_factory(
        self, kind: type[Any], scope: Scope, factory: Callable[..., Any], *, timeout: float = FACTORY_TIMEOUT
    ) -> None:
        """Call ``factory`` where a ``kind`` is asked for: a function or a generator function, async or plain.

        It, and its teardown, may take ``timeout`` seconds. A plain one of PROCESS scope is called in a thread of its
        own, others where the actor runs: there it must not block. One of THREAD scope must be plain. Raises
        ``DIError``.
        """
        _check_kind(kind)
        is_async = inspect.iscoroutinefunction(factory) or inspect.isasyncgenfunction(factory)
        make: Callable[..., Any] = factory
        if inspect.isasyncgenfunction(factory):
            make = asynccontextmanager(factory)
        elif inspect.isgeneratorfunction(factory):
            make = contextmanager(factory)
        is_generator = inspect.isgeneratorfunction(factory)
        self._add(
            Provider(
                kind,
                scope,
                make,
                parameters=_parameters(kind, "factory", factory),
                is_async=is_async,
                is_generator=is_generator,
                timeout=timeout,
            )
        )

    def register_class(
        self,
        kind: type[Any],
        scope: Scope,
        implementation: type[Any] | None = None,
        *,
        timeout: float = FACTORY_TIMEOUT,
    ) -> None:
        """Make a ``kind``, or the ``implementation`` of it, by calling the class. Raises ``DIError``."""
        _check_kind(kind)
        made = kind if implementation is None else implementation
        self._add(Provider(kind, scope, made, parameters=_parameters(kind, "implementation", made), timeout=timeout))

    def transactional(self) -> None:
        """Let each async actor run inside a transaction of its own that ends with its job's success.

        An actor, and what it depends on, is given the connection by asking for an ``asyncpg.Connection``; what it
        writes there, what ``ctx.jobs`` enqueues and the job's success are committed together or not at all. Each worker
        opens ``max_concurrency`` + 1 connections more. The same as registering an ``asyncpg.Connection`` of LOOP scope,
        whose factory is not called: the connections are those of the worker's slots, to its own database.
        """
        self._add(Provider(asyncpg.Connection, Scope.LOOP, None))

    @property
    def is_transactional(self) -> bool:
        """True when an ``asyncpg.Connection`` of LOOP scope is registered."""
        provider = self._providers.get(asyncpg.Connection)
        return provider is not None and provider.scope is Scope.LOOP

    def _add(self, provider: Provider) -> None:
        if self._sealed:
            raise DIError(f"{type_name(provider.type)} is registered too late: a worker has read the providers")
        _check_kind(provider.type)
        if not isinstance(provider.scope, Scope):
            raise DIError(f"scope = {provider.scope!r} of {type_name(provider.type)} must be a Scope")
        if provider.type in self._providers:
            raise DIError(f"{type_name(provider.type)} is registered twice")
        if provider.scope is Scope.THREAD and provider.is_async:
            raise DIError(f"the factory of {type_name(provider.type)} is async; one of THREAD scope must be plain")
        if not is_number(provider.timeout) or not 0 < provider.timeout <= LONGEST_TIMEOUT:
            raise DIError(
                f"timeout = {provider.timeout!r} of {type_name(provider.type)} must be above 0, "
                f"up to {LONGEST_TIMEOUT:g} seconds"
            )
        self._providers[provider.type] = provider

    # -- look-up --------------------------------------------------------------------------------------

    def __getitem__(self, kind: type[Any]) -> Provider:
        return self._providers[kind]

    def node(self, wanted: Dependency) -> Node:
        """Return whose instance is meant. The connection of a slot is each attempt's own."""
        if self.is_slot_connection(wanted.type):
            return wanted.type, Scope.TRANSIENT
        return wanted.type, self._providers[wanted.type].scope if wanted.scope is None else wanted.scope

    def is_slot_connection(self, kind: type[Any]) -> bool:
        """True for the connection that a transactional attempt is given."""
        return kind is asyncpg.Connection and self.is_transactional

    # -- validation -----------------------------------------------------------------------------------

    def validate(self, actors: Iterable[ActorRef[Any, Any]], *, values: Iterable[type[Any]] = ()) -> list[str]:
        """Check that everything can be provided, and take no more providers. Return the plain functions that are given
        something of LOOP scope, which is not made for their threads.

        ``values`` are provided otherwise. Raises ``MissingProvider``, ``ScopeViolation``, ``DependencyCycle`` or
        ``DIError``, naming who asks for what; all that is missing in one.
        """
        known = set(values)
        missing: dict[str, None] = {}
        for provider in self:
            if provider.make is not None:
                self._check((provider.type, provider.scope), (), known, missing)
        warned = []
        for ref in actors:
            for parameter, wanted in ref.dependencies.items():
                who = f"actor {ref.name!r}: parameter {parameter!r}"
                if not self._provides(wanted, who, known, missing):
                    continue
                node = self.node(wanted)
                self._check(node, (), known, missing)
                if ref.is_sync and self._reaches_slot_connection(node):
                    raise DIError(f"{who} is given the connection of a slot, which a plain function cannot use")
                if ref.is_sync and node[1] is Scope.LOOP:
                    warned.append(ref.name)
        if missing:
            kinds = sorted(map(type_name, (*self._providers, *known)))
            listed = f"; registered: {', '.join(kinds)}" if kinds else ""
            first, *more = missing
            raise MissingProvider(
                f"{len(missing)} problems:\n  " + "\n  ".join(missing) + listed if more else first + listed
            )
        self._sealed = True
        return sorted(set(warned))

    def _provides(self, wanted: Dependency, who: str, known: set[type[Any]], missing: dict[str, None]) -> bool:
        """Whether a provider of ours makes it. What nobody makes is noted in ``missing``."""
        if wanted.type in known:
            return False
        if wanted.type in self._providers:
            return True
        hint = nearest(wanted.type.__name__, [kind.__name__ for kind in (*self._providers, *known)])
        missing[f"{who} asks for {wanted}, for which no provider is registered{hint}"] = None
        return False

    def _check(self, node: Node, path: tuple[Node, ...], known: set[type[Any]], missing: dict[str, None]) -> None:
        kind, scope = node
        if node in path:
            circle = [*path[path.index(node) :], node]
            raise DependencyCycle(f"providers need each other: {' -> '.join(type_name(kind) for kind, _ in circle)}")
        if kind in known or self.is_slot_connection(kind):
            return
        provider = self._providers[kind]
        if scope is Scope.THREAD and provider.is_async:
            raise DIError(f"the factory of {type_name(kind)} is async; one of THREAD scope must be plain")
        for parameter, wanted in provider.parameters.items():
            who = f"the provider of {type_name(kind)}: parameter {parameter!r}"
            if not self._provides(wanted, who, known, missing):
                continue
            needed = self.node(wanted)
            if needed[1] > scope:
                raise ScopeViolation(
                    f"{who} asks for {wanted}, which lives shorter: {scope.name} cannot depend on {needed[1].name}"
                )
            self._check(needed, (*path, node), known, missing)

    def _reaches_slot_connection(self, node: Node) -> bool:
        kind, _ = node
        if self.is_slot_connection(kind):
            return True
        parameters = self._providers[kind].parameters.values() if kind in self._providers else ()
        return any(self._reaches_slot_connection(self.node(each)) for each in parameters if each.type in self)

    def wants_slot_connection(self, ref: ActorRef[Any, Any]) -> bool:
        """True when the actor, or what it depends on, is given the connection of its slot."""
        return self.is_transactional and any(
            self._reaches_slot_connection(self.node(each)) for each in ref.dependencies.values() if each.type in self
        )


def _check_kind(kind: object) -> None:
    if not isinstance(kind, type):
        raise DIError(f"kind = {kind!r} is not a class; providers are registered by class")


def _parameters(kind: type[Any], what: str, make: Callable[..., Any]) -> dict[str, Dependency]:
    where = f"the provider of {type_name(kind)}"
    if not callable(make):
        raise DIError(f"{where}: {what} = {make!r} cannot be called")
    if isinstance(make, partial) or (isinstance(make, type) and "__init__" not in _attributes(make)):
        return {}
    try:
        found = read_parameters(make)
    except Exception as error:
        raise DIError(f"{where}: its parameters cannot be read: {error}") from error
    for name, wanted in found.items():
        if wanted is None:
            raise DIError(f"{where}: parameter {name!r} must be annotated with a class, or have a default")
    return {name: wanted for name, wanted in found.items() if wanted is not None}


def _attributes(made: type[Any]) -> set[str]:
    return {name for each in made.__mro__ if each is not object for name in vars(each)}
