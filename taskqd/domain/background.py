"""The one kind of background loop: started, stopped, watched, and never silent about a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from taskqd.domain.jitter import jitter

CANCEL_TIMEOUT = 1.0
"""Seconds that cancelled work may take to clean up before it is left behind."""

FailureHook = Callable[[str, BaseException, int], None]


class BackgroundLoop:
    """Calls ``step`` again and again until stopped.

    ``step`` returns the seconds to wait before the next call, or None for the ``cadence``. The wait is jittered by
    ±10 % and cut short by :meth:`wake`. A step that raises is reported to ``on_failure(name, error, streak)`` and
    tried again after a backoff that doubles from ``backoff`` to ``backoff_cap`` seconds.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[float | None]],
        *,
        cadence: float,
        on_failure: FailureHook,
        backoff: float = 0.5,
        backoff_cap: float = 30.0,
        jitter: float = 0.1,
    ) -> None:
        self.name = name
        self.cadence = cadence
        self.failures = 0
        self.last_ok = time.monotonic()
        self._step = step
        self._on_failure = on_failure
        self._backoff = backoff
        self._backoff_cap = backoff_cap
        self._jitter = jitter
        self._wake = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the loop on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=self.name)

    def wake(self) -> None:
        """Run the next step now."""
        self._wake.set()

    @property
    def stopping(self) -> bool:
        """True once :meth:`stop` was called; a long step should look at it between its parts."""
        return self._stopping

    @property
    def has_ended(self) -> bool:
        """True when it has ended though nobody stopped it: somebody has cancelled its task."""
        return self._task is not None and self._task.done()

    async def stop(self, timeout: float = 5.0) -> None:
        """Let the running step finish within ``timeout`` seconds, then cancel it. Safe to call twice."""
        self._stopping = True
        self._wake.set()
        task, self._task = self._task, None
        if task is None:
            return
        done, _ = await asyncio.wait([task], timeout=timeout)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_TIMEOUT)

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            try:
                pause = await self._step()
            except Exception as error:
                self.failures += 1
                self._on_failure(self.name, error, self.failures)
                pause = min(self._backoff_cap, self._backoff * 2 ** min(self.failures - 1, 16))
            else:
                self.failures = 0
                self.last_ok = time.monotonic()
                if pause is None:
                    pause = self.cadence
            if pause <= 0 or self._stopping:
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(pause * jitter(1 - self._jitter, 1 + self._jitter)):
                    await self._wake.wait()
            except TimeoutError:
                continue


async def finished_before(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Run ``work`` until it ends or ``stop`` is set; True when it ended. Cut short, it is cancelled and awaited."""
    working = asyncio.get_running_loop().create_task(work)
    stopping = asyncio.get_running_loop().create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait([working], timeout=CANCEL_TIMEOUT)
