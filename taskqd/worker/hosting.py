"""Has a worker maintain the schema: always, never, or while nobody else does."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from uuid import UUID

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.maintenance.core import ALIVE, Host, leader_metric
from taskqd.maintenance.thread import HostThread
from taskqd.settings import Settings
from taskqd.storage.rotation import Rotation
from taskqd.storage.statements import load
from taskqd.storage.swap import SwapPool

LOOKS = 2
"""Looks in a row that find nobody, before a worker stands in: a scheduler that is being replaced is no reason."""
LONGEST_CADENCE = 5.0
"""Seconds between two looks, or ``sweep_interval`` where that is less."""
STATEMENT_TIMEOUT = 2.0
"""Seconds that one look may take of the pool that claims."""
RESOURCE = "maintenance"
"""What its connections are called where credentials are renewed."""
ONE_ATTEMPT = {"database_boot_timeout": 0.0}
"""A worker that gets no connections leaves it to another, and tries again in its turn."""


class Hosting:
    """Looks, through the worker's own ``pool``, whether somebody maintains the schema, and does it on a thread if not.

    With ``maintenance = "on"`` it looks for nobody. A look is one statement of a few rows. What it begins ends when
    another host has come, or when the worker stops; what fails is told to ``on_failure`` and tried again.
    """

    def __init__(
        self,
        settings: Settings,
        worker_id: UUID,
        group: str,
        pool: SwapPool,
        credentials: Rotation,
        *,
        on_failure: FailureHook,
    ) -> None:
        always = settings.maintenance == "on"
        cadence = min(LONGEST_CADENCE, settings.sweep_interval)
        self._settings = settings.model_copy(update=ONE_ATTEMPT)
        self._host = Host(worker_id, "worker" if always else "fallback", group)
        self._pool = pool
        self._credentials = credentials
        self._sql = load("hosts", settings.schema_name)
        self._always = always
        self._unattended = 0
        self._thread: HostThread | None = None
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self.loop = BackgroundLoop(
            "maintenance",
            self._look,
            cadence=cadence,
            on_failure=on_failure,
            backoff=(LOOKS + 1) * cadence,  # others look meanwhile
        )

    def start(self) -> None:
        """Begin to look, unless the setting is ``off``."""
        if self._settings.maintenance != "off":
            self._main_loop = asyncio.get_running_loop()
            self.loop.start()

    async def stop(self, timeout: float) -> None:
        """Look no more, and end what was begun: see ``HostThread.ask_to_stop``. At most ``timeout`` seconds."""
        await self.loop.stop(STATEMENT_TIMEOUT)
        if self._thread is not None:
            self._thread.ask_to_stop("the worker stops")
            await self._thread.wait_ended(timeout)

    @property
    def maintains(self) -> bool:
        """True while this worker is the one that maintains the schema, before every other that may."""
        core = None if self._thread is None else self._thread.core
        return core is not None and core.comes_first

    def metrics(self) -> str:
        """Whether it leads, and the counters of the duties while it has any."""
        core = None if self._thread is None else self._thread.core
        return leader_metric(self.maintains) + ("" if core is None else core.metrics())

    async def _look(self) -> float | None:
        if self._thread is not None:
            if not self._thread.has_ended:
                return None
            await self._bury(self._thread)
        if self._always or await self._may_stand_in():
            self._thread = HostThread(self._settings, self._host, on_end=self._ended)
            self._thread.start()
            self._credentials.add(RESOURCE, self._thread.renew)
        return None

    async def _may_stand_in(self) -> bool:
        if not await self._pool.fetchval(self._sql.unattended, ALIVE, timeout=STATEMENT_TIMEOUT):
            self._unattended = 0
            return False
        self._unattended += 1
        if self._unattended < LOOKS:
            return False
        self._unattended = 0
        elected = await self._pool.fetchval(
            self._sql.stand_in,
            self._host.id,
            socket.gethostname(),
            os.getpid(),
            self._host.group,
            ALIVE,
            timeout=STATEMENT_TIMEOUT,
        )
        return bool(elected)

    async def _bury(self, thread: HostThread) -> None:
        """Forget what has ended. Raises what it died of, once others may take its place."""
        self._thread = None
        self._credentials.remove(RESOURCE)
        if thread.error is not None:
            await self._pool.execute(self._sql.withdraw_host, self._host.id, timeout=STATEMENT_TIMEOUT)
            raise thread.error

    def _ended(self) -> None:
        if self._main_loop is not None:
            with suppress(RuntimeError):  # it is closed: the process ends
                self._main_loop.call_soon_threadsafe(self.loop.wake)
