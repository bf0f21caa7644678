"""The pools of a worker: one that claims and settles, one for what actors enqueue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from taskqd.domain.budget import worker_pool_size
from taskqd.settings import Settings
from taskqd.storage.boot import boot_pool
from taskqd.storage.connect import create_pool
from taskqd.storage.credentials import Credential, login_of
from taskqd.storage.swap import SwapPool

WORKER_COMMAND_TIMEOUT = 30.0
"""Seconds that one statement of ``ctx.jobs`` may take."""


async def open_pools(
    settings: Settings,
    group: str,
    *,
    enlist: Callable[[SwapPool], Awaitable[None]],
    on_retry: Callable[[str, float], None],
) -> tuple[SwapPool, SwapPool, Credential | None]:
    """Open both and return them, the one that claims first, with the credential they logged in with.

    ``enlist(pool)`` does what must be done in the database before this worker works, while the other pool opens. Errors
    are those of ``boot_pool``, and ``enlist``'s.
    """
    cache_size, cache_lifetime = settings.statement_cache()
    login = login_of(settings)
    dispatch_pool, credential = await boot_pool(
        settings,
        partial(
            create_pool,
            settings.direct_dsn(),
            role="dispatch",
            schema=settings.schema_name,
            group=group,
            min_size=1,
            max_size=settings.dispatcher_pool_size,
            command_timeout=settings.dispatcher_command_timeout,
            max_inactive=settings.pool_max_inactive_lifetime,
            pinned=True,
            planned_once=True,
            login=login,
        ),
        on_retry=on_retry,
    )
    open_worker_pool = partial(
        create_pool,
        settings.pooled_dsn(),
        role="worker",
        schema=settings.schema_name,
        group=group,
        min_size=1,
        max_size=worker_pool_size(settings.max_concurrency),
        command_timeout=WORKER_COMMAND_TIMEOUT,
        statement_cache_size=cache_size,
        max_cached_statement_lifetime=cache_lifetime,
        max_inactive=settings.pool_max_inactive_lifetime,
        is_pooled=settings.pg_is_pooled,
        login=login,
    )
    try:
        worker_pool, _ = await asyncio.gather(SwapPool.open(open_worker_pool), enlist(dispatch_pool))
    except BaseException:
        dispatch_pool.terminate()
        raise
    return dispatch_pool, worker_pool, credential
