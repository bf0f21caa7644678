"""Renews leases on a thread of its own, so that an actor that blocks the main loop does not lose its jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.domain.errors import TaskQError
from taskqd.observe.logs import get_logger
from taskqd.storage.connect import SESSION_LOST, close, connect
from taskqd.storage.credentials import Login
from taskqd.storage.statements import load
from taskqd.storage.swap import OPEN_TIMEOUT
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.lease_guard import LeaseGuard

CLOSEST_BEATS = 0.05
"""Seconds between a notification and the beat that it asks for, so that a thousand of them are one beat."""

_log = get_logger("taskqd.heartbeat")


class Heartbeat:
    """Beats every ``interval`` seconds, anchored to the start of the last beat; a failed beat is retried after a
    quarter of that.

    A beat renews the leases of a snapshot of (id, epoch) that have less than ``threshold`` seconds left, and stamps
    the worker's presence, within ``command_timeout`` seconds in all. More than ``max_failures`` failed beats in a row
    call ``on_isolated()``; the next good one ``on_recovered()``. ``on_lost(attempts)`` gets the attempts that are no
    longer ours, ``on_cancelled(pairs)`` the (id, epoch) of ours whose jobs were cancelled. These are called on the main
    loop.

    ``on_unprovable(why)`` is called on this thread, and must end the process, when attempts are still held one command
    timeout before their leases can have ended, by the local clock counted from the sending of the last good beat, or
    when the database says that this worker was declared dead.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        group: str,
        worker_id: UUID,
        leases: Leases,
        *,
        interval: float,
        command_timeout: float,
        lock_lease: float,
        threshold: float,
        max_failures: int,
        on_lost: Callable[[Sequence[Attempt]], None],
        on_cancelled: Callable[[Sequence[tuple[UUID, int]]], None],
        on_isolated: Callable[[], None],
        on_recovered: Callable[[], None],
        on_unprovable: Callable[[str], None],
        login: Login | None = None,
    ) -> None:
        self._dsn = dsn
        self._login = login
        self._schema = schema
        self._group = group
        self._sql = load("worker", schema)
        self._worker_id = worker_id
        self._leases = leases
        self._interval = interval
        self._command_timeout = command_timeout
        self._lock_lease = lock_lease
        self._threshold = threshold
        self._max_failures = max_failures
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._on_isolated = on_isolated
        self._on_recovered = on_recovered
        self._on_unprovable = on_unprovable
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._woken: asyncio.Event | None = None
        self._connection: asyncpg.Connection | None = None
        self._in_use: asyncio.Lock | None = None
        self._thread = threading.Thread(target=self._run, name="taskqd-heartbeat", daemon=True)
        self._last_good = time.monotonic()
        self._guard = LeaseGuard(leases, threshold - command_timeout / 2)
        self.failures = 0

    def start(self) -> None:
        """Start the thread. Call it on the main loop."""
        self._main_loop = asyncio.get_running_loop()
        self._last_good = time.monotonic()
        self._guard.start()
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the beat it is in."""
        self._guard.stop()
        self._stopping = True
        self.beat_soon()

    def beat_soon(self) -> None:
        """Beat again without waiting for the interval: there may be something to hear."""
        loop, woken = self._loop, self._woken
        if loop is not None and woken is not None and not loop.is_closed():
            loop.call_soon_threadsafe(woken.set)

    async def wait_stopped(self, timeout: float) -> None:
        """Wait until the thread has closed its connection, at most ``timeout`` seconds."""
        await asyncio.to_thread(self._thread.join, timeout)

    async def renew(self) -> None:
        """Replace the connection by a new one, between two beats. Where that fails the old one stays."""
        loop = self._loop
        if loop is None or loop.is_closed():
            raise ConnectionError("the heartbeat does not run")
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._renew_connection(), loop))

    @property
    def age(self) -> float:
        """Seconds since the last good beat was sent."""
        return time.monotonic() - self._last_good

    # -- on the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_until_stopped())
        except BaseException as error:
            # Without this thread leases cannot be proved; an unseen end of it would run jobs twice.
            _log.critical("heartbeat-thread-failed", exc_info=error)
            self._on_unprovable(f"the heartbeat thread failed: {type(error).__name__}: {error}")

    async def _beat_until_stopped(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._in_use = asyncio.Lock()
        while not self._stopping:
            self._woken.clear()
            began = time.monotonic()
            self._check_provable(began)
            good = await self._try_beat(began)
            self._check_provable(time.monotonic())
            next_beat = began + (self._interval if good else self._interval / 4)
            wait = min(next_beat, max(self._provable_until, began + 0.05)) - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, wait)):
                    await self._woken.wait()
                if not self._stopping:
                    await asyncio.sleep(CLOSEST_BEATS)
            except TimeoutError:
                continue
        await self._disconnect()

    @property
    def _provable_until(self) -> float:
        # A row that the last good beat did not rewrite had more than the threshold left.
        return self._last_good + self._threshold - self._command_timeout

    def _check_provable(self, now: float) -> None:
        self._guard.look()
        if now > self._provable_until and len(self._leases):
            self._on_unprovable(f"leases could not be renewed for {now - self._last_good:.1f} s")

    async def _try_beat(self, began: float) -> bool:
        try:
            async with asyncio.timeout(self._command_timeout), self._lock():
                await self._beat()
        except (*SESSION_LOST, TaskQError, asyncpg.PostgresError) as error:
            self.failures += 1
            await self._disconnect()
            _log.warning("heartbeat-failed", streak=self.failures, error=f"{type(error).__name__}: {error}")
            if self.failures == self._max_failures + 1:
                self._tell(self._on_isolated)
            return False
        self._last_good = began
        self._guard.proven(began)
        if self.failures > self._max_failures:
            self._tell(self._on_recovered)
        self.failures = 0
        return True

    async def _beat(self) -> None:
        if self._connection is None:
            self._connection = await self._connect(self._command_timeout)
        if await self._connection.fetchval(self._sql.beat_worker, self._worker_id):
            self._on_unprovable("this worker was declared dead and its jobs are being taken")
        attempts = sorted(self._leases.snapshot(), key=lambda attempt: attempt.job_id)
        if not attempts:
            return
        now = time.monotonic()
        lost = await self._connection.fetch(
            self._sql.renew,
            [attempt.job_id for attempt in attempts],
            [attempt.epoch for attempt in attempts],
            [None if attempt.started_at is None else now - attempt.started_at for attempt in attempts],
            self._lock_lease,
            self._threshold,
        )
        if lost:
            gone = {(record["id"], record["epoch"]) for record in lost}
            self._tell(self._on_lost, [one for one in attempts if (one.job_id, one.epoch) in gone])
        cancelled = await self._connection.fetch(self._sql.cancelled, self._worker_id)
        if cancelled:
            self._tell(self._on_cancelled, [(record["id"], record["epoch"]) for record in cancelled])

    async def _connect(self, timeout: float) -> asyncpg.Connection:
        return await connect(
            self._dsn,
            role="heartbeat",
            schema=self._schema,
            group=self._group,
            timeout=timeout,
            pinned=True,
            login=self._login,
        )

    def _lock(self) -> asyncio.Lock:
        assert self._in_use is not None  # noqa: S101 - made before the first beat
        return self._in_use

    async def _renew_connection(self) -> None:
        new = await self._connect(OPEN_TIMEOUT)
        async with self._lock():
            old, self._connection = self._connection, new
        if old is not None:
            await close(old, timeout=1.0)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection, timeout=1.0)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        if self._main_loop is not None and not self._main_loop.is_closed():
            self._main_loop.call_soon_threadsafe(callback, *arguments)
