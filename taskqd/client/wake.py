"""Wakes sleeping workers after a commit: at most one notification per interval, and always one after the last."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import asyncpg

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.statements import load

SPACING = 0.02
"""Seconds between two notifications: a NOTIFY in every transaction costs four fifths of the enqueue rate."""
RARE = 0.04
"""Seconds without a notification after which a commit may carry the next one itself: that reaches a worker a round trip
sooner, and holds the one lock that all who notify share for as long as the commit takes, most often a millisecond."""
FLUSH_TIMEOUT = 5.0
"""Seconds that closing may spend on a notification that is still owed."""


class Wakes(Protocol):
    """What is told of each commit that workers are to be woken for."""

    def request(self) -> None:
        """Ask for a wake-up; call it after the insert has committed."""
        ...

    def may_be_carried(self) -> bool:
        """True when the transaction that begins now shall wake them itself, instead of a request after it."""
        return False


class WakeSender(Wakes):
    """Sends the wake-up of one schema through one pool, spaced ``SPACING`` seconds apart with a trailing send."""

    def __init__(self, pool: Any, schema: str, on_failure: FailureHook) -> None:
        self._pool = pool
        self._sql = load("client", schema).wake
        self._on_failure = on_failure
        self._wanted = False
        self._last_sent = float("-inf")
        self._loop = BackgroundLoop("wake-sender", self._send, cadence=3600.0, on_failure=on_failure)

    def start(self) -> None:
        """Start sending on the running loop."""
        self._loop.start()

    def request(self) -> None:
        """Ask for a wake-up; call it after the insert has committed."""
        self._wanted = True
        self._loop.wake()

    def may_be_carried(self) -> bool:
        """True when the transaction that begins now shall wake them itself, instead of a request after it."""
        now = time.monotonic()
        if self._wanted or now - self._last_sent < RARE:
            return False
        self._last_sent = now
        return True

    async def close(self) -> None:
        """Send what was asked for, within ``FLUSH_TIMEOUT`` seconds, and stop."""
        await self._loop.stop(FLUSH_TIMEOUT)
        if self._wanted:
            try:
                async with asyncio.timeout(FLUSH_TIMEOUT):
                    await self._notify()
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                self._on_failure("wake-sender", error, self._loop.failures + 1)

    async def _send(self) -> None:
        if not self._wanted:
            return
        wait = self._last_sent + SPACING - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        await self._notify()

    async def _notify(self) -> None:
        self._wanted = False
        self._last_sent = time.monotonic()
        try:
            await self._pool.execute(self._sql)
        except BaseException:
            self._wanted = True  # still owed: the loop tries again, and so does close()
            raise
