"""What a running actor can ask about its own cancellation."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from uuid import uuid4

import pytest
from pydantic import BaseModel

from taskqd import CancelOrigin, JobContext
from taskqd.actors.context import Cancellation
from taskqd.actors.progress import Progress
from taskqd.observe.logs import get_logger


class Item(BaseModel):
    n: int


def make(cancellation: Cancellation) -> JobContext[Item]:
    return JobContext(
        job_id=uuid4(),
        actor="a",
        queue="default",
        attempt=1,
        fence_token=1,
        batch_id=None,
        worker_id=uuid4(),
        payload=Item(n=1),
        jobs=cast(Any, None),
        log=get_logger("test"),
        cancellation=cancellation,
        progress=lambda: Progress(None, 0, 1000, lambda: None),
    )


async def test_nothing_is_cancelled_until_somebody_asks() -> None:
    ctx = make(Cancellation())
    ctx.check_cancelled()
    assert not ctx.cancellation_requested
    assert not ctx.should_abort()
    assert ctx.cancel_origin is None
    assert not ctx.cancel_event.is_set()


async def test_a_request_sets_everything_and_wakes_who_waits() -> None:
    cancellation = Cancellation()
    ctx = make(cancellation)
    waiting = asyncio.create_task(ctx.cancel_event.wait())
    await asyncio.sleep(0)

    cancellation.request(CancelOrigin.SHUTDOWN)

    async with asyncio.timeout(10):
        await waiting
    assert ctx.cancel_origin is CancelOrigin.SHUTDOWN
    assert ctx.cancellation_requested
    assert ctx.should_abort()
    with pytest.raises(asyncio.CancelledError, match="cancelled by shutdown"):
        ctx.check_cancelled()


async def test_an_event_first_asked_for_after_the_request_is_set() -> None:
    cancellation = Cancellation()
    cancellation.request(CancelOrigin.OPERATOR)
    assert make(cancellation).cancel_event.is_set()


async def test_the_first_origin_stays() -> None:
    cancellation = Cancellation()
    cancellation.request(CancelOrigin.OPERATOR)
    cancellation.request(CancelOrigin.SHUTDOWN)
    assert make(cancellation).cancel_origin is CancelOrigin.OPERATOR


async def test_should_abort_is_read_from_a_thread() -> None:
    cancellation = Cancellation()
    ctx = make(cancellation)
    cancellation.request(CancelOrigin.TIMEOUT)
    assert await asyncio.to_thread(ctx.should_abort)
