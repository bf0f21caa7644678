"""The connection budget of a workgroup in words and as JSON values. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from taskqd.domain.budget import CLIENT_POOL_SIZE
from taskqd.supervisor.fleet import PREFLIGHT_CONNECTIONS, SCHEDULER_CONNECTIONS, SCHEDULER_IDLE, Crew, Fleet
from taskqd.supervisor.room import Fit, Limits, Verdict

if TYPE_CHECKING:
    from taskqd.storage.pooler import PoolerLimits


def explain_misfit(fleet: Fleet, limits: Limits, verdict: Verdict) -> str:
    """Return the one message of a group that does not fit."""
    fleet = fleet.without(limits.elsewhere)
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
        groups = "".join(f", {group.connections} of group {group.name!r}" for group in limits.groups)
        text = (
            f"the workgroup needs {fleet.own} connections beside the {others} of others{groups} and can have {server}: "
            f"{verdict.over} too many"
        )
    needed = limits.max_connections + verdict.missing
    remedies = [*verdict.advice, raised.format(needed)]
    return f"{text}; what would fit: {'; or '.join(remedies)}"


def explain_peak(fleet: Fleet, limits: Limits, verdict: Verdict) -> str:
    """Return the warning of a group that fits while nothing changes."""
    fleet = fleet.without(limits.elsewhere)
    room = limits.room(fleet.outside)
    return (
        f"the workgroup fits, but its peak of {fleet.own + fleet.rotation + fleet.surge} connections does not: "
        f"{room} are free, {verdict.peak_over} too few. A replaced process may have to end before its successor "
        "starts, and a new credential may find no connection free"
    )


def describe_fleet(fleet: Fleet, limits: Limits | None, verdict: Verdict) -> dict[str, Any]:
    """Return the whole budget as JSON values, for ``taskqd budget --json`` and the group's status."""
    total = fleet.total
    return {
        "supervisors": fleet.supervisors,
        "direct": total.direct,
        "pooled": total.pooled,
        "total": total.total,
        "pgbouncer_recommended": total.pgbouncer_recommended,
        "workers": [_row(crew, fleet.supervisors) for crew in fleet.crews],
        "leader": fleet.leader,
        "leader_idle": fleet.leader_idle,
        "web_pods": fleet.web_pods,
        "web_connections": fleet.web_pods * CLIENT_POOL_SIZE,
        "app_connections": fleet.app_connections,
        "scheduler": SCHEDULER_CONNECTIONS * fleet.supervisors if fleet.scheduler else 0,
        "scheduler_idle": SCHEDULER_IDLE * fleet.supervisors if fleet.scheduler else 0,
        "preflight": PREFLIGHT_CONNECTIONS * fleet.supervisors,
        "pooler": fleet.pooler,
        "pooler_sessions": fleet.pooler_sessions,
        "required": fleet.required,
        "idle": fleet.idle,
        "rotation": fleet.rotation,
        "unasked": fleet.unasked,
        "surge": fleet.surge,
        "peak": fleet.peak,
        **describe_limits(limits, fleet.outside, elsewhere=held_elsewhere(fleet, limits)),
        "verdict": str(verdict.fit),
        "over": verdict.over,
        "peak_over": verdict.peak_over,
        "advice": list(verdict.advice),
    }


def held_elsewhere(fleet: Fleet, limits: Limits | None) -> int:
    """Return how many of the connections of ``fleet`` the limit does not count."""
    return 0 if limits is None else fleet.own - fleet.without(limits.elsewhere).own


def describe_limits(limits: Limits | None, outside: int, *, elsewhere: int) -> dict[str, Any]:
    """Return what the server grants as JSON values: ``limits``, ``available``, and ``taken`` by others of that.

    ``elsewhere``: how many of the group's own connections the limit does not count.
    """
    if limits is None:
        return {"limits": None, "available": None, "taken": None, "elsewhere": 0}
    return {
        "limits": {
            "limited_by": limits.limited_by,
            "max_connections": limits.max_connections,
            "superuser_reserved": limits.superuser_reserved,
            "reserved": limits.reserved,
            "others": limits.others,
            "groups": [{"name": group.name, "declared": group.declared, "live": group.live} for group in limits.groups],
        },
        "available": limits.available,
        "taken": limits.taken(outside),
        "elsewhere": elsewhere,
    }


def describe_pooler(fleet: Fleet, said: PoolerLimits | str | None) -> dict[str, Any]:
    """Return what is known of the pooler as JSON values. ``pooler_peak``: the clients that it must take."""
    if not fleet.pooler:
        return {"pooler_limits": None}
    if said is None or isinstance(said, str):
        return {"pooler_limits": None, "pooler_peak": fleet.pooled_peak, "pooler_unknown": said or "it was not asked"}
    limits = {"max_client_conn": said.max_client_conn, "pool_size": said.pool_size}
    return {"pooler_limits": limits, "pooler_peak": fleet.pooled_peak}


def _row(crew: Crew, supervisors: int) -> dict[str, Any]:
    return {
        "name": crew.name,
        "replicas": crew.replicas,
        "max_concurrency": crew.max_concurrency,
        "direct": crew.budget.direct * supervisors,
        "pooled": crew.budget.pooled * supervisors,
        "total": crew.budget.total * supervisors,
        "sessions": [
            {"role": part.role, "pooled": part.pooled, "each": part.most, "idle": part.idle} for part in crew.sessions
        ],
    }
