"""The connections of a workgroup: what it may hold at rest, while credentials rotate and while processes roll. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from taskqd.domain.budget import (
    CLIENT_POOL_SIZE,
    HOSTING,
    LEADER_EXTRA,
    ConnectionBudget,
    Maintenance,
    Sessions,
    compute_connection_budget,
    worker_pool_size,
    worker_sessions,
)

SCHEDULER_CONNECTIONS = 3
"""What the scheduler child holds at most."""

SCHEDULER_IDLE = 2
"""What it holds all the time: the pool that it works through, which is also what a rotation opens anew."""

PREFLIGHT_CONNECTIONS = 1
"""What the check before a start or a change holds, for a moment."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one ``[[workers]]`` table."""

    name: str
    replicas: int
    max_concurrency: int
    dispatcher_pool_size: int = 4
    heartbeat_pool_size: int = 4
    per_slot: bool = False
    listens: bool = True
    maintenance: Maintenance = "auto"

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
            maintenance=self.maintenance,
        )

    @property
    def sessions(self) -> tuple[Sessions, ...]:
        """What one of them holds, role by role."""
        return worker_sessions(
            max_concurrency=self.max_concurrency,
            dispatcher_pool_size=self.dispatcher_pool_size,
            heartbeat_pool_size=self.heartbeat_pool_size,
            per_slot=self.per_slot,
            listens=self.listens,
            maintenance=self.maintenance,
        )

    def each(self, *, pooler: bool) -> int:
        """Return what one of them holds on the server; ``pooler``: its pooled connections end elsewhere."""
        one = replace(self, replicas=1).budget
        return one.direct + (0 if pooler else one.pooled)

    @property
    def slots(self) -> int:
        """Jobs that they run at once."""
        return self.replicas * self.max_concurrency


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything that ``supervisors`` workgroups of one file connect."""

    crews: tuple[Crew, ...]
    scheduler: bool = True
    web_pods: int = 0
    app_connections: int = 0
    pooler: bool = False
    """Pooled connections end at a pooler and not at the server."""
    pooler_sessions: int = 0
    """What that pooler may open at the server for them, where it has said so."""
    supervisors: int = 1
    renews_itself: bool = False
    """Some process looks for a new credential by itself, so that a rotation may begin at any time."""

    @property
    def leader(self) -> int:
        """What the elected leader adds to its own, where workers elect one. It is one, however many supervisors."""
        return LEADER_EXTRA if any(crew.maintenance == "auto" for crew in self.crews) else 0

    @property
    def leader_idle(self) -> int:
        """What it holds while nobody else maintains the schema."""
        attended = self.scheduler or any(crew.maintenance == "on" for crew in self.crews)
        return 0 if attended or not self.leader else HOSTING["on"]

    @property
    def is_attended(self) -> bool:
        """True when some process of it maintains the schema, or would."""
        return self.scheduler or any(crew.maintenance != "off" for crew in self.crews)

    @property
    def direct(self) -> int:
        """Connections that no transaction pooler can serve."""
        return self.supervisors * sum(crew.budget.direct for crew in self.crews) + self.leader

    @property
    def pooled(self) -> int:
        """Connections that one could."""
        return self.supervisors * sum(crew.budget.pooled for crew in self.crews)

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
        """Connections of the schedulers and of the checks before a start."""
        return self.supervisors * ((SCHEDULER_CONNECTIONS if self.scheduler else 0) + PREFLIGHT_CONNECTIONS)

    @property
    def own(self) -> int:
        """What the group itself may hold on the server while nothing changes."""
        return self.direct + (min(self.pooler_sessions, self.pooled) if self.pooler else self.pooled) + self.upkeep

    @property
    def required(self) -> int:
        """What the server must grant for everything that is declared."""
        return self.own + self.outside

    @property
    def rotation(self) -> int:
        """What a new credential adds: every pool of a process for a second time, one process of a group at a time."""
        costs = [crew.each(pooler=self.pooler) for crew in self.crews]
        return self.supervisors * max(costs, default=SCHEDULER_IDLE if self.scheduler else 0)

    @property
    def unasked(self) -> int:
        """What the group may need beyond its own without being told to change."""
        return self.rotation if self.renews_itself else 0

    @property
    def surge(self) -> int:
        """What a roll adds: the successor of the largest worker, one at a time."""
        return self.supervisors * max((crew.each(pooler=self.pooler) for crew in self.crews), default=0)

    @property
    def pooled_peak(self) -> int:
        """Pooled connections at most: those of one worker twice, and those of a successor."""
        largest = max((worker_pool_size(crew.max_concurrency) for crew in self.crews), default=0)
        return self.pooled + 2 * self.supervisors * largest

    @property
    def peak(self) -> int:
        """What is never exceeded: a roll, in the middle of which credentials rotate."""
        return self.required + self.rotation + self.surge

    @property
    def idle(self) -> int:
        """What the group holds soon after its start, without work."""
        workers = sum(crew.replicas * sum(part.idle for part in crew.sessions) for crew in self.crews)
        return self.supervisors * (workers + (SCHEDULER_IDLE if self.scheduler else 0)) + self.leader_idle

    def without(self, names: Collection[str]) -> Fleet:
        """Return the fleet without the workers of these names."""
        return replace(self, crews=tuple(crew for crew in self.crews if crew.name not in names))

    def with_crews(self, *crews: Crew) -> Fleet:
        """Return the fleet with these crews in the places of those of their names."""
        changed = {crew.name: crew for crew in crews}
        return replace(self, crews=tuple(changed.get(crew.name, crew) for crew in self.crews))
