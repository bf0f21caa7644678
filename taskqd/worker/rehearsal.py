"""What each worker would do at its start and can do once before they are forked: all that leaves nothing behind.

A worker that is started for the first time fills caches, and imports what is imported only when it is needed. Done
before the fork, this is done for all of them, and lies in memory that they share.
"""

from __future__ import annotations

import contextlib
import logging
from typing import NoReturn

import asyncpg
import uvloop

from taskqd.actors.registry import Registry
from taskqd.domain.errors import TaskQError
from taskqd.settings import Settings, load_settings
from taskqd.storage.connect import connect
from taskqd.storage.statements import load
from taskqd.storage.swap import SwapPool
from taskqd.worker import report
from taskqd.worker.engine import Engine
from taskqd.worker.main import Worker

_NOWHERE = "postgresql://nobody@/nothing?host=/dev/null"


def rehearse(registry: Registry) -> None:
    """Build the parts of a worker of ``registry`` and drop them. Connects to nothing and starts no thread.

    Settings that this process's environment does not make whole are no fault: the worker's own may be.
    """
    with contextlib.suppress(TaskQError):
        settings = load_settings()
        logging.getLogger().setLevel(settings.log_level)  # it visits every logger that there is
        uvloop.run(_build(settings, registry))


async def _build(settings: Settings, registry: Registry) -> None:
    worker = Worker(settings, registry, None)
    pool = SwapPool(_open_none, asyncpg.create_pool(_NOWHERE, min_size=1, max_size=1))
    engine = Engine(settings, registry, worker.id, "", pool, pool, None)
    load("release", settings.schema_name)
    report.beat(engine, "", settings.max_concurrency, worker.id)
    await connect(_NOWHERE, role="dispatch", schema=settings.schema_name, pinned=True)


async def _open_none() -> NoReturn:
    raise AssertionError("a pool that is never used is never replaced")
