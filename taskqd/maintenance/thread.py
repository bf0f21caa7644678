"""Hosts the duties on a thread of their own, in a process that exists for something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from taskqd.domain.background import finished_before
from taskqd.maintenance.core import POOL_SIZE, STATEMENT_TIMEOUT, STOP_TIMEOUT, Host, MaintenanceCore
from taskqd.observe.logs import LibraryLogger
from taskqd.settings import Settings
from taskqd.storage.boot import boot_pool
from taskqd.storage.connect import create_pool
from taskqd.storage.credentials import login_of
from taskqd.storage.swap import OPEN_TIMEOUT, SwapPool

CLOSE_TIMEOUT = 2.0
"""Seconds that the connections may take to close before they are dropped."""
ROLES = {"runtime": "runtime"}
"""How the sessions of a kind of host are called where it is not ``maintain``."""

_log = LibraryLogger("taskqd.maintenance")


class HostThread:
    """Maintains the schema from :meth:`start` until it is stopped, or until another host is to.

    Thread, event loop and connections (two at most) are its own: what blocks the process's event loop does not hold up
    the duties, and they hold up nothing there. ``on_end()`` is called on the thread as the last thing it does; then
    ``error`` is what ended it, if it was not meant to end.
    """

    def __init__(self, settings: Settings, host: Host, *, on_end: Callable[[], None] = lambda: None) -> None:
        self.host = host
        self.core: MaintenanceCore | None = None
        """What it runs, while it does."""
        self.error: BaseException | None = None
        self.why_ended = ""
        self.has_ended = False
        """True once nothing of it runs any more."""
        self._settings = settings
        self._on_end = on_end
        self._asked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._pool: SwapPool | None = None
        self._began: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="taskqd-maintenance", daemon=True)

    def start(self) -> None:
        """Begin. The database is waited for as long as ``database_boot_timeout`` says."""
        self._thread.start()

    async def begun(self) -> None:
        """Wait until it maintains the schema. Raises what ``boot_pool`` does where it cannot."""
        await asyncio.shield(asyncio.wrap_future(self._began))

    def ask_to_stop(self, why: str) -> None:
        """Begin nothing new, let the running statements end, give back what was claimed, and end."""
        first, self._asked = not self._asked, True
        self.why_ended = self.why_ended or why
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stopping.set)
            if first:
                _log.info("maintenance-ending", host=self.host.kind, why=why)

    async def wait_ended(self, timeout: float) -> bool:
        """Wait until it has ended, for at most ``timeout`` seconds; tell whether it has."""
        await asyncio.to_thread(self._thread.join, timeout)
        return self.has_ended

    async def renew(self) -> None:
        """Replace its connections by new ones, where it has any. Where that fails the old ones stay."""
        loop, pool = self._loop, self._pool
        if loop is None or pool is None or loop.is_closed() or self._asked:
            return
        swapping = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pool.swap(), loop))
        await asyncio.wait([swapping], timeout=2 * OPEN_TIMEOUT)
        if not swapping.done():
            swapping.cancel()
            raise TimeoutError
        if not swapping.cancelled():  # the thread has ended meanwhile: nothing is left to renew
            swapping.result()

    # -- on the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._host_until_stopped())
        except BaseException as error:
            self.error = error
        finally:
            self.core = self._pool = None
            if not self._began.done():
                self._began.set_exception(self.error or ConnectionAbortedError("it was stopped before it began"))
            self.has_ended = True
            self._on_end()

    async def _host_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = stopping = asyncio.Event()
        if self._asked:
            stopping.set()
        try:
            if not await finished_before(self._open(), stopping):
                return
            assert self.core is not None  # noqa: S101 - opened
            self.core.start()
            _log.info("maintenance-begun", host=self.host.kind, host_id=str(self.host.id))
            self._began.set_result(None)
            await stopping.wait()
            await self.core.stop(STOP_TIMEOUT)
            _log.info("maintenance-ended", host=self.host.kind)
        finally:
            if self._pool is not None:
                await _close(self._pool)

    async def _open(self) -> None:
        settings = self._settings
        open_pool = partial(
            create_pool,
            settings.direct_dsn(),
            role=ROLES.get(self.host.kind, "maintain"),
            schema=settings.schema_name,
            group=self.host.group,
            min_size=1,
            max_size=POOL_SIZE,
            command_timeout=STATEMENT_TIMEOUT,
            max_inactive=settings.pool_max_inactive_lifetime,
            pinned=True,
            login=login_of(settings),
        )
        self._pool, _ = await boot_pool(settings, open_pool, on_retry=_database_away)
        self.core = MaintenanceCore(
            self._pool, settings, self.host, on_failure=_loop_failed, on_superseded=self.ask_to_stop
        )
        await self.core.enlist()


async def _close(pool: SwapPool) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT):
            await pool.close()
    except TimeoutError:
        pool.terminate()


def _database_away(why: str, pause: float) -> None:
    _log.warning("database-unavailable", why=why, retry_in=round(pause, 2))


def _loop_failed(name: str, error: BaseException, streak: int) -> None:
    _log.warning("loop-failed", loop=name, streak=streak, error=f"{type(error).__name__}: {error}")
