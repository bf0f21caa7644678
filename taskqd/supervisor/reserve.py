"""What the preflight child asks of the database: whether a group fits beside the others, and its declaration.

Runs in the preflight child only: it loads the driver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import asyncpg

from taskqd.domain.errors import BudgetExceededError, DatabaseUnavailableError
from taskqd.domain.exit_codes import ExitCode
from taskqd.settings import Settings
from taskqd.storage.boot import admit
from taskqd.storage.connect import CONNECT_ERRORS, close, connect, connect_with_retry, explain
from taskqd.storage.credentials import login_of
from taskqd.storage.groups import declare, own_place
from taskqd.storage.limits import Asker, ConnectionLimits, read_connection_limits
from taskqd.storage.pooler import PoolerLimits, ask_pooler
from taskqd.supervisor.budget import held_elsewhere
from taskqd.supervisor.fleet import Fleet
from taskqd.supervisor.room import Fit, Limits, Neighbour, grant, judge_fleet, tightest

DATABASE_MARGIN = 30.0
LOOK_TIMEOUT = 5.0
_QUERY_TIMEOUT = 15.0
_POOLER_TIMEOUT = 3.0
_PATIENCE = 2.0
"""Seconds in which sessions that hold what is missing may still end: those of a predecessor do."""
_LOOK_AGAIN = 0.25


class Link(Protocol):
    """Who is told how far the check has come."""

    def step(self, text: str, within: float, silence: int = 70) -> None:
        """What comes next, the seconds that it may take, and the exit code if nothing is heard any more."""

    def warn(self, text: str) -> None:
        """A warning."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was seen: the fleet with what its pooler has said, the limit that decides, and about the pooler."""

    fleet: Fleet
    limits: Limits | None
    pooler: PoolerLimits | str | None = None
    """What it allows, or why that is not known; None where there is no pooler."""


async def reserve(
    settings: Settings,
    group: str,
    fleet: Fleet,
    *,
    elsewhere: Sequence[str],
    enforce: bool,
    held: tuple[int, int],
    link: Link,
) -> Found:
    """Wait for the database, check its schema, and declare what the group needs, if it fits or does not have to.

    ``elsewhere``: the workers that do not log in as the group does. ``held``: what a group that runs holds already, and
    the largest of its processes. It declares as much as new credentials and a roll may need, as far as there is room.
    """
    pooler = await _ask_pooler(settings, fleet, link)
    fleet = _behind(fleet, pooler)
    conn = await connect_for_run(settings, group, link)
    deadline = time.monotonic() + _PATIENCE
    limits: Limits | None = None

    def decide(found: Sequence[ConnectionLimits]) -> int | None:
        nonlocal limits
        limits = tightest(fleet, _limits(found, elsewhere))
        if enforce and judge_fleet(fleet, limits).fit is not Fit.FITS:
            return None
        now, largest = held
        extra = max(fleet.rotation, largest) + fleet.surge if now else fleet.unasked
        wanted, uncounted = max(fleet.own, now), held_elsewhere(fleet, limits)
        return grant(limits if enforce else None, fleet.outside, wanted, extra, elsewhere=uncounted)

    async with asking(conn, settings):
        await admit(conn, settings)
        while True:
            await declare(conn, asker_of(settings, group), decide)
            crowded = enforce and judge_fleet(fleet, limits).fit is Fit.CROWDED
            if not crowded or time.monotonic() >= deadline:
                return Found(fleet, limits, pooler)
            await asyncio.sleep(_LOOK_AGAIN)


async def reserve_more(
    settings: Settings, group: str, wanted: int, extra: int, *, elsewhere: int, outside: int, enforce: bool, link: Link
) -> tuple[Limits, int]:
    """Declare ``wanted``, which the group holds, and up to ``extra`` connections more, as far as there is room.

    ``elsewhere``: how many of these the limit of the group's role does not count. Returns what the room was taken from,
    and how many of them that does not count. Raises ``DatabaseUnavailableError`` when the database cannot be asked.
    """
    link.step("declaring connections", LOOK_TIMEOUT + DATABASE_MARGIN)
    conn = await connect_in_time(settings, group, "preflight")
    tight: list[tuple[int, Limits]] = []

    def decide(found: Sequence[ConnectionLimits]) -> int:
        uncounted = [elsewhere if each.ceiling.of == "role" else 0 for each in found]
        pairs = zip(uncounted, _limits(found), strict=True)
        tight.append(min(pairs, key=lambda pair: pair[0] + pair[1].room(outside)))
        count, limits = tight[0]
        return grant(limits if enforce else None, outside, wanted, extra, elsewhere=count)

    async with asking(conn, settings):
        await declare(conn, asker_of(settings, group), decide)
    count, limits = tight[0]
    return limits, count


async def look(settings: Settings, group: str, fleet: Fleet, link: Link, *, elsewhere: Sequence[str]) -> Found:
    """Look at what the database grants and declare nothing. Without limits, and a warning, where it cannot be reached.

    The own sessions and rows are those of any place: it is ``fleet.supervisors`` supervisors that are looked at.
    """
    pooler = await _ask_pooler(settings, fleet, link)
    fleet = _behind(fleet, pooler)
    link.step("asking the database for its limits", LOOK_TIMEOUT + DATABASE_MARGIN)
    try:
        # Not in the group's name: a person who looks is none of its processes.
        conn = await connect_in_time(settings, "", "budget")
    except DatabaseUnavailableError as error:
        link.warn(f"not compared with the server: {error}")
        return Found(fleet, None, pooler)
    async with asking(conn, settings):
        found = await read_connection_limits(conn, replace(asker_of(settings, group), place=None))
    return Found(fleet, tightest(fleet, _limits(found, elsewhere)), pooler)


@asynccontextmanager
async def asking(conn: asyncpg.Connection, settings: Settings) -> AsyncIterator[None]:
    """Close ``conn`` in the end. Errors of the database become ours: it may be away, or refuse us its tables."""
    try:
        yield
    except CONNECT_ERRORS as error:
        raise explain(error, settings.direct_dsn()) from None
    finally:
        await close(conn, LOOK_TIMEOUT)


def asker_of(settings: Settings, group: str) -> Asker:
    """Return who asks: the group that is run here."""
    return Asker(settings.schema_name, group, own_place())


def _limits(found: Sequence[ConnectionLimits], elsewhere: Sequence[str] = ()) -> list[Limits]:
    return [
        Limits(
            max_connections=each.ceiling.max_connections,
            superuser_reserved=each.ceiling.superuser_reserved,
            reserved=each.ceiling.reserved,
            others=each.others,
            limited_by=each.ceiling.limited_by,
            groups=tuple(Neighbour(share.name, share.declared, share.live) for share in each.groups),
            elsewhere=tuple(elsewhere) if each.ceiling.of == "role" else (),
        )
        for each in found
    ]


def _behind(fleet: Fleet, pooler: PoolerLimits | str | None) -> Fleet:
    return replace(fleet, pooler_sessions=pooler.pool_size) if isinstance(pooler, PoolerLimits) else fleet


async def _ask_pooler(settings: Settings, fleet: Fleet, link: Link) -> PoolerLimits | str | None:
    if not fleet.pooler:
        return None
    link.step("asking the pooler for its limits", _POOLER_TIMEOUT + DATABASE_MARGIN)
    return await ask_pooler(settings.pooled_dsn(), login=login_of(settings), timeout=_POOLER_TIMEOUT)


async def connect_in_time(settings: Settings, group: str, role: str) -> asyncpg.Connection:
    """Connect at once or not at all. Raises as ``connect`` does."""
    return await connect(
        settings.direct_dsn(),
        login=login_of(settings),
        role=role,
        schema=settings.schema_name,
        group=group,
        timeout=LOOK_TIMEOUT,
        command_timeout=_QUERY_TIMEOUT,
    )


async def connect_for_run(settings: Settings, group: str, link: Link) -> asyncpg.Connection:
    """Connect, and try a database that does not let us in again for as long as a process does at its boot."""
    timeout = settings.database_boot_timeout
    link.step("connecting to the database", timeout + DATABASE_MARGIN)
    try:
        return await connect_with_retry(
            settings.direct_dsn(),
            login=login_of(settings),
            role="preflight",
            schema=settings.schema_name,
            group=group,
            boot_timeout=timeout,
            command_timeout=_QUERY_TIMEOUT,
            on_retry=_teller(timeout, link),
        )
    except DatabaseUnavailableError as error:
        _raise_if_full(error)
        raise


def _teller(timeout: float, link: Link) -> Callable[[str, float], None]:
    told: list[str] = []

    def tell(why: str, _pause: float) -> None:
        if why not in told[-1:]:
            told.append(why)
            link.warn(f"waiting up to {timeout:g} s: {why}")

    return tell


def _raise_if_full(error: BaseException) -> None:
    """Raise the error of a crowded server when that is what kept us from connecting."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, asyncpg.TooManyConnectionsError):
            raise BudgetExceededError(f"every connection of the server is taken: {error}", ExitCode.TRY_AGAIN) from None
        cause = cause.__context__
