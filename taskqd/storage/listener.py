"""Listens for notifications. Latency only: whoever listens polls as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import asyncpg

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.storage.connect import close, connect
from taskqd.storage.credentials import Login


class Listener:
    """Holds one connection that LISTENs on ``channels`` and calls the callback of a channel for each notification.

    The connection is checked every ``check_interval`` seconds and remade with backoff, from ``backoff`` to 30 s;
    every callback is called after each remake, since notifications may have been missed.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        group: str,
        channels: Mapping[str, Callable[[], None]],
        *,
        on_failure: FailureHook,
        check_interval: float,
        setup_timeout: float,
        backoff: float,
        login: Login | None = None,
    ) -> None:
        self._dsn = dsn
        self._login = login
        self._in_use = asyncio.Lock()
        self._schema = schema
        self._group = group
        self._channels = channels
        self._setup_timeout = setup_timeout
        self._connection: asyncpg.Connection | None = None
        self.loop = BackgroundLoop(
            "listener", self._step, cadence=check_interval, on_failure=on_failure, backoff=backoff
        )

    def start(self) -> None:
        """Connect and listen, in the background."""
        self.loop.start()

    @property
    def connected(self) -> bool:
        """True while notifications arrive."""
        return self._connection is not None and not self._connection.is_closed()

    async def renew(self) -> None:
        """Replace the connection by a new one that listens already. Where that fails the old one stays."""
        async with asyncio.timeout(self._setup_timeout):
            new = await self._listen()
        async with self._in_use:
            old, self._connection = self._connection, new
        if old is not None:
            await close(old, 1.0)

    async def stop(self, timeout: float) -> None:
        """Close the connection, at most ``timeout`` seconds."""
        await self.loop.stop(timeout / 2)
        await self._close(timeout / 2)

    async def _step(self) -> None:
        try:
            async with asyncio.timeout(self._setup_timeout), self._in_use:
                if self._connection is not None and not self._connection.is_closed():
                    await self._connection.fetchval("select 1")
                    return
                self._connection = await self._listen()
        except BaseException:
            await self._close(1.0)
            raise
        for notified in self._channels.values():
            notified()

    async def _listen(self) -> asyncpg.Connection:
        connection = await connect(
            self._dsn,
            role="notify",
            schema=self._schema,
            group=self._group,
            timeout=self._setup_timeout,
            login=self._login,
        )
        try:
            for channel in self._channels:
                await connection.add_listener(channel, self._notified)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _notified(self, _connection: Any, _pid: int, channel: str, _payload: object) -> None:
        self._channels[channel]()

    async def _close(self, timeout: float) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection, timeout)
