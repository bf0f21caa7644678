"""Wakes sleeping workers after a commit: at most one notification per interval, and always one after the last."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.statements import load

SPACING = 0.02
"""Seconds between two notifications: a NOTIFY in every transaction costs four fifths of the enqueue rate."""


class WakeSender:
    """Sends the wake-up of one schema through one pool, spaced ``SPACING`` seconds apart with a trailing send."""

    def __init__(self, pool: Any, schema: str, on_failure: FailureHook) -> None:
        self._pool = pool
        self._sql = load("client", schema).wake
        self._wanted = False
        self._last_sent = 0.0
        self._loop = BackgroundLoop("wake-sender", self._send, cadence=3600.0, on_failure=on_failure)

    def start(self) -> None:
        """Start sending on the running loop."""
        self._loop.start()

    def request(self) -> None:
        """Ask for a wake-up; call it after the insert has committed."""
        self._wanted = True
        self._loop.wake()

    async def close(self) -> None:
        """Send what was asked for and stop."""
        await self._loop.stop()

    async def _send(self) -> None:
        if not self._wanted:
            return
        wait = self._last_sent + SPACING - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        self._wanted = False
        self._last_sent = time.monotonic()
        await self._pool.execute(self._sql)
