"""The connection arithmetic of a fleet: pure numbers, no server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from taskqd.domain.arguments import check_flag, check_whole

Maintenance = Literal["auto", "off", "on"]
"""Whether a worker maintains the schema: while it is elected, never, always."""

LEADER_EXTRA = 2
"""What the elected worker has to maintain the schema beyond its own connection for that; there is one per fleet."""

LISTENING = 1
"""Each worker's LISTEN connection, which cannot be pooled."""

HOSTING: dict[Maintenance, int] = {"off": 0, "auto": 1, "on": 2}
"""Each worker's own connections to maintain the schema; they cannot be pooled either."""

PGBOUNCER_THRESHOLD = 80
"""Above this many connections a pooler is recommended: conservative below Postgres' default of 100."""

MOST = 1_000_000
"""The highest count of anything that a budget is made of."""

CLIENT_POOL_SIZE = 5
"""Connections of one ``TaskQ`` client."""


@dataclass(frozen=True, slots=True)
class ConnectionBudget:
    """Connections a fleet may hold at once. ``direct`` cannot go through a transaction pooler, ``pooled`` may."""

    direct: int
    pooled: int
    total: int

    @property
    def pgbouncer_recommended(self) -> bool:
        """True above 80 connections in total."""
        return self.total > PGBOUNCER_THRESHOLD


@dataclass(frozen=True, slots=True)
class Sessions:
    """What one worker holds under one role, which ends the application names of these sessions."""

    role: str
    pooled: bool
    """True when they may go through a transaction pooler."""
    most: int
    """What is counted."""
    idle: int
    """What is held soon after the start, without work."""


def worker_sessions(
    *,
    max_concurrency: int,
    dispatcher_pool_size: int,
    heartbeat_pool_size: int,
    per_slot: bool = False,
    listens: bool = True,
    maintenance: Maintenance = "auto",
) -> tuple[Sessions, ...]:
    """Return what one worker holds, role by role; the sum is that of :func:`compute_connection_budget`.

    ``listens`` is false for a worker that only polls; its connection stays counted.
    """
    slot, hosting = slot_pool_size(max_concurrency, per_slot), HOSTING[maintenance]
    return (
        Sessions("dispatch", False, dispatcher_pool_size, 1),
        Sessions("heartbeat", False, heartbeat_pool_size, 1),
        Sessions("notify", False, 1, int(listens)),
        *([Sessions("maintain", False, hosting, hosting if maintenance == "on" else 0)] if hosting else []),
        *([Sessions("slot", False, slot, slot)] if slot else []),
        Sessions("worker", True, worker_pool_size(max_concurrency), 1),
    )


def worker_pool_size(max_concurrency: int) -> int:
    """Connections of a worker's pooled pool: one and a half per slot, rounded down."""
    return max_concurrency * 3 // 2


def slot_pool_size(max_concurrency: int, per_slot: bool) -> int:
    """Connections of the per-slot transaction pool: one per slot and one for the readiness probe."""
    return max_concurrency + 1 if per_slot else 0


def compute_connection_budget(
    *,
    workers: int = 1,
    max_concurrency: int = 8,
    dispatcher_pool_size: int = 4,
    heartbeat_pool_size: int = 4,
    per_slot: bool = False,
    web_pods: int = 0,
    supervisor: int = 0,
    app_connections: int = 0,
    leader: bool = True,
    maintenance: Maintenance = "auto",
) -> ConnectionBudget:
    """Return the most connections that ``workers`` equal workers and their surroundings hold.

    ``leader=False`` leaves out the elected leader's two extra connections, for adding several groups up. Only workers
    with ``maintenance="auto"`` elect one.
    ``per_slot`` is transactional consume with more than one slot. ``supervisor`` and ``app_connections`` are added
    to the total as they are. Raises ``ValueError`` for what is no count, or below its minimum.
    """
    for name, value, low in (
        ("workers", workers, 0),
        ("max_concurrency", max_concurrency, 1),
        ("dispatcher_pool_size", dispatcher_pool_size, 1),
        ("heartbeat_pool_size", heartbeat_pool_size, 1),
        ("web_pods", web_pods, 0),
        ("supervisor", supervisor, 0),
        ("app_connections", app_connections, 0),
    ):
        check_whole(name, value, low, MOST)
    check_flag("per_slot", per_slot)
    check_flag("leader", leader)
    if maintenance not in tuple(HOSTING):
        raise ValueError(f"maintenance = {maintenance!r} must be one of {', '.join(HOSTING)}")
    own = LISTENING + HOSTING[maintenance] + slot_pool_size(max_concurrency, per_slot)
    steady = dispatcher_pool_size + heartbeat_pool_size + own
    direct = workers * steady + (LEADER_EXTRA if leader and workers and maintenance == "auto" else 0)
    pooled = workers * worker_pool_size(max_concurrency)
    return ConnectionBudget(
        direct=direct,
        pooled=pooled,
        total=direct + pooled + web_pods * CLIENT_POOL_SIZE + supervisor + app_connections,
    )
