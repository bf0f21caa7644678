"""What actors depend on: declared once, checked before anything runs, made by scope and torn down in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any

import asyncpg
import pytest
from pydantic import BaseModel

from taskqd import ActorDefinitionError, actor
from taskqd.actors.di.container import Container
from taskqd.actors.di.dependency import Dependency, Scope
from taskqd.actors.di.providers import ProviderRegistry
from taskqd.actors.registry import Registry, build_registry
from taskqd.domain.errors import DependencyCycle, DIError, MissingProvider, ProviderFailed, ScopeViolation
from taskqd.settings import Settings


class Nothing(BaseModel):
    pass


class Config:
    def __init__(self, region: str = "eu") -> None:
        self.region = region


class Client:
    def __init__(self, config: Config) -> None:
        self.config = config


class Mailer:
    def __init__(self, client: Client, config: Config) -> None:
        self.client, self.config = client, config


@actor(name="mails")
async def mails(payload: Nothing, *, mailer: Mailer, config: Config) -> None: ...


@actor(name="plain")
def plain(payload: Nothing, client: Client) -> str:
    return client.config.region


@actor(name="own-client")
async def own_client(payload: Nothing, *, client: Annotated[Client, Scope.TRANSIENT]) -> None: ...


@actor(name="writes")
async def writes(payload: Nothing, *, connection: asyncpg.Connection) -> None: ...


def registry(*refs: Any, **scopes: Scope) -> Registry:
    """Return these actors with a config, a client and a mailer of these scopes, by default the widest."""
    providers = ProviderRegistry()
    providers.register_value(Config, Scope.PROCESS, Config())
    providers.register_class(Client, scopes.get("client", Scope.PROCESS))
    providers.register_class(Mailer, scopes.get("mailer", Scope.TRANSIENT))
    return Registry(refs, providers=providers)


# -- declaration ------------------------------------------------------------------------------------


def test_an_actor_knows_what_it_depends_on() -> None:
    assert mails.dependencies == {"mailer": Dependency(Mailer), "config": Dependency(Config)}
    assert own_client.dependencies == {"client": Dependency(Client, Scope.TRANSIENT)}
    assert plain.dependencies == {"client": Dependency(Client)}


async def test_a_test_calls_an_actor_with_its_dependencies() -> None:
    assert await plain(Nothing(), client=Client(Config("us"))) == "us"
    with pytest.raises(TypeError, match="actor 'plain' needs 'client'"):
        await plain(Nothing())
    with pytest.raises(TypeError, match="actor 'plain' takes no 'mailer'"):
        await plain(Nothing(), client=Client(Config()), mailer=None)


# -- what is refused --------------------------------------------------------------------------------


def test_what_nobody_provides_is_named_with_who_asks_and_what_is_near() -> None:
    providers = ProviderRegistry()
    providers.register_value(Config, Scope.PROCESS, Config())
    with pytest.raises(MissingProvider) as caught:
        Registry([plain], providers=providers).validate()
    text = str(caught.value)
    assert "actor 'plain': parameter 'client' asks for test_di.Client" in text.replace("tests.actors.", "")
    assert "for which no provider is registered" in text
    assert text.endswith("registered: taskqd.settings.model.Settings, tests.actors.test_di.Config")
    assert caught.value.exit_code == 78
    providers.register_class(Mailer, Scope.PROCESS)
    with pytest.raises(MissingProvider, match=r"the provider of \S*Mailer: parameter 'client'"):
        providers.validate([])


def test_all_that_is_missing_is_told_at_once() -> None:
    class Store: ...

    async def both(payload: Nothing, client: Client, store: Store) -> None: ...

    both.__annotations__["store"] = Store
    providers = ProviderRegistry()
    providers.register_class(Mailer, Scope.PROCESS)
    with pytest.raises(MissingProvider) as caught:
        providers.validate([plain, actor(name="both")(both)])
    first, *told = str(caught.value).splitlines()
    assert first == "5 problems:"
    asked = [line.strip().split(" asks for ")[0] for line in told]
    assert asked == [
        f"the provider of {Mailer.__module__}.Mailer: parameter 'client'",
        f"the provider of {Mailer.__module__}.Mailer: parameter 'config'",
        "actor 'plain': parameter 'client'",
        "actor 'both': parameter 'client'",
        "actor 'both': parameter 'store'",
    ]


def test_a_name_that_is_nearly_right_is_told() -> None:
    class Clients: ...

    providers = ProviderRegistry()
    providers.register_class(Clients, Scope.PROCESS)
    with pytest.raises(MissingProvider, match="did you mean 'Clients'"):
        providers.validate([plain])


def test_a_worker_refuses_actors_without_providers_when_it_loads_them() -> None:
    with pytest.raises(MissingProvider):
        build_registry([plain])
    assert list(build_registry(registry(plain))) == ["plain"]


@pytest.mark.parametrize(("client", "mailer"), [(Scope.TRANSIENT, Scope.LOOP), (Scope.LOOP, Scope.PROCESS)])
def test_what_lives_long_depends_on_nothing_that_lives_shorter(client: Scope, mailer: Scope) -> None:
    with pytest.raises(ScopeViolation, match=f"{mailer.name} cannot depend on {client.name}"):
        registry(client=client, mailer=mailer).validate()


def test_an_override_counts_as_the_scope() -> None:
    @actor(name="wide")
    async def wide(payload: Nothing, *, mailer: Annotated[Mailer, Scope.PROCESS]) -> None: ...

    with pytest.raises(ScopeViolation, match="PROCESS cannot depend on LOOP"):
        registry(wide, client=Scope.LOOP).validate()


def test_providers_that_need_each_other_are_refused() -> None:
    def a(b: Mailer) -> Any: ...
    def b(a: Client) -> Any: ...

    providers = ProviderRegistry()
    providers.register_factory(Client, Scope.LOOP, a)
    providers.register_factory(Mailer, Scope.LOOP, b)
    with pytest.raises(DependencyCycle, match=r"Client -> \S*Mailer -> \S*Client"):
        providers.validate([])


async def _async_client() -> Client:
    return Client(Config())


def _unannotated(config) -> Client:  # type: ignore[no-untyped-def]
    return Client(config)


@pytest.mark.parametrize(
    ("register", "why"),
    [
        (lambda p: p.register_value(Client, Scope.PROCESS, 3), "the value for .*Client is a int"),
        (lambda p: p.register_value(Config, Scope.PROCESS, Config()), "Config is registered twice"),
        (lambda p: p.register_value("config", Scope.PROCESS, 1), "'config' is not a class"),
        (lambda p: p.register_value(Client, 0, Client(Config())), "must be a Scope"),
        (lambda p: p.register_factory(Client, Scope.THREAD, _async_client), "one of THREAD scope must be plain"),
        (lambda p: p.register_factory(Client, Scope.LOOP, 3), "cannot be called"),
        (lambda p: p.register_factory(Client, Scope.LOOP, _unannotated), "parameter 'config' must be annotated"),
        (lambda p: p.register_factory(Client, Scope.LOOP, _async_client, timeout=0), "must be above 0"),
    ],
)
def test_a_wrong_registration_is_refused(register: Callable[[ProviderRegistry], None], why: str) -> None:
    providers = ProviderRegistry()
    providers.register_value(Config, Scope.PROCESS, Config())
    with pytest.raises(DIError, match=why):
        register(providers)


def test_nothing_is_registered_after_the_check() -> None:
    found = registry(plain)
    found.validate()
    with pytest.raises(DIError, match="registered too late"):
        found.providers.register_value(int, Scope.PROCESS, 3)


def test_a_parameter_of_no_class_is_refused_at_the_declaration() -> None:
    with pytest.raises(ActorDefinitionError, match="parameter 'client' is"):

        @actor(name="bad")
        async def bad(payload: Nothing, *, client: Client | None) -> None: ...


def test_a_plain_function_with_something_of_the_loop_is_named() -> None:
    assert registry(plain, client=Scope.LOOP).validate() == ["plain"]
    assert registry(plain).validate() == []


# -- transactional ----------------------------------------------------------------------------------


def _connect() -> Any: ...


@pytest.mark.parametrize(
    "turn_on",
    [
        lambda providers: providers.transactional(),
        lambda providers: providers.register_factory(asyncpg.Connection, Scope.LOOP, _connect),
    ],
)
def test_a_connection_of_the_loop_makes_actors_transactional(turn_on: Callable[[ProviderRegistry], None]) -> None:
    found = registry(writes, plain)
    turn_on(found.providers)
    found.validate()
    assert found.is_transactional
    assert [name for name, ref in found.items() if found.runs_in_transaction(ref)] == ["writes"]


def test_a_connection_of_another_scope_does_not() -> None:
    found = registry(writes)
    found.providers.register_factory(asyncpg.Connection, Scope.TRANSIENT, _connect)
    found.validate()
    assert not found.is_transactional


def test_what_outlives_an_attempt_cannot_hold_the_connection_of_a_slot() -> None:
    def repository(connection: asyncpg.Connection) -> Client: ...

    providers = ProviderRegistry()
    providers.transactional()
    providers.register_factory(Client, Scope.LOOP, repository)
    with pytest.raises(ScopeViolation, match="LOOP cannot depend on TRANSIENT"):
        providers.validate([])


def test_a_plain_function_is_not_given_the_connection_of_a_slot() -> None:
    def repository(connection: asyncpg.Connection) -> Client: ...

    providers = ProviderRegistry()
    providers.transactional()
    providers.register_factory(Client, Scope.TRANSIENT, repository)
    with pytest.raises(DIError, match=r"actor 'plain': parameter 'client' .* a plain function cannot use"):
        providers.validate([plain])


# -- instances --------------------------------------------------------------------------------------


async def opened(found: Registry, values: dict[type[Any], Any] | None = None) -> Container:
    found.validate()
    container = Container(found.providers, values or {})
    await container.open(found.values())
    return container


async def test_each_scope_makes_as_many_as_it_says() -> None:
    container = await opened(registry(mails, own_client, client=Scope.LOOP))
    assert container.ready(mails) is None
    first, second = container.attempt({}), container.attempt({})
    one, two = await first.resolve(mails.dependencies), await second.resolve(mails.dependencies)
    assert one["mailer"] is not two["mailer"]
    assert one["mailer"].client is two["mailer"].client
    assert one["config"] is two["config"] is one["mailer"].config
    (own,) = (await first.resolve(own_client.dependencies)).values()
    assert own is not one["mailer"].client
    assert (await first.resolve(own_client.dependencies))["client"] is own


async def test_what_needs_nothing_of_its_own_is_ready_before_the_attempt() -> None:
    container = await opened(registry(mails, mailer=Scope.LOOP))
    ready = container.ready(mails)
    assert ready is not None
    assert ready["mailer"].config is ready["config"]


async def test_the_worker_gives_its_settings() -> None:
    @actor(name="settled")
    async def settled(payload: Nothing, *, settings: Settings) -> None: ...

    settings = Settings(pg_dsn="postgresql://app@db/app")
    container = await opened(Registry([settled]), {Settings: settings})
    assert container.ready(settled) == {"settings": settings}


async def test_a_thread_has_its_own() -> None:
    made: list[int] = []

    def client(config: Config) -> Iterator[Client]:
        made.append(threading.get_ident())
        yield Client(config)
        made.append(-1)

    providers = ProviderRegistry()
    providers.register_class(Config, Scope.PROCESS)
    providers.register_factory(Client, Scope.THREAD, client)
    container = await opened(Registry([plain], providers=providers))
    on_loop = len(made)
    await asyncio.to_thread(container.call_in_thread, plain, (Nothing(),))
    await asyncio.to_thread(lambda: [container.call_in_thread(plain, (Nothing(),)) for _ in range(3)])
    assert on_loop == 1
    assert 1 <= len(set(made[1:])) == len(made[1:]) <= 2
    await container.close()
    assert made.count(-1) == len(made) / 2


# -- making and teardown ----------------------------------------------------------------------------


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []


class Managed:
    def __init__(self, log: Log) -> None:
        self.log = log

    async def __aenter__(self) -> Managed:
        self.log.lines.append("enter")
        return self

    async def __aexit__(self, kind: Any, error: Any, _: Any) -> None:
        self.log.lines.append(f"exit {error!r}")

    async def aclose(self) -> None:
        self.log.lines.append("never")


class Aclosed:
    def __init__(self, log: Log, _before: Managed) -> None:
        self.log = log

    async def aclose(self) -> None:
        self.log.lines.append("aclose")

    def close(self) -> None:
        self.log.lines.append("never")


class Closed:
    def __init__(self, log: Log, _before: Aclosed) -> None:
        self.log = log

    def close(self) -> None:
        self.log.lines.append("close")
        raise ValueError("closed badly")


async def generated(log: Log, _before: Closed) -> AsyncIterator[Mailer]:
    log.lines.append("begin")
    try:
        yield Mailer.__new__(Mailer)
    except ValueError as error:
        log.lines.append(f"saw {error}")
        raise
    finally:
        log.lines.append("end")


@actor(name="generates")
async def generates(payload: Nothing, *, mailer: Mailer) -> None: ...


def lifecycle(scope: Scope) -> tuple[Registry, Log]:
    log, providers = Log(), ProviderRegistry()
    providers.register_value(Log, Scope.PROCESS, log)
    providers.register_class(Managed, scope)
    providers.register_class(Aclosed, scope)
    providers.register_class(Closed, scope)
    providers.register_factory(Mailer, scope, generated)
    return Registry([generates], providers=providers), log


@pytest.mark.parametrize("error", [None, ValueError("no")])
async def test_an_attempts_own_is_torn_down_last_first_and_goes_on_when_one_fails(error: Exception | None) -> None:
    found, log = lifecycle(Scope.TRANSIENT)
    container = await opened(found)
    scope = container.attempt({})
    await scope.resolve(generates.dependencies)
    await scope.close(error)
    saw = [] if error is None else ["saw no"]
    assert log.lines == ["enter", "begin", *saw, "end", "close", "aclose", f"exit {error!r}"]


async def test_a_workers_own_is_torn_down_last_first() -> None:
    found, log = lifecycle(Scope.LOOP)
    container = await opened(found)
    assert log.lines == ["enter", "begin"]
    await container.close()
    assert log.lines[2:] == ["end", "close", "aclose", "exit None"]


async def test_a_cancellation_does_not_cut_a_teardown_short() -> None:
    left: list[str] = []

    async def slow() -> AsyncIterator[Client]:
        yield Client(Config())
        await asyncio.sleep(0.05)
        left.append("left")

    providers = ProviderRegistry()
    providers.register_factory(Client, Scope.TRANSIENT, slow)
    container = await opened(Registry([own_client], providers=providers))

    async def attempt() -> None:
        scope = container.attempt({})
        await scope.resolve(own_client.dependencies)
        closing.set()
        await scope.close(None)

    closing = asyncio.Event()
    task = asyncio.create_task(attempt())
    await closing.wait()
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=10)
    assert left == ["left"]


@pytest.mark.parametrize("scope", [Scope.LOOP, Scope.TRANSIENT])
async def test_a_factory_and_a_teardown_are_bounded(scope: Scope) -> None:
    async def endless() -> Client:
        await asyncio.sleep(600)
        raise AssertionError

    providers = ProviderRegistry()
    providers.register_factory(Client, scope, endless, timeout=0.05)

    async def make() -> None:
        container = await opened(Registry([plain], providers=providers))
        await container.attempt({}).resolve(plain.dependencies)

    with pytest.raises(ProviderFailed, match=r"the provider of \S*Client took longer than 0.05 s") as caught:
        await make()
    assert caught.value.exit_code == 69

    async def stays() -> AsyncIterator[Client]:
        yield Client(Config())
        await asyncio.sleep(600)

    providers = ProviderRegistry()
    providers.register_factory(Client, scope, stays, timeout=0.05)
    container = await opened(Registry([plain], providers=providers))
    attempt = container.attempt({})
    await attempt.resolve(plain.dependencies)
    async with asyncio.timeout(10):
        await attempt.close(None)
        await container.close()


async def test_what_cannot_be_made_at_the_start_takes_back_what_was() -> None:
    found, log = lifecycle(Scope.LOOP)
    failing = ProviderRegistry()
    for provider in found.providers:
        if provider.type is not Mailer:
            failing._add(provider)
    failing.register_factory(Mailer, Scope.LOOP, _fails)
    with pytest.raises(ProviderFailed, match=r"the provider of \S*Mailer failed: OSError: away"):
        await opened(Registry([generates], providers=failing))
    assert log.lines == ["enter", "close", "aclose", "exit None"]


def _fails(_before: Closed) -> Mailer:
    raise OSError("away")


async def test_what_a_plain_function_is_given_of_an_async_factory_is_made_on_the_loop() -> None:
    loops: list[Any] = []

    async def client() -> AsyncIterator[Client]:
        loops.append(asyncio.get_running_loop())
        yield Client(Config("loop"))
        loops.append(asyncio.get_running_loop())

    providers = ProviderRegistry()
    providers.register_factory(Client, Scope.TRANSIENT, client)
    container = await opened(Registry([plain], providers=providers))
    assert await asyncio.to_thread(container.call_in_thread, plain, (Nothing(),)) == "loop"
    assert loops == [asyncio.get_running_loop()] * 2
