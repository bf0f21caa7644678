"""Actors that write into a table of their own, ``ledger``, inside the transaction of their jobs.

``KILL_AT`` kills the worker by SIGKILL at a step of the first such transaction: ``begun``, ``written``, ``settled`` or
``committed``. ``CUT_AT`` cuts the connection of the first that is ``settled`` or ``committed``, before the worker hears
of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid5

import asyncpg
import asyncpg.transaction

from taskqd import (
    EnqueueItem,
    IdempotencyKeyActorMismatchError,
    JobContext,
    ProviderRegistry,
    Registry,
    RetryAfter,
    RetryPolicy,
    Scope,
    Snooze,
    actor,
)
from taskqd.actors.hooks import Hook
from tests.apps.basic import MANY, Work, note, write

ONCE = RetryPolicy(max_attempts=1)


async def insert(connection: asyncpg.Connection, key: str) -> None:
    """Write one line of the ledger of the schema that the environment names."""
    table = f'"{os.environ["TASKQ_SCHEMA_NAME"]}".ledger'
    await connection.execute(f"insert into {table} (key, backend) values ($1, pg_backend_pid())", key)


def die_at(step: str) -> None:
    """End this process here, when the test says so."""
    if os.environ.get("KILL_AT") == step:
        os.kill(os.getpid(), signal.SIGKILL)


class Ledger:
    """What writes, on the connection of its attempt; a line of its own is written as it ends."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    async def write(self, key: str) -> None:
        await insert(self.connection, key)


async def ledger(connection: asyncpg.Connection) -> AsyncIterator[Ledger]:
    """Write once more after the actor, if that ends well."""
    found = Ledger(connection)
    yield found
    await found.write("after")


def row_hook(name: str) -> Hook:
    """Return a hook that notes its call."""

    async def hook(row: Any, *_more: Any) -> None:
        write(name, str(row.id), row.actor, row.status, row.attempt, 0)

    return hook


@actor(name="pay", retry=MANY, on_success=row_hook("paid"))
async def pay(payload: Work, ctx: JobContext[Work], *, connection: asyncpg.Connection) -> str:
    """Write, enqueue a child, wait, and fail as often as asked."""
    die_at("begun")
    note("start", ctx, payload.key)
    await insert(connection, payload.key)
    await ctx.jobs.enqueue(child, Work(key=payload.key))
    die_at("written")
    await asyncio.sleep(payload.seconds)
    if ctx.attempt <= payload.times:
        raise RuntimeError("no money")
    note("end", ctx, payload.key)
    return payload.key


@actor(name="fan-out", retry=MANY)
async def fan_out(payload: Work, ctx: JobContext[Work], *, connection: asyncpg.Connection) -> None:
    """Enqueue eleven children in every way there is, five of them at once; fail as often as asked."""

    def item(key: str) -> EnqueueItem:
        return EnqueueItem(actor_ref=child, payload=Work(key=key))

    keys = [f"{ctx.job_id}:{n}" for n in range(5)]
    await asyncio.gather(*(ctx.jobs.enqueue(child, Work(), idempotency_key=key) for key in keys))
    assert (await ctx.jobs.enqueue(child, Work(), idempotency_key=keys[0])).was_existing
    with suppress(IdempotencyKeyActorMismatchError):
        await ctx.jobs.enqueue(aside, Work(), idempotency_key=keys[0])
    batch = uuid5(ctx.job_id, "batch")
    await ctx.jobs.enqueue_batch([item("a"), item("b")], batch_id=batch, finalizer=item("last"))
    await ctx.jobs.enqueue_batch_fast([item(str(n)) for n in range(3)])
    assert sum((await ctx.jobs.batch_counts(batch)).values()) == 2
    await insert(connection, payload.key)
    if ctx.attempt <= payload.times:
        raise RuntimeError("not yet")


@actor(name="child", queue="children")
async def child(payload: Work) -> None:
    """Nothing runs it: it shows whether it was enqueued."""


@actor(name="through", retry=MANY)
async def through(payload: Work, *, ledger: Ledger) -> None:
    """Write by way of something of the attempt's own."""
    await ledger.write(payload.key)
    if payload.times:
        raise RuntimeError("not well")


@actor(name="through-once", retry=ONCE)
async def through_once(payload: Work, *, ledger: Ledger) -> None:
    """The same, without a second attempt."""
    await through(payload, ledger=ledger)


@actor(name="snooze", retry=MANY)
async def snooze(payload: Work, ctx: JobContext[Work], *, connection: asyncpg.Connection) -> None:
    """Write, then put the job off; the second time end it."""
    await insert(connection, payload.key)
    note("start", ctx, payload.key)
    if len(payload.key) and not os.path.exists(payload.key):
        with open(payload.key, "w"):
            raise Snooze(0) if payload.size else RetryAfter(0)


@actor(name="stubborn", retry=ONCE, start_to_close=timedelta(seconds=0.3))
async def stubborn(payload: Work, ctx: JobContext[Work], *, connection: asyncpg.Connection) -> None:
    """Outrun the limit in the middle of a query, swallow the cancellation, and write all the same."""
    await insert(connection, payload.key)
    note("start", ctx, payload.key)
    try:
        await connection.fetchval("select pg_sleep(60)")
    except asyncio.CancelledError:
        await connection.execute("select 1") if payload.times else None


@actor(name="ends-it", retry=ONCE)
async def ends_it(payload: Work, *, connection: asyncpg.Connection) -> None:
    """Commit by itself, which is not its to do."""
    await insert(connection, payload.key)
    await connection.execute("rollback")


@actor(name="breaks", retry=ONCE)
async def breaks(payload: Work, *, connection: asyncpg.Connection) -> None:
    """Ignore an error of the database, which has ended the transaction."""
    await insert(connection, payload.key)
    try:
        await connection.execute("select 1 / 0")
    except asyncpg.DivisionByZeroError:
        return


@actor(name="sessions", retry=ONCE)
async def sessions(payload: Work, *, connection: asyncpg.Connection) -> str:
    """Return what the session remembers of earlier jobs, and leave something to remember."""
    before = await connection.fetchval("select current_setting('application_name')")
    await connection.execute("set application_name = 'mine'")
    return str(before)


@actor(name="aside", retry=ONCE)
async def aside(payload: Work) -> None:
    """Has no hand in any transaction."""


@actor(name="thread", retry=ONCE)
def thread(payload: Work, ctx: JobContext[Work]) -> None:
    """A plain function never has."""


providers = ProviderRegistry()
providers.transactional()
providers.register_factory(Ledger, Scope.TRANSIENT, ledger)

registry = Registry(
    [pay, fan_out, child, through, through_once, snooze, stubborn, ends_it, breaks, sessions, aside, thread],
    providers=providers,
)

_commit = asyncpg.transaction.Transaction.commit


async def _faulty_commit(self: asyncpg.transaction.Transaction) -> None:
    die_at("settled")
    cut = os.environ.pop("CUT_AT", "")
    if cut != "settled":
        await _commit(self)
    die_at("committed")
    if cut:
        self._connection.terminate()
        raise asyncpg.ConnectionDoesNotExistError("cut")


asyncpg.transaction.Transaction.commit = _faulty_commit
