"""``TaskqRuntime``: hosts the duties in a service that exists for something else, such as a web API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self

from taskqd.domain.errors import ConfigError
from taskqd.domain.ids import new_uuid
from taskqd.maintenance.core import STOP_TIMEOUT, Host, leader_metric
from taskqd.maintenance.thread import CLOSE_TIMEOUT, HostThread
from taskqd.settings import Settings, SettingsError, load_settings

State = Literal["constructed", "starting", "running", "stopping", "stopped", "failed"]
Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]
"""What Starlette and FastAPI take as ``lifespan=``."""

_STOP_TIMEOUT = STOP_TIMEOUT + CLOSE_TIMEOUT + 2.0


class TaskqRuntime:
    """Maintains a schema from inside a service, on a thread and up to two connections of its own::

        async with TaskqRuntime(schedule_enabled=True):
            ...

    It is there for services that for now must do so: what maintains the schema then lives and dies with them. A
    scheduler (``taskqd scheduler run``, or that of a workgroup) is the place for it. Both may run, and any number.

    ``dsn``, ``schema``
        Where; default: as the settings say.
    ``settings``
        All of them, in place of those of the environment (``TASKQ_…``) and the ``.env`` files; without ``dsn`` and
        ``schema`` then.
    ``housekeeper_enabled``
        Take back expired leases, end what is past its deadline, promote due jobs, archive and delete. Default on.
    ``schedule_enabled``
        Fire schedules. Default off. With both, workers with ``maintenance = "auto"`` leave it all to this.

    Raises ``ConfigError`` for bad arguments, ``SettingsError`` (one too) for bad settings.
    """

    def __init__(
        self,
        *,
        dsn: str | None = None,
        schema: str | None = None,
        settings: Settings | None = None,
        housekeeper_enabled: bool = True,
        schedule_enabled: bool = False,
    ) -> None:
        for name, value in (("housekeeper_enabled", housekeeper_enabled), ("schedule_enabled", schedule_enabled)):
            if not isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r} must be true or false")
        if not (housekeeper_enabled or schedule_enabled):
            raise ConfigError("housekeeper_enabled and schedule_enabled are both false: nothing is left to do")
        for name, text in (("dsn", dsn), ("schema", schema)):
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"{name} must be text or None, it is of type {type(text).__name__}")
        if settings is None:
            settings = _load(dsn, schema)
        elif not isinstance(settings, Settings):
            raise ConfigError(f"settings must come from load_settings(), it is of type {type(settings).__name__}")
        elif dsn is not None or schema is not None:
            raise ConfigError("settings say which dsn and schema are meant: leave these out")
        self.settings = settings
        self.state: State = "constructed"
        self._does = (housekeeper_enabled, schedule_enabled)
        self._thread: HostThread | None = None

    async def start(self) -> None:
        """Begin, once the database answers, within ``database_boot_timeout`` seconds. Twice is once.

        Raises ``DatabaseUnavailableError``, ``DatabaseAuthError``, ``SchemaNotMigratedError``,
        ``SchemaOutOfRangeError`` or ``TargetMismatchError``; then it may be started again.
        """
        if self.state in ("starting", "running"):
            return
        if self.state == "stopping":
            raise RuntimeError("the TaskqRuntime is stopping; start it when stop() has returned")
        self.state = "starting"
        host = Host(new_uuid(), "runtime", self.settings.worker_group, *self._does)
        self._thread = thread = HostThread(self.settings, host, on_end=self._ended)
        thread.start()
        try:
            await thread.begun()
        except BaseException:
            thread.ask_to_stop("it did not begin")
            await asyncio.shield(thread.wait_ended(_STOP_TIMEOUT))
            self._thread, self.state = None, "failed"
            raise
        if self.state == "starting":
            self.state = "running"

    async def stop(self) -> None:
        """Begin nothing new, let the running statements end, give back what was claimed. At most 19 seconds."""
        if self._thread is None or self.state == "stopping":
            return
        self.state = "stopping"
        self._thread.ask_to_stop("the runtime stops")
        ended = await asyncio.shield(self._thread.wait_ended(_STOP_TIMEOUT))
        self._thread, self.state = None, "stopped" if ended else "failed"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def trouble(self) -> str:
        """Why the schema is not maintained by this runtime; empty while it is. For the service's readiness."""
        core = None if self._thread is None else self._thread.core
        if core is None or self.state != "running":
            return f"the runtime is {self.state}"
        return core.trouble

    def metrics(self) -> str:
        """The counters of the duties in the Prometheus text format, for the service's own scrape."""
        core = None if self._thread is None else self._thread.core
        return "" if core is None else core.metrics() + leader_metric(core.comes_first)

    def _ended(self) -> None:
        if self.state == "running":  # by nobody's wish
            self.state = "failed"


def _load(dsn: str | None, schema: str | None) -> Settings:
    try:
        return load_settings({"pg_dsn": dsn, "pg_dsn_direct": dsn, "schema_name": schema})
    except SettingsError as error:
        problems = list(error.problems)
        for flag, name in (("--pg-dsn-direct", "dsn"), ("--pg-dsn", "dsn"), ("--schema-name", "schema")):
            problems = [line.replace(flag, name) for line in problems]
        raise SettingsError(list(dict.fromkeys(problems))) from None


def taskq_lifespan(runtime: TaskqRuntime, lifespan: Lifespan | None = None) -> Lifespan:
    """Return a lifespan, as Starlette and FastAPI take it, that runs ``runtime`` around the service's own one::

        app = FastAPI(lifespan=taskq_lifespan(TaskqRuntime(), own_lifespan))

    What the service's own yields is yielded. A runtime that cannot start keeps the service from starting, with one of
    the errors of :meth:`TaskqRuntime.start`. Raises ``ConfigError`` for anything but these two.
    """
    if not isinstance(runtime, TaskqRuntime):
        raise ConfigError(f"runtime must be a TaskqRuntime, it is of type {type(runtime).__name__}")
    if lifespan is not None and not callable(lifespan):
        raise ConfigError(f"lifespan must be a function of the application, it is of type {type(lifespan).__name__}")

    @asynccontextmanager
    async def around(app: Any) -> AsyncIterator[Any]:
        async with runtime:
            if lifespan is None:
                yield
            else:
                async with lifespan(app) as state:
                    yield state

    return around
