"""The roles that workers log in as, where that is not the group's: each must be let in and have room for its workers.

Runs in the preflight child only: it loads the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from taskqd.domain.errors import BudgetExceededError, DatabaseAuthError, DatabaseUnavailableError
from taskqd.domain.exit_codes import ExitCode
from taskqd.settings import Settings
from taskqd.storage.boot import admit
from taskqd.storage.credentials import Source
from taskqd.storage.limits import ConnectionLimits, read_connection_limits
from taskqd.storage.release import release_workers
from taskqd.supervisor.fleet import Fleet
from taskqd.supervisor.reserve import (
    DATABASE_MARGIN,
    LOOK_TIMEOUT,
    Link,
    asker_of,
    asking,
    connect_for_run,
    connect_in_time,
)

_NOT_LET_IN = (DatabaseUnavailableError, DatabaseAuthError)


@dataclass(frozen=True, slots=True)
class OwnLogin:
    """Workers that log in alike, and not as the group does. ``settings`` are those of one of them."""

    workers: tuple[str, ...]
    settings: Settings

    def part_of(self, fleet: Fleet) -> Fleet:
        """Return what of ``fleet`` logs in so."""
        crews = tuple(crew for crew in fleet.crews if crew.name in self.workers)
        return replace(fleet, crews=crews, scheduler=False, web_pods=0, app_connections=0, supervisors=1)


def own_logins(group: Settings, workers: Mapping[str, Settings]) -> list[OwnLogin]:
    """Return how those of ``workers`` log in that do it otherwise than ``group``, each way once."""
    found: dict[object, OwnLogin] = {}
    for name, settings in workers.items():
        way = _way(settings)
        if way != _way(group):
            before = found[way].workers if way in found else ()
            found[way] = OwnLogin((*before, name), settings)
    return list(found.values())


async def check_login(own: OwnLogin, group: str, fleet: Fleet, *, boots: bool, enforce: bool, link: Link) -> None:
    """Log in as these workers will, and compare what they may hold with the connection limit of their role.

    Where the group ``boots``, a database that does not let them in is tried again as the workers would, and the error
    raised; else it is a warning: a running worker keeps its sessions. Raises ``BudgetExceededError`` where the limit is
    too low, unless that is not to be ``enforce``d.
    """
    names = ", ".join(own.workers)
    link.step(f"logging in as {names} will", LOOK_TIMEOUT + DATABASE_MARGIN)
    try:
        if boots:
            conn = await connect_for_run(own.settings, group, link)
        else:
            conn = await connect_in_time(own.settings, group, "preflight")
        async with asking(conn, own.settings):
            await admit(conn, own.settings)
            limits = await read_connection_limits(conn, asker_of(own.settings, group))
    except _NOT_LET_IN as error:
        text = f"as {names} would: {error}"
        if boots:
            raise type(error)(text) from None
        link.warn(text)
        return
    needed = own.part_of(fleet).own
    for each in limits:
        if each.ceiling.of == "role":
            _compare(names, needed, each, enforce=enforce, link=link)


async def release_as_anybody(logins: Sequence[Settings], group: str, workers: Sequence[UUID], link: Link) -> int:
    """Settle what dead ``workers`` held and return the rows taken, logged in as the first of ``logins`` that is let in.

    Raises what the first one met where none is.
    """
    fault: Exception | None = None
    for settings in logins:
        link.step("settling the jobs of dead workers", LOOK_TIMEOUT + DATABASE_MARGIN)
        try:
            conn = await connect_in_time(settings, group, "preflight")
            async with asking(conn, settings):
                return await release_workers(conn, settings.schema_name, workers, timeout=LOOK_TIMEOUT)
        except _NOT_LET_IN as error:
            fault = fault or error
    assert fault is not None  # noqa: S101 - there is one login at least
    raise fault


def _compare(names: str, needed: int, limits: ConnectionLimits, *, enforce: bool, link: Link) -> None:
    ceiling = limits.ceiling
    taken = limits.others + sum(max(share.declared, share.live) for share in limits.groups)
    if needed + taken <= ceiling.max_connections:
        return
    text = f"{names}: up to {needed} connections as {ceiling.limited_by}, which may have {ceiling.max_connections}"
    if taken:
        text += f", of which others hold {taken}"
    if not enforce:
        link.warn(text)
        return
    never = needed > ceiling.max_connections
    raise BudgetExceededError(text, ExitCode.REFUSED if never else ExitCode.TRY_AGAIN)


def _way(settings: Settings) -> tuple[str, Source | None]:
    """Return what decides as whom a process logs in."""
    return settings.direct_dsn(), Source.of(settings)
