"""A worker's engine inside the test's own process, for tests that need no process of their own to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from taskqd.actors.registry import Registry
from taskqd.settings import load_settings
from taskqd.worker.engine import Engine
from taskqd.worker.main import Worker
from taskqd.worker.shutdown import ShutdownPlan
from tests.fleet import QUICK


@asynccontextmanager
async def running(registry: Registry, dsn: str, schema: str, **settings: Any) -> AsyncIterator[Engine]:
    """Run an engine with quick settings, ``settings`` above them, and stop it."""
    registry.validate()
    environment = {**QUICK, "TASKQ_PG_DSN": dsn, "TASKQ_SCHEMA_NAME": schema}
    loaded = load_settings(settings, environ=environment)
    worker = Worker(loaded, registry, None)
    engine = await Engine.open(loaded, registry, worker.id, "", enlist=worker._enlist, on_retry=lambda why, pause: None)
    engine.start()
    try:
        yield engine
    finally:
        await engine.drain(ShutdownPlan.from_now(0.2, 0.5, 10.0), asyncio.Event(), lambda phase: None)
        await engine.close()
