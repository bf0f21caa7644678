"""The instances of one worker: those that live as long as it does, and those of one attempt."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from taskqd.actors.di.dependency import Dependency, Scope, type_name
from taskqd.actors.di.providers import Node, Provider, ProviderRegistry
from taskqd.domain.errors import ProviderFailed
from taskqd.observe.logs import get_logger

if TYPE_CHECKING:
    from taskqd.actors.actor import ActorRef

Leave = Callable[[BaseException | None], Any]
"""Ends one instance; it is given the error of an attempt that failed, and may return something to await."""

_log = get_logger("taskqd.di")


@dataclass(frozen=True, slots=True)
class _Made:
    """An instance that is to be torn down."""

    provider: Provider
    leave: Leave


class Container:
    """Makes what actors depend on. :meth:`open` makes what lives as long as the worker, :meth:`close` ends it."""

    def __init__(self, providers: ProviderRegistry, values: Mapping[type[Any], Any]) -> None:
        self.providers = providers
        self._values = dict(values)
        self._made: dict[Node, Any] = {}
        self._order: list[_Made] = []
        self._threads = threading.local()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: dict[str, dict[str, Any] | None] = {}

    async def open(self, actors: Iterable[ActorRef[Any, Any]], *more: type[Any]) -> None:
        """Make everything that lives longer than an attempt and that the actors, or ``more``, depend on.

        Raises ``ProviderFailed``, which names the class; what was made before is torn down then.
        """
        self._loop = asyncio.get_running_loop()
        try:
            for ref in actors:
                for wanted in ref.dependencies.values():
                    await self._open(wanted)
            for kind in more:
                await self._open(Dependency(kind))
        except BaseException:
            await self.close()
            raise

    def find(self, kind: type[Any]) -> Any:
        """Return the instance of a class that lives as long as the worker, None where there is none."""
        if kind in self._values:
            return self._values[kind]
        return self._made.get(self.providers.node(Dependency(kind))) if kind in self.providers else None

    async def close(self) -> None:
        """Tear down, the last first, each within its bound; what fails is logged."""
        while self._order:
            await _tear_down(self._order.pop(), None)

    async def _open(self, wanted: Dependency) -> None:
        if wanted.type in self._values or self.providers.is_slot_connection(wanted.type):
            return
        node = self.providers.node(wanted)
        provider = self.providers[wanted.type]
        for parameter in provider.parameters.values():
            await self._open(parameter)
        if node in self._made or node[1] is Scope.TRANSIENT:
            return
        arguments = {name: self.shared(each) for name, each in provider.parameters.items()}
        try:
            self._made[node] = await _make(provider, arguments, self._order, in_thread=node[1] is Scope.PROCESS)
        except ProviderFailed:
            raise
        except Exception as error:
            raise ProviderFailed(
                f"the provider of {type_name(provider.type)} failed: {type(error).__name__}: {error}"
            ) from error

    def shared(self, wanted: Dependency) -> Any:
        """Return an instance that lives longer than an attempt. Raises ``KeyError`` where it does not."""
        if wanted.type in self._values:
            return self._values[wanted.type]
        return self._made[self.providers.node(wanted)]

    # -- attempts -------------------------------------------------------------------------------------

    def ready(self, ref: ActorRef[Any, Any]) -> dict[str, Any] | None:
        """Return what an async actor is given where nothing of it is made for the attempt, else None."""
        if ref.name not in self._ready:
            try:
                self._ready[ref.name] = {name: self.shared(each) for name, each in ref.dependencies.items()}
            except KeyError:
                self._ready[ref.name] = None
        return self._ready[ref.name]

    def attempt(self, given: Mapping[type[Any], Any]) -> AttemptScope:
        """Return what makes the dependencies of one attempt on the event loop; ``given`` are ready already."""
        return AttemptScope(self, given)

    def call_in_thread(self, ref: ActorRef[Any, Any], arguments: tuple[Any, ...]) -> Any:
        """Call a plain actor, in the thread that calls this, with what it depends on."""
        scope = _ThreadScope(self)
        failed: BaseException | None = None
        try:
            return ref.fn(*arguments, **{name: scope.get(each) for name, each in ref.dependencies.items()})
        except BaseException as error:
            failed = error
            raise
        finally:
            scope.close(failed)

    def on_loop(self, coroutine: Any) -> Any:
        """Run a coroutine on the worker's loop from another thread, and wait for it."""
        assert self._loop is not None  # noqa: S101
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def of_thread(self) -> dict[Node, Any]:
        """The instances of this thread."""
        found: dict[Node, Any] | None = getattr(self._threads, "made", None)
        if found is None:
            found = self._threads.made = {}
        return found

    def keep(self, made: _Made) -> None:
        """Tear this down with the worker."""
        self._order.append(made)


class AttemptScope:
    """The instances of one attempt of an async actor. :meth:`close` it."""

    __slots__ = ("_container", "_given", "_made", "_order")

    def __init__(self, container: Container, given: Mapping[type[Any], Any]) -> None:
        self._container = container
        self._given = given
        self._made: dict[Node, Any] = {}
        self._order: list[_Made] = []

    async def resolve(self, dependencies: Mapping[str, Dependency]) -> dict[str, Any]:
        """Return an instance for each parameter. Raises ``ProviderFailed``, or what a factory raises."""
        return {name: await self._get(each) for name, each in dependencies.items()}

    async def _get(self, wanted: Dependency) -> Any:
        if wanted.type in self._given:
            return self._given[wanted.type]
        container = self._container
        try:
            return container.shared(wanted)
        except KeyError:
            node = container.providers.node(wanted)
        if node not in self._made:
            provider = container.providers[wanted.type]
            arguments = await self.resolve(provider.parameters)
            self._made[node] = await _make(provider, arguments, self._order)
        return self._made[node]

    async def close(self, error: BaseException | None) -> None:
        """Tear down, the last first. A cancellation does not cut it short: each teardown has its own bound."""
        if not self._order:
            return
        task = asyncio.ensure_future(self._close(error))
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # whoever asked is answered by the end of the attempt, which is near

    async def _close(self, error: BaseException | None) -> None:
        while self._order:
            await _tear_down(self._order.pop(), error)


class _ThreadScope:
    """The instances of one attempt of a plain function, made in its thread; what is async is made on the loop."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._made: dict[Node, Any] = {}
        self._order: list[_Made] = []

    def get(self, wanted: Dependency) -> Any:
        container = self._container
        providers = container.providers
        scope = None if wanted.type not in providers else providers.node(wanted)[1]
        if scope is None or scope in (Scope.PROCESS, Scope.LOOP):
            return container.shared(wanted)
        node, provider = providers.node(wanted), providers[wanted.type]
        made = container.of_thread() if scope is Scope.THREAD else self._made
        if node not in made:
            arguments = {name: self.get(each) for name, each in provider.parameters.items()}
            order: list[_Made] = []
            made[node] = self._make(provider, arguments, order)
            for each in order:
                container.keep(each) if scope is Scope.THREAD else self._order.append(each)
        return made[node]

    def _make(self, provider: Provider, arguments: dict[str, Any], order: list[_Made]) -> Any:
        if provider.make is None:
            return provider.value
        if provider.is_async:
            return self._container.on_loop(_make(provider, arguments, order))
        made = provider.make(**arguments)
        if provider.is_generator:
            value = made.__enter__()
            order.append(_Made(provider, _leave_plain(made)))
            return value
        if _is_async_manager(made) or inspect.isawaitable(made):
            return self._container.on_loop(_bounded(provider, _enter(provider, made, order)))
        _note_close(provider, made, order)
        return made

    def close(self, error: BaseException | None) -> None:
        """Tear down, the last first."""
        while self._order:
            made = self._order.pop()
            try:
                left = made.leave(error)
                if inspect.isawaitable(left):
                    self._container.on_loop(_bounded(made.provider, left))
            except Exception as problem:
                _told(made.provider, problem)


# -- making and ending one instance -------------------------------------------------------------------


async def _make(provider: Provider, arguments: dict[str, Any], order: list[_Made], *, in_thread: bool = False) -> Any:
    """Make an instance and note in ``order`` how it is torn down."""
    if provider.make is None:
        return provider.value
    return await _bounded(provider, _call(provider, arguments, order, in_thread and not provider.is_async))


async def _call(provider: Provider, arguments: dict[str, Any], order: list[_Made], in_thread: bool) -> Any:
    assert provider.make is not None  # noqa: S101
    made = await _in_thread(partial(provider.make, **arguments)) if in_thread else provider.make(**arguments)
    if provider.is_generator:
        value = await _in_thread(made.__enter__) if in_thread else made.__enter__()
        order.append(_Made(provider, _leave_plain(made)))
        return value
    return await _enter(provider, made, order)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Call in a thread that nobody waits for at the end of the process: it may hang."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, problem = None, None
        try:
            result = call()
        except BaseException as error:
            problem = error
        with suppress(RuntimeError):  # the loop is closed: it came too late
            loop.call_soon_threadsafe(tell, result, problem)

    threading.Thread(target=run, name="taskqd-provider", daemon=True).start()
    return await future


async def _bounded(provider: Provider, work: Any) -> Any:
    timeout = asyncio.timeout(provider.timeout)
    try:
        async with timeout:
            return await work
    except TimeoutError:
        if not timeout.expired():
            raise
        raise ProviderFailed(
            f"the provider of {type_name(provider.type)} took longer than {provider.timeout:g} s"
        ) from None


async def _enter(provider: Provider, made: Any, order: list[_Made]) -> Any:
    if inspect.isawaitable(made) and not _is_async_manager(made):
        made = await made
    if not _is_async_manager(made):
        _note_close(provider, made, order)
        return made
    value = await made.__aenter__()
    order.append(_Made(provider, lambda error: made.__aexit__(*_exit_arguments(error))))
    return value


def _is_async_manager(made: Any) -> bool:
    return hasattr(type(made), "__aenter__") and hasattr(type(made), "__aexit__")


def _note_close(provider: Provider, made: Any, order: list[_Made]) -> None:
    close = getattr(made, "aclose", None) or getattr(made, "close", None)
    if callable(close):
        order.append(_Made(provider, lambda _error: close()))


def _leave_plain(manager: Any) -> Leave:
    return lambda error: manager.__exit__(*_exit_arguments(error))


def _exit_arguments(error: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


async def _tear_down(made: _Made, error: BaseException | None) -> None:
    try:
        left = made.leave(error)
        if inspect.isawaitable(left):
            await _bounded(made.provider, left)
    except Exception as problem:
        if problem is not error:
            _told(made.provider, problem)


def _told(provider: Provider, problem: BaseException) -> None:
    _log.warning(
        "dependency-teardown-failed", provider=type_name(provider.type), error=f"{type(problem).__name__}: {problem}"
    )
