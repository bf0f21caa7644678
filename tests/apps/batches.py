"""Actors that enqueue: chains that walk by a cursor, and batches made by a job that may die at any step."""

from __future__ import annotations

import contextlib
import os
import signal
from datetime import timedelta
from uuid import UUID, uuid5

import asyncpg
from pydantic import BaseModel

from taskqd import (
    EnqueueItem,
    JobContext,
    MaxPendingExceededError,
    ProviderRegistry,
    Registry,
    RetryPolicy,
    actor,
    wait_for_batch,
)
from taskqd.batch import AbortBatchAfter, BatchStatus
from tests.apps.basic import note

AT_ONCE = RetryPolicy(base=timedelta(0), max_attempts=5)
NEVER = RetryPolicy(kind="non_retryable")


class Cursor(BaseModel):
    """Where a chain stands, where it ends, and where it is killed: before, or after, it has enqueued its successor."""

    at: int = 0
    end: int
    dies_before: int = -1
    dies_after: int = -1


class Order(BaseModel):
    """A batch of ``size``; the job that makes it is killed once, if at all, at the step ``dies``."""

    batch: UUID
    size: int
    dies: str = ""


class Piece(BaseModel):
    """One job of a batch."""

    number: int
    fails: bool = False


def die(now: bool, ctx: JobContext[Cursor] | JobContext[Order]) -> None:
    """End this process as a power cut would, in the job's first attempt."""
    if now and ctx.fence_token == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@actor(retry=AT_ONCE)
async def walk(payload: Cursor, ctx: JobContext[Cursor]) -> None:
    """Enqueue the next step."""
    note("step", ctx, str(payload.at))
    die(payload.at == payload.dies_before, ctx)
    if payload.at < payload.end:
        successor = payload.model_copy(update={"at": payload.at + 1})
        await ctx.jobs.enqueue(walk, successor, idempotency_key=f"walk:{payload.end}:{successor.at}")
    die(payload.at == payload.dies_after, ctx)


@actor(retry=AT_ONCE)
async def piece(payload: Piece, ctx: JobContext[Piece]) -> None:
    """Do a part of it."""
    note("piece", ctx, str(payload.number))
    if payload.fails:
        raise ValueError("no good")


@actor(retry=NEVER)
async def weak(payload: Piece) -> None:
    """Fail for good, or not."""
    if payload.fails:
        raise ValueError("no good")


@actor(retry=AT_ONCE)
async def make(payload: Order, ctx: JobContext[Order]) -> None:
    """Enqueue a batch, and a job that waits for it: both under names that a retry finds again."""
    die(payload.dies == "before", ctx)
    batch = uuid5(payload.batch, "pieces")
    await ctx.jobs.enqueue_batch(
        [
            EnqueueItem(actor_ref=piece, payload=Piece(number=n), idempotency_key=f"{batch}:{n}")
            for n in range(payload.size)
        ],
        batch_id=batch,
    )
    die(payload.dies == "between", ctx)
    await ctx.jobs.enqueue(gather, payload, idempotency_key=f"{batch}:gather")
    die(payload.dies == "after", ctx)


class Gathered(BaseModel):
    """How a batch ended."""

    total: int
    succeeded: int


def gathered(status: BatchStatus) -> Gathered:
    """Return what is told of a batch."""
    return Gathered(total=status.total, succeeded=status.succeeded)


@actor
async def gather(payload: Order, ctx: JobContext[Order]) -> Gathered:
    """Wait for the batch without holding a slot."""
    status = await wait_for_batch(
        ctx.jobs, uuid5(payload.batch, "pieces"), snooze_interval=1, expect_at_least=payload.size
    )
    note("gathered", ctx, str(payload.batch))
    return gathered(status)


@actor(retry=AT_ONCE)
async def spread(payload: Order, ctx: JobContext[Order]) -> None:
    """Enqueue a batch with its finalizer in one call."""
    await ctx.jobs.enqueue_batch(
        [EnqueueItem(actor_ref=piece, payload=Piece(number=n)) for n in range(payload.size)],
        batch_id=payload.batch,
        finalizer=EnqueueItem(actor_ref=finish, payload=payload),
        failure_policy=AbortBatchAfter(consecutive_failures=3),
    )


@actor
async def finish(payload: Order, ctx: JobContext[Order]) -> Gathered:
    """Run once, when the batch has ended."""
    note("finished", ctx, str(payload.batch))
    return gathered(await wait_for_batch(ctx.jobs, payload.batch))


@actor(retry=AT_ONCE)
async def scatter(payload: Order, ctx: JobContext[Order], *, connection: asyncpg.Connection) -> None:
    """Enqueue in every way inside the transaction of the attempt, the first of which fails."""
    assert connection.is_in_transaction()
    pieces = [EnqueueItem(actor_ref=piece, payload=Piece(number=n)) for n in range(payload.size)]
    last = EnqueueItem(actor_ref=finish, payload=payload)
    await ctx.jobs.enqueue_batch(pieces, batch_id=payload.batch, finalizer=last)
    await ctx.jobs.enqueue_batch_streaming(pieces, batch_id=payload.batch, chunk_size=3)
    await ctx.jobs.enqueue_batch_fast(pieces, batch_id=payload.batch)
    with contextlib.suppress(MaxPendingExceededError):
        await ctx.jobs.enqueue(never, Piece(number=0))
    if ctx.fence_token == 1:
        raise ValueError("all of that for nothing")


@actor(max_pending=0)
async def never(payload: Piece) -> None:
    """Is never let in."""


providers = ProviderRegistry()
providers.transactional()
transactional = Registry([scatter, piece, finish, never], providers=providers)

actors = [walk, piece, weak, make, gather, spread, finish]
