"""The first pool of a process: waits for the database, and refuses a schema that the code does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg

from taskqd.settings import Settings
from taskqd.storage.connect import CONNECT_ERRORS, explain, require_writable, with_retry
from taskqd.storage.credentials import Credential, login_of
from taskqd.storage.migrate import check_schema
from taskqd.storage.migration_ledger import Reader
from taskqd.storage.swap import SwapPool
from taskqd.storage.target import attest


async def admit(database: Reader, settings: Settings) -> None:
    """Return when a process with ``settings`` may work on the schema: this code fits it, and it is the one expected.

    Raises what ``check_schema`` and ``attest`` do.
    """
    await check_schema(database, settings.schema_name)
    await attest(database, settings.schema_name, settings)


async def boot_pool(
    settings: Settings, opener: Callable[[], Awaitable[asyncpg.Pool]], *, on_retry: Callable[[str, float], None]
) -> tuple[SwapPool, Credential | None]:
    """Return the pool that ``opener`` opens, directly to a migrated schema that can be written, and its credential.

    A database that is down is tried again for ``database_boot_timeout`` seconds, ``on_retry(why, pause)`` before each.
    Raises ``DatabaseUnavailableError``, ``DatabaseAuthError``, ``SchemaNotMigratedError``,
    ``SchemaOutOfRangeError`` or ``TargetMismatchError``.
    """
    dsn, login = settings.direct_dsn(), login_of(settings)

    async def attempt(timeout: float) -> tuple[asyncpg.Pool, Credential | None]:
        try:
            async with asyncio.timeout(timeout):
                # Taken first: where another one holds a moment later, it counts as new, and sessions are renewed.
                credential = None if login is None else await login.current()
                pool = await opener()
        except CONNECT_ERRORS as error:
            raise explain(error, dsn) from None
        try:
            await require_writable(pool, dsn, timeout)
        except BaseException:
            pool.terminate()
            raise
        return pool, credential

    pool, credential = await with_retry(
        attempt, boot_timeout=settings.database_boot_timeout, on_retry=on_retry, login=login
    )
    try:
        await admit(pool, settings)
    except BaseException:
        pool.terminate()
        raise
    return SwapPool(opener, pool), credential
