"""The waits of a migration, for another one and for locks of other sessions: bounded, and naming who holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg

from taskqd.domain.errors import MigrationLockTimeoutError
from taskqd.storage.statements import load

_QUERY_TIMEOUT = 30.0
_FIRST_POLL, _LONGEST_POLL = 0.05, 0.5
_SHOWN = 5


@asynccontextmanager
async def migration_lock(conn: asyncpg.Connection, schema: str, timeout: float) -> AsyncIterator[None]:
    """Hold the session lock that lets one migration of ``schema`` run at a time; wait for it ``timeout``
    seconds.

    Polled, not waited for inside Postgres: a waiting statement holds a snapshot, and a concurrent index build
    of the migration it waits for would wait for that in turn. Raises ``MigrationLockTimeoutError`` that names
    the holder.
    """
    statements = load("migrate", schema)
    deadline = time.monotonic() + timeout
    pause = _FIRST_POLL
    while not await conn.fetchval(statements.try_lock, timeout=_QUERY_TIMEOUT):
        left = deadline - time.monotonic()
        if left <= 0:
            holders = await conn.fetch(statements.lock_holders, timeout=_QUERY_TIMEOUT)
            raise MigrationLockTimeoutError(
                f"another migration of schema {schema!r} is running, waited {timeout:g} s for it: "
                f"{_describe(holders)}; run this again when it has ended"
            )
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 2, _LONGEST_POLL)
    try:
        yield
    finally:
        if not conn.is_closed():
            await conn.execute(statements.unlock, timeout=_QUERY_TIMEOUT)


@asynccontextmanager
async def bounded_transaction(conn: asyncpg.Connection, schema: str, lock_timeout: float) -> AsyncIterator[None]:
    """A transaction in which no statement waits longer than ``lock_timeout`` seconds for a lock."""
    transaction = conn.transaction()
    await transaction.start()
    try:
        await _set_bounds(conn, schema, str(_milliseconds(lock_timeout)), "0", "", local=True)
        yield
    except BaseException:
        if not conn.is_closed():  # else a second error would hide why it was closed
            await transaction.rollback()
        raise
    await transaction.commit()


@asynccontextmanager
async def bounded_session(conn: asyncpg.Connection, schema: str, lock_timeout: float) -> AsyncIterator[None]:
    """The same bounds for statements that refuse a transaction; the session gets its own values back."""
    [before] = await conn.fetch(load("migrate", schema).show_bounds, timeout=_QUERY_TIMEOUT)
    await _set_bounds(conn, schema, str(_milliseconds(lock_timeout)), "0", "", local=False)
    try:
        yield
    finally:
        if not conn.is_closed():
            await _set_bounds(conn, schema, *before.values(), local=False)


async def describe_blockers(conn: asyncpg.Connection, schema: str, waited: float) -> str:
    """Name the sessions that made a statement wait ``waited`` seconds in vain. Call it right after."""
    return _describe(await conn.fetch(load("migrate", schema).blockers, waited, timeout=_QUERY_TIMEOUT))


def _describe(sessions: Sequence[asyncpg.Record]) -> str:
    if not sessions:
        return "its holder has ended since"
    shown = ", ".join(_describe_one(session) for session in sessions[:_SHOWN])
    more = len(sessions) - _SHOWN
    return f"held by {shown}" + (f" and {more} more" if more > 0 else "")


def _describe_one(session: asyncpg.Record) -> str:
    name = session["application_name"] or session["backend_type"] or "unnamed"
    age = session["query_age"]
    since = "query age not visible to this role" if age is None else f"query began {max(age, 0):.0f} s ago"
    return f"pid {session['pid']} ({name}, {session['state'] or 'state not visible to this role'}, {since})"


async def _set_bounds(
    conn: asyncpg.Connection,
    schema: str,
    lock_timeout: str,
    statement_timeout: str,
    search_path: str,
    *,
    local: bool,
) -> None:
    await conn.execute(
        load("migrate", schema).set_bounds,
        lock_timeout,
        statement_timeout,
        search_path,
        local,
        timeout=_QUERY_TIMEOUT,
    )


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))  # 0 would mean no bound at all
