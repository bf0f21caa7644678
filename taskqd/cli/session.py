"""The one database session of a command."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import click

from taskqd.storage.connect import SESSION_LOST, close, connect_with_retry, explain
from taskqd.storage.credentials import login_of

if TYPE_CHECKING:
    import asyncpg

    from taskqd.settings import Settings


@asynccontextmanager
async def session(settings: Settings, role: str, *, writable: bool = True) -> AsyncIterator[asyncpg.Connection]:
    """Yield a session named ``role``; a database that is away is waited for, and told of once.

    A session that is lost is one clear message, as our own errors are.
    """
    dsn = settings.direct_dsn()
    conn = await connect_with_retry(
        dsn,
        role=role,
        schema=settings.schema_name,
        boot_timeout=settings.database_boot_timeout,
        on_retry=_report_first(),
        login=login_of(settings),
        writable=writable,
    )
    try:
        yield conn
    except SESSION_LOST as error:
        raise explain(error, dsn) from None
    finally:
        await close(conn)


def _report_first() -> Callable[[str, float], None]:
    told: list[str] = []

    def report(why: str, pause: float) -> None:
        if not told:
            click.echo(f"waiting: {why}", err=True)
            told.append(why)

    return report
