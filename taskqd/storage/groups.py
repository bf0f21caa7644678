"""The row that tells a group's neighbours how many connections it may hold."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import asyncpg

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.domain.errors import BudgetExceededError
from taskqd.domain.exit_codes import ExitCode
from taskqd.storage.limits import Asker, ConnectionLimits, read_connection_limits
from taskqd.storage.statements import load

EXPIRES_AFTER = 90.0
"""Seconds after which a row that nobody renews counts no more."""
RENEW_INTERVAL = 30.0
"""Seconds between renewals."""
LOCK_TIMEOUT = 10.0
"""Seconds to wait for another group that declares."""
_FIRST_LOOK = 1.0
"""Seconds after a start: it need not open a session of its own while there is more to do."""
_WORTH_WHILE = 0.8 * RENEW_INTERVAL
_STATEMENT_TIMEOUT = 10.0
_WITHDRAW_TIMEOUT = 1.0


def own_place() -> str:
    """Return where the group of this process runs: the host, and what its supervisor calls its runtime directory.

    Two supervisors of one host may run groups of one name, in different directories.
    """
    return ":".join(filter(None, [socket.gethostname(), os.environ.get("TASKQD_RUNTIME_DIR")]))


async def declare(
    conn: asyncpg.Connection,
    asker: Asker,
    decide: Callable[[Sequence[ConnectionLimits]], int | None],
) -> None:
    """Look at the limits, and write down the connections that ``decide`` makes of them, or nothing for None.

    No other group of the schema looks or writes meanwhile. ``asker.place`` must be set. Raises ``BudgetExceededError``
    (75) when one holds the lock for longer than 10 s.
    """
    sql = load("limits", asker.schema)
    async with conn.transaction():
        await conn.execute(f"set local lock_timeout = {round(LOCK_TIMEOUT * 1000)}")
        try:
            await conn.execute(sql.lock_groups)
        except asyncpg.LockNotAvailableError:
            raise BudgetExceededError(
                f"another group of schema {asker.schema!r} has been checking its connections for {LOCK_TIMEOUT:g} s",
                ExitCode.TRY_AGAIN,
            ) from None
        connections = decide(await read_connection_limits(conn, asker))
        if connections is not None:
            await conn.execute(sql.forget_groups)
            await conn.execute(sql.declare_group, asker.group, asker.place, connections, EXPIRES_AFTER)


class GroupRow:
    """Keeps the row of the group that this process is part of from expiring. Every process of the group may."""

    def __init__(self, pool: Any, schema: str, group: str, on_failure: FailureHook) -> None:
        self._pool = pool
        self._sql = load("limits", schema)
        self._key = (group, own_place())
        self._waited = False
        self.loop = BackgroundLoop("group-row", self._renew, cadence=RENEW_INTERVAL, on_failure=on_failure)

    async def withdraw(self) -> None:
        """Take the row away, as the group ends: what its processes still hold is live. Raises what the pool does."""
        await self.loop.stop(0.1)
        async with asyncio.timeout(_WITHDRAW_TIMEOUT):
            await self._pool.execute(self._sql.withdraw_group, *self._key)

    async def _renew(self) -> float | None:
        if not self._waited:
            self._waited = True
            return _FIRST_LOOK
        await self._pool.execute(
            self._sql.renew_group, *self._key, EXPIRES_AFTER, _WORTH_WHILE, timeout=_STATEMENT_TIMEOUT
        )
        return None
