"""A pool that can be replaced under its users: they notice nothing, and what they had begun ends on the old one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

OPEN_TIMEOUT = 30.0
"""Seconds that a new pool may take to open."""
DRAIN_TIMEOUT = 5.0
"""Seconds that statements on an old pool may take to end; then its sessions are ended."""
_CLOSE_TIMEOUT = 1.0


class SwapPool:
    """Looks like the ``asyncpg.Pool`` that ``opener`` makes, as far as taskqd uses one."""

    def __init__(self, opener: Callable[[], Awaitable[asyncpg.Pool]], first: asyncpg.Pool) -> None:
        self._opener = opener
        self._current = _Generation(first)
        self._swapping = asyncio.Lock()
        self._closed = False

    @classmethod
    async def open(cls, opener: Callable[[], Awaitable[asyncpg.Pool]]) -> SwapPool:
        """Open the first pool. Errors are those of ``opener``, also of :meth:`swap`."""
        return cls(opener, await opener())

    async def swap(self) -> None:
        """Open a new pool and use it from then on; return when the old one is closed.

        Where the new one does not open the old one stays in use, and the error is raised.
        """
        async with self._swapping:
            async with asyncio.timeout(OPEN_TIMEOUT):
                new = await self._opener()
            if self._closed:
                new.terminate()
                return
            old, self._current = self._current, _Generation(new)
            await old.retire()

    @property
    def in_use(self) -> int:
        """Its connections that somebody uses now."""
        pool = self._current.pool
        return pool.get_size() - pool.get_idle_size()

    @property
    def size(self) -> int:
        """The connections that it may hold."""
        return self._current.pool.get_max_size()

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> list[asyncpg.Record]:
        """See ``asyncpg.Pool.fetch``."""
        with self._current.used() as pool:
            found: list[asyncpg.Record] = await pool.fetch(query, *args, timeout=timeout)
            return found

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> asyncpg.Record | None:
        """See ``asyncpg.Pool.fetchrow``."""
        with self._current.used() as pool:
            return await pool.fetchrow(query, *args, timeout=timeout)

    async def fetchval(self, query: str, *args: Any, column: int = 0, timeout: float | None = None) -> Any:
        """See ``asyncpg.Pool.fetchval``."""
        with self._current.used() as pool:
            return await pool.fetchval(query, *args, column=column, timeout=timeout)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """See ``asyncpg.Pool.execute``."""
        with self._current.used() as pool:
            return await pool.execute(query, *args, timeout=timeout)

    @asynccontextmanager
    async def acquire(self, *, timeout: float | None = None) -> AsyncIterator[Any]:
        """See ``asyncpg.Pool.acquire``; for ``async with`` alone."""
        with self._current.used() as pool:
            async with pool.acquire(timeout=timeout) as connection:
                yield connection

    async def close(self) -> None:
        """Close the present pool; an old one that still drains closes by itself."""
        self._closed = True
        await self._current.pool.close()

    def terminate(self) -> None:
        """End every session at once."""
        self._closed = True
        self._current.pool.terminate()


class _Generation:
    """One pool and how many use it now: asyncpg's own close would cut off who still waits for a session."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self.pool = pool
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def used(self) -> Iterator[asyncpg.Pool]:
        self._users += 1
        self._unused.clear()
        try:
            yield self.pool
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def retire(self) -> None:
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT):
                await self._unused.wait()
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self.pool.close()
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pass  # terminated below, which is what an end in time leaves nothing for
        finally:
            self.pool.terminate()
