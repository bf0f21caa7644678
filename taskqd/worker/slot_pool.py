"""The pool of transactional consume: a connection for each slot, opened before the worker works."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import asyncpg

from taskqd.domain.budget import slot_pool_size
from taskqd.domain.errors import DatabaseUnavailableError
from taskqd.settings import Settings
from taskqd.storage.connect import CONNECT_ERRORS, create_pool, explain, with_retry
from taskqd.storage.credentials import login_of
from taskqd.storage.swap import SwapPool

STATEMENT_LIFETIME = 60.0
"""Seconds after which a statement is planned anew: these sessions are not pinned, for what actors do in them, and a
plan that was made for an empty table must not last."""


async def open_slot_pool(settings: Settings, group: str, *, on_retry: Callable[[str, float], None]) -> SwapPool:
    """Open ``max_concurrency`` + 1 connections, directly. A database that is down, or full, is tried again.

    Raises ``DatabaseUnavailableError``, or what else a connection raises, naming the pool and the database.
    """
    size = slot_pool_size(settings.max_concurrency, per_slot=True)
    dsn, login = settings.direct_dsn(), login_of(settings)
    cache_size, lifetime = settings.statement_cache()
    opener = partial(
        create_pool,
        dsn,
        role="slot",
        schema=settings.schema_name,
        group=group,
        min_size=size,
        max_size=size,
        command_timeout=None,
        statement_cache_size=cache_size,
        max_cached_statement_lifetime=min(lifetime, STATEMENT_LIFETIME) if lifetime else STATEMENT_LIFETIME,
        max_inactive=0,
        login=login,
        transactions_only=True,
    )

    async def attempt(_timeout: float) -> asyncpg.Pool:
        try:
            return await opener()
        except CONNECT_ERRORS as error:
            raise explain(error, dsn) from None

    try:
        first = await with_retry(attempt, boot_timeout=settings.database_boot_timeout, on_retry=on_retry, login=login)
    except DatabaseUnavailableError as error:
        raise DatabaseUnavailableError(f"the slot pool of {size} connections did not open: {error}") from None
    return SwapPool(opener, first)
