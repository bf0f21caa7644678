"""Ends many things at once, within one bound."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from taskqd.observe.logs import get_logger

_log = get_logger("taskqd.worker")


async def all_within(timeout: float, *closes: Awaitable[Any]) -> None:
    """Await all, for at most ``timeout`` seconds, logging what fails and cancelling what is late."""
    tasks = [asyncio.ensure_future(close) for close in closes]
    done, late = await asyncio.wait(tasks, timeout=timeout)
    for task in late:
        task.cancel()
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            _log.warning("close-failed", error=repr(task.exception()))
