"""Actors that the client's tests enqueue, and that a real worker can run: ``tests.client.actors:registry``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from taskqd import RetryPolicy, actor


class Number(BaseModel):
    n: int = 0


class Doubled(BaseModel):
    n: int


class Text(BaseModel):
    value: Any


@actor(name="double", queue="numbers", priority=3)
async def double(payload: Number) -> Doubled:
    return Doubled(n=payload.n * 2)


@actor(name="fail", queue="numbers", retry=RetryPolicy(kind="non_retryable"))
async def fail(payload: Number) -> None:
    raise ValueError(f"no good: {payload.n}")


@actor(
    name="patient",
    queue="numbers",
    retry=RetryPolicy(
        kind="indefinite",
        max_attempts=9,
        time_budget=timedelta(hours=2),
        backoff="linear",
        base=timedelta(seconds=2),
        cap=timedelta(days=3),
        jitter="full",
    ),
)
async def patient(payload: Number) -> None: ...


@actor(name="text")
async def text(payload: Text) -> None: ...


registry = [double, fail, patient, text]
