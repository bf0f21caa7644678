"""The first connection of a process: waits for the database, and refuses a schema that the code does not fit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import asyncpg

from taskqd.settings import Settings
from taskqd.storage.connect import close, connect_with_retry
from taskqd.storage.credentials import login_of
from taskqd.storage.migrate import check_schema


@asynccontextmanager
async def boot_connection(
    settings: Settings, *, group: str, on_retry: Callable[[str, float], None]
) -> AsyncIterator[asyncpg.Connection]:
    """Yield a direct connection to a migrated schema, for what a process does once before it works.

    A database that is down is tried again for ``database_boot_timeout`` seconds, ``on_retry(why, pause)`` before each.
    Raises ``DatabaseUnavailableError``, ``DatabaseAuthError``, ``SchemaNotMigratedError`` or ``SchemaOutOfRangeError``.
    """
    connection = await connect_with_retry(
        settings.direct_dsn(),
        role="boot",
        schema=settings.schema_name,
        group=group,
        boot_timeout=settings.database_boot_timeout,
        on_retry=on_retry,
        login=login_of(settings),
    )
    try:
        await check_schema(connection, settings.schema_name)
        yield connection
    finally:
        await close(connection)
