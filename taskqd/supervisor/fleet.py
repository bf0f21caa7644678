"""The connection budget of a workgroup: what it may hold at once, whether that fits, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from taskqd.domain.budget import CLIENT_POOL_SIZE, LEADER_EXTRA, ConnectionBudget, compute_connection_budget

SCHEDULER_CONNECTIONS = 3
"""What the scheduler child holds at most."""

PREFLIGHT_CONNECTIONS = 1
"""What the check before a start holds."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one ``[[workers]]`` table."""

    name: str
    replicas: int
    max_concurrency: int
    dispatcher_pool_size: int = 4
    heartbeat_pool_size: int = 4
    per_slot: bool = False

    @property
    def budget(self) -> ConnectionBudget:
        """What they hold together, without the leader's extras."""
        return compute_connection_budget(
            workers=self.replicas,
            max_concurrency=self.max_concurrency,
            dispatcher_pool_size=self.dispatcher_pool_size,
            heartbeat_pool_size=self.heartbeat_pool_size,
            per_slot=self.per_slot,
            leader=False,
        )

    @property
    def slots(self) -> int:
        """Jobs that they run at once."""
        return self.replicas * self.max_concurrency


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that a workgroup connects. ``pooler``: pooled connections end at one and not at the server."""

    crews: tuple[Crew, ...]
    scheduler: bool = True
    web_pods: int = 0
    app_connections: int = 0
    pooler: bool = False

    @property
    def direct(self) -> int:
        """Connections that no transaction pooler can serve."""
        return sum(crew.budget.direct for crew in self.crews) + (LEADER_EXTRA if self.crews else 0)

    @property
    def pooled(self) -> int:
        """Connections that one could."""
        return sum(crew.budget.pooled for crew in self.crews)

    @property
    def outside(self) -> int:
        """Connections that are declared but not this group's: clients and the application's own pools."""
        return self.web_pods * CLIENT_POOL_SIZE + self.app_connections

    @property
    def total(self) -> ConnectionBudget:
        """The steady state of workers, clients and application, in the terms of ``compute_connection_budget``."""
        return ConnectionBudget(self.direct, self.pooled, self.direct + self.pooled + self.outside)

    @property
    def upkeep(self) -> int:
        """Connections of the scheduler and of the check before a start."""
        return (SCHEDULER_CONNECTIONS if self.scheduler else 0) + PREFLIGHT_CONNECTIONS

    @property
    def own(self) -> int:
        """What the group itself may hold on the server."""
        return self.direct + (0 if self.pooler else self.pooled) + self.upkeep

    @property
    def required(self) -> int:
        """What the server must grant for everything that is declared."""
        return self.own + self.outside


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
class Limits:
    """What the server grants. ``others`` are sessions that do not belong to the group; 0 when nobody looked."""

    max_connections: int
    superuser_reserved: int = 3
    reserved: int = 0
    others: int = 0
    limited_by: str | None = None
    """The role or database whose own limit these are, such as ``role app``; None: the server's."""

    @property
    def available(self) -> int:
        """Connections that ordinary roles may hold."""
        return max(self.max_connections - self.superuser_reserved - self.reserved, 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it fits, by how many connections not, and the cheapest changes that would make it fit."""

    fit: Fit
    over: int = 0
    advice: tuple[str, ...] = ()


def judge_fleet(fleet: Fleet, limits: Limits | None) -> Verdict:
    """Say whether ``fleet`` fits. Sessions that others hold now may be the declared ones: the larger counts."""
    if limits is None:
        return Verdict(Fit.UNKNOWN)
    over = fleet.required - limits.available
    if over > 0:
        return Verdict(Fit.NEVER, over, advise(fleet, over))
    over = fleet.own + max(fleet.outside, limits.others) - limits.available
    if over > 0:
        return Verdict(Fit.CROWDED, over, advise(fleet, over))
    return Verdict(Fit.FITS)


def advise(fleet: Fleet, over: int) -> tuple[str, ...]:
    """Return up to two changes, the one that costs the fewest job slots first, each freeing at least ``over``."""
    options = [
        option
        for crew in fleet.crews
        for option in (_fewer_slots(fleet, crew, over), _fewer_replicas(fleet, crew, over))
        if option is not None
    ]
    if options:
        return tuple(text for _, text in sorted(options)[:2])
    together = _scaled(fleet, over)
    return (together,) if together else ()


def _fewer_slots(fleet: Fleet, crew: Crew, over: int) -> tuple[int, str] | None:
    smaller = _largest_that_frees(
        fleet, crew, over, crew.max_concurrency, lambda value: replace(crew, max_concurrency=value)
    )
    return None if smaller is None else _option(fleet, crew, smaller, "max_concurrency")


def _fewer_replicas(fleet: Fleet, crew: Crew, over: int) -> tuple[int, str] | None:
    smaller = _largest_that_frees(fleet, crew, over, crew.replicas, lambda value: replace(crew, replicas=value))
    return None if smaller is None else _option(fleet, crew, smaller, "replicas")


def _largest_that_frees(fleet: Fleet, crew: Crew, over: int, now: int, changed: Callable[[int], Crew]) -> Crew | None:
    """Return the crew with the largest value below ``now`` that frees ``over``, or None when 1 does not."""
    low, high = 1, now - 1
    if high < low or _freed(fleet, crew, changed(low)) < over:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if _freed(fleet, crew, changed(middle)) >= over:
            low = middle
        else:
            high = middle - 1
    return changed(low)


def _option(fleet: Fleet, crew: Crew, smaller: Crew, knob: str) -> tuple[int, str]:
    before, after = getattr(crew, knob), getattr(smaller, knob)
    text = f"{crew.name}.{knob} {before}→{after} frees {_freed(fleet, crew, smaller)}"
    return crew.slots - smaller.slots, text


def _freed(fleet: Fleet, crew: Crew, smaller: Crew) -> int:
    before, after = crew.budget, smaller.budget
    return before.direct - after.direct + (0 if fleet.pooler else before.pooled - after.pooled)


def _scaled(fleet: Fleet, over: int) -> str | None:
    """Return a change of every crew's concurrency by one factor, when no single crew can free enough."""
    largest = max((crew.max_concurrency for crew in fleet.crews), default=0)
    for ceiling in range(largest - 1, 0, -1):
        capped = [replace(crew, max_concurrency=min(crew.max_concurrency, ceiling)) for crew in fleet.crews]
        freed = sum(_freed(fleet, crew, small) for crew, small in zip(fleet.crews, capped, strict=True))
        if freed >= over:
            parts = [
                f"{crew.name}.max_concurrency {crew.max_concurrency}→{small.max_concurrency}"
                for crew, small in zip(fleet.crews, capped, strict=True)
                if small != crew
            ]
            return f"{', '.join(parts)} together free {freed}"
    return None


def explain_misfit(fleet: Fleet, limits: Limits, verdict: Verdict) -> str:
    """Return the one message of a group that does not fit."""
    held = limits.max_connections - limits.available
    server = f"{limits.available} of the server's {limits.max_connections} connections ({held} are reserved)"
    raised = "max_connections at least {} on the server"
    if limits.limited_by is not None:
        server = f"{limits.available}, the connection limit of {limits.limited_by}"
        raised = f"a connection limit of at least {{}} for {limits.limited_by}"
    if verdict.fit is Fit.NEVER:
        text = f"the workgroup needs {fleet.required} connections and can have {server}: {verdict.over} too many"
    else:
        others = max(fleet.outside, limits.others)
        text = (
            f"the workgroup needs {fleet.own} connections beside the {others} of others and can have {server}: "
            f"{verdict.over} too many"
        )
    needed = limits.max_connections + verdict.over
    remedies = [*verdict.advice, raised.format(needed)]
    return f"{text}; what would fit: {'; or '.join(remedies)}"


def describe_fleet(fleet: Fleet, limits: Limits | None, verdict: Verdict) -> dict[str, Any]:
    """Return the whole budget as JSON values, for ``taskqd budget --json`` and the group's status."""
    total = fleet.total
    return {
        "direct": total.direct,
        "pooled": total.pooled,
        "total": total.total,
        "pgbouncer_recommended": total.pgbouncer_recommended,
        "workers": [_row(crew) for crew in fleet.crews],
        "leader": LEADER_EXTRA if fleet.crews else 0,
        "web_pods": fleet.web_pods,
        "web_connections": fleet.web_pods * CLIENT_POOL_SIZE,
        "app_connections": fleet.app_connections,
        "scheduler": SCHEDULER_CONNECTIONS if fleet.scheduler else 0,
        "preflight": PREFLIGHT_CONNECTIONS,
        "pooler": fleet.pooler,
        "required": fleet.required,
        "limits": None
        if limits is None
        else {
            "limited_by": limits.limited_by,
            "max_connections": limits.max_connections,
            "superuser_reserved": limits.superuser_reserved,
            "reserved": limits.reserved,
            "others": limits.others,
        },
        "available": None if limits is None else limits.available,
        "verdict": str(verdict.fit),
        "over": verdict.over,
        "advice": list(verdict.advice),
    }


def _row(crew: Crew) -> dict[str, Any]:
    return {
        "name": crew.name,
        "replicas": crew.replicas,
        "max_concurrency": crew.max_concurrency,
        "direct": crew.budget.direct,
        "pooled": crew.budget.pooled,
        "total": crew.budget.total,
    }
