"""What a server grants, what others have of it, and whether a fleet fits into the rest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from taskqd.supervisor.advice import advise
from taskqd.supervisor.fleet import Fleet


class Fit(StrEnum):
    """Whether a fleet fits its server."""

    FITS = "fits"
    NEVER = "never fits"
    """Not even on an otherwise empty server."""
    CROWDED = "crowded"
    """It would fit, but others hold too much."""
    UNKNOWN = "unknown"
    """The server's limits are not known."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another group of the schema: what it has declared that it may hold, and what it holds now."""

    name: str
    declared: int
    live: int

    @property
    def connections(self) -> int:
        """The larger of both: what it must be granted."""
        return max(self.declared, self.live)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server grants. ``others`` are sessions of no group of the schema; 0 when nobody looked."""

    max_connections: int
    superuser_reserved: int = 3
    reserved: int = 0
    others: int = 0
    limited_by: str | None = None
    """The role or database whose own limit these are, such as ``role app``; None: the server's."""
    groups: tuple[Neighbour, ...] = ()
    elsewhere: tuple[str, ...] = ()
    """Workers whose connections this limit does not count: it is a role's, and they log in as another."""

    @property
    def available(self) -> int:
        """Connections that ordinary roles may hold."""
        return max(self.max_connections - self.superuser_reserved - self.reserved, 0)

    def room(self, outside: int) -> int:
        """Return what is left for what counts of the group, with ``outside`` beside it. Below 0 when there is none."""
        return self.available - self.taken(outside)

    def taken(self, outside: int) -> int:
        """Return what others have, when ``outside`` is declared. Their sessions may be the declared ones: the larger
        counts."""
        return sum(group.connections for group in self.groups) + max(outside, self.others)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it fits, by how many connections not, and the cheapest changes that would make it fit."""

    fit: Fit
    over: int = 0
    missing: int = 0
    """Connections that it would take: more than ``over`` where others hold some too."""
    advice: tuple[str, ...] = ()
    peak_over: int = 0
    """Connections by which the peak does not fit."""


def judge_fleet(fleet: Fleet, limits: Limits | None) -> Verdict:
    """Say whether ``fleet`` fits."""
    if limits is None:
        return Verdict(Fit.UNKNOWN)
    fleet, room = fleet.without(limits.elsewhere), limits.room(fleet.outside)
    peak_over = max(fleet.own + fleet.rotation + fleet.surge - room, 0)
    alone, beside = fleet.required - limits.available, fleet.own - room
    if alone > 0:
        return Verdict(Fit.NEVER, alone, max(alone, beside), advise(fleet, max(alone, beside)), peak_over)
    if beside > 0:
        return Verdict(Fit.CROWDED, beside, beside, advise(fleet, beside), peak_over)
    return Verdict(Fit.FITS, peak_over=peak_over)


def tightest(fleet: Fleet, limits: Sequence[Limits]) -> Limits | None:
    """Return the limit that decides: of the server, of the role or of the database."""

    def severity(each: Limits) -> tuple[bool, bool, int]:
        found = judge_fleet(fleet, each)
        return found.fit is Fit.NEVER, found.fit is Fit.CROWDED, found.over or -each.room(fleet.outside)

    return max(limits, key=severity, default=None)


def grant(limits: Limits | None, outside: int, wanted: int, extra: int, *, elsewhere: int = 0) -> int:
    """Return what a group declares that holds ``wanted`` whatever there is, and up to ``extra`` where there is room.

    ``elsewhere``: how many of ``wanted`` the limit does not count.
    """
    if limits is None:
        return wanted + extra
    return wanted + max(min(extra, limits.room(outside) - (wanted - elsewhere)), 0)
