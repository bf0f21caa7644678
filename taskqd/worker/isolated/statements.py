"""The worker's database sessions, lent to the process of one attempt: it opens none of its own.

``ctx.jobs`` in such a process is what it is in the worker, on a pool that sends each statement to the worker's.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg

from taskqd.domain.errors import SubEnqueueError

METHODS = ("fetch", "fetchrow", "fetchval", "execute")
LONGEST = 60.0
"""Seconds that one statement may take."""

Call = Callable[..., Awaitable[Any]]
"""Sends a request to the worker and returns its answer."""


class Row(dict[str, Any]):
    """A record, by its columns' names or numbers."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class LentConnection:
    """The part of a session that ``ctx.jobs`` uses, in the attempt's process. ``held`` is one that stays the same."""

    def __init__(self, call: Call, held: bool) -> None:
        self._call = call
        self._held = held

    async def fetch(self, query: str, *args: Any, timeout: float | None = None) -> list[Row]:
        """See ``asyncpg.Connection.fetch``."""
        return [Row(row) for row in await self._run("fetch", query, args, timeout)]

    async def fetchrow(self, query: str, *args: Any, timeout: float | None = None) -> Row | None:
        """See ``asyncpg.Connection.fetchrow``."""
        row = await self._run("fetchrow", query, args, timeout)
        return None if row is None else Row(row)

    async def fetchval(self, query: str, *args: Any, timeout: float | None = None) -> Any:
        """See ``asyncpg.Connection.fetchval``."""
        return await self._run("fetchval", query, args, timeout)

    async def execute(self, query: str, *args: Any, timeout: float | None = None) -> str:
        """See ``asyncpg.Connection.execute``."""
        done: str = await self._run("execute", query, args, timeout)
        return done

    async def copy_to_table(
        self, table_name: str, *, source: AsyncIterable[bytes], timeout: float | None = None, **options: Any
    ) -> str:
        """See ``asyncpg.Connection.copy_to_table``; the source must be text."""
        text = b"".join([part async for part in source]).decode()
        done: str = await self._call(
            op="copy", table=table_name, text=text, options=options, timeout=timeout, held=self._held
        )
        return done

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """See ``asyncpg.Connection.transaction``."""
        await self.execute("begin")
        try:
            yield
        except BaseException:
            await self.execute("rollback")
            raise
        await self.execute("commit")

    async def _run(self, method: str, query: str, args: tuple[Any, ...], timeout: float | None) -> Any:
        return await self._call(op="sql", method=method, query=query, args=list(args), timeout=timeout, held=self._held)


class LentPool(LentConnection):
    """The worker's pool, in the attempt's process. It lends one session at a time for longer than a statement."""

    def __init__(self, call: Call) -> None:
        super().__init__(call, held=False)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def acquire(self, *, timeout: float | None = None) -> AsyncIterator[LentConnection]:
        """See ``asyncpg.Pool.acquire``."""
        async with self._turn:
            async with asyncio.timeout(timeout):
                await self._call(op="acquire")
            try:
                yield LentConnection(self._call, held=True)
            finally:
                await self._call(op="release")


def raise_answer(error: Any) -> None:
    """Raise in the attempt's process what a statement of its raised in the worker."""
    if error["sqlstate"]:
        fields = {"C": error["sqlstate"], "M": error["message"], "S": "ERROR", **error["fields"]}
        raise asyncpg.PostgresError.new(fields)
    if error["class"] == "TimeoutError":
        raise TimeoutError(error["message"])
    raise SubEnqueueError(f"{error['class']}: {error['message']}")


class Lender:
    """The worker's side: runs the statements of one attempt on ``pool``."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._stack = AsyncExitStack()
        self._held: Any = None

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what was asked and return the answer."""
        try:
            return {"value": await self._do(message)}
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, SubEnqueueError) as error:
            return {"error": describe(error)}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            return {"error": describe(SubEnqueueError(f"what was asked for cannot be done: {error}"))}

    async def close(self) -> None:
        """Take back what is still lent; a transaction that is open there is rolled back."""
        self._held = None
        await self._stack.aclose()

    async def _do(self, message: dict[str, Any]) -> Any:
        if message["op"] == "acquire":
            if self._held is not None:
                raise SubEnqueueError("one session is lent already")
            async with asyncio.timeout(LONGEST):
                self._held = await self._stack.enter_async_context(self._pool.acquire())
            return None
        if message["op"] == "release":
            return await self.close()
        target = self._held if message["held"] else self._pool
        if target is None:
            raise SubEnqueueError("no session is lent")
        timeout = min(message["timeout"] or LONGEST, LONGEST)
        if message["op"] == "copy":
            source = io.BytesIO(message["text"].encode())
            return await target.copy_to_table(message["table"], source=source, timeout=timeout, **message["options"])
        if message["method"] not in METHODS:
            raise SubEnqueueError(f"there is no {message['method']!r}")
        found = await getattr(target, message["method"])(message["query"], *message["args"], timeout=timeout)
        if message["method"] == "fetch":
            return [dict(record) for record in found]
        return dict(found) if isinstance(found, asyncpg.Record) else found


def describe(error: BaseException) -> dict[str, Any]:
    """Return an error in the form in which it travels; see :func:`raise_answer`."""
    fields = {
        letter: str(value)
        for letter, name in (("n", "constraint_name"), ("D", "detail"), ("H", "hint"), ("t", "table_name"))
        if (value := getattr(error, name, None))
    }
    return {
        "sqlstate": getattr(error, "sqlstate", None),
        "class": type(error).__name__,
        "message": str(error),
        "fields": fields,
    }
