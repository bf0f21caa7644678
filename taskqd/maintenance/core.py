"""MaintenanceCore: every duty of one schema, as loops that start and stop together in whatever process hosts them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import asyncpg

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.maintenance.firing import Firing, FiringLoop
from taskqd.maintenance.housekeeping import Housekeeping, HousekeepingLoops
from taskqd.maintenance.retention import Retention, RetentionLoop
from taskqd.observe.logs import LibraryLogger
from taskqd.settings import Settings
from taskqd.storage.statements import load

POOL_SIZE = 2
"""Connections that the duties share."""
STATEMENT_TIMEOUT = 10.0
"""Seconds that one maintenance statement may take."""
STOP_TIMEOUT = STATEMENT_TIMEOUT + 5.0
"""Seconds that a stop may take: it lets the running statements end."""
BEAT_CADENCE = 1.0
ALIVE = 30.0
"""Seconds since its last beat for which a host counts as alive."""
STALE_TICK = 30.0
"""Seconds without a tick after which a host is not ready, or three cadences where that is longer."""
_WITHDRAW_TIMEOUT = 2.0

Kind = Literal["scheduler", "worker", "fallback", "runtime"]

_log = LibraryLogger("taskqd.maintenance")


@dataclass(frozen=True, slots=True)
class Host:
    """Who maintains: a scheduler, a worker that always does, one that stands in, or the runtime of another process."""

    id: UUID
    kind: Kind
    group: str
    housekeeps: bool = True
    """It ticks, promotes due jobs and keeps to the retention times."""
    fires: bool = True
    """It fires schedules."""

    @property
    def is_complete(self) -> bool:
        """True when nobody else need do anything."""
        return self.housekeeps and self.fires


class MaintenanceCore:
    """The duties through ``pool``, each with its own cadence, bound and failure isolation, and the row of their host.

    Any number of hosts may run at once: who comes first is for people and gauges, and for a worker that only stands in.
    Such a one is to stop when ``on_superseded(why)`` is called, because another host has come or has taken its place.
    """

    def __init__(
        self,
        pool: Any,
        settings: Settings,
        host: Host,
        *,
        on_failure: FailureHook,
        on_superseded: Callable[[str], None] = lambda _why: None,
    ) -> None:
        schema = settings.schema_name
        self.host = host
        self.housekeeping = Housekeeping(pool, schema, statement_timeout=STATEMENT_TIMEOUT)
        self.firing = Firing(pool, schema, host.id, statement_timeout=STATEMENT_TIMEOUT)
        self.retention = Retention(pool, schema, settings)
        self.comes_first = False
        """True while no host comes before this one, by the last beat."""
        self.beaten_at: float | None = None
        self._pool = pool
        self._sql = load("hosts", schema)
        self._on_superseded = on_superseded
        self._stale_after = max(STALE_TICK, 3 * settings.sweep_interval)
        housekeeping = HousekeepingLoops(
            self.housekeeping, tick_cadence=settings.sweep_interval, on_failure=on_failure
        ).loops
        tick = housekeeping[0]
        self._firing_loop = FiringLoop(
            self.firing,
            may_begin=lambda: not host.housekeeps or self.housekeeping.ticked_at is not None or tick.failures > 0,
            on_failure=on_failure,
        ).loop
        self._loops: list[BackgroundLoop] = []
        if host.housekeeps:
            self._loops += [*housekeeping, RetentionLoop(self.retention, on_failure=on_failure).loop]
        if host.fires:
            self._loops.append(self._firing_loop)
        self._loops.append(BackgroundLoop("host-beat", self._beat, cadence=BEAT_CADENCE, on_failure=on_failure))

    async def enlist(self) -> None:
        """Make this host known. One that stands in has its row already."""
        await self._pool.execute(self._sql.forget_hosts, timeout=STATEMENT_TIMEOUT)
        if self.host.kind != "fallback":
            await self._enlist()

    def start(self) -> None:
        """Begin every duty on the running event loop."""
        for loop in self._loops:
            loop.start()

    async def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Begin nothing new, let the running statements end within ``timeout`` seconds, and take the row away."""
        await asyncio.gather(*(loop.stop(timeout) for loop in self._loops))
        try:
            await self._pool.execute(self._sql.withdraw_host, self.host.id, timeout=_WITHDRAW_TIMEOUT)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            _log.warning("stop-not-recorded", error=type(error).__name__)

    async def _enlist(self) -> None:
        host = self.host
        await self._pool.execute(
            self._sql.enlist_host,
            host.id,
            host.kind,
            host.is_complete,
            socket.gethostname(),
            os.getpid(),
            host.group,
            timeout=STATEMENT_TIMEOUT,
        )

    async def _beat(self) -> float | None:
        since = self.beaten_at if self.beaten_at is not None else 0.0
        now = time.monotonic()
        duties = self.housekeeping
        first = await self._pool.fetchval(
            self._sql.beat_host,
            self.host.id,
            duties.ticked_at is not None and duties.ticked_at >= since,
            duties.promoted_at is not None and duties.promoted_at >= since,
            ALIVE,
            timeout=STATEMENT_TIMEOUT,
        )
        self.beaten_at = now
        self.comes_first = bool(first)
        if self.host.kind == "fallback":
            if not first:
                self._on_superseded("another worker stands in" if first is None else "another process maintains")
        elif first is None:
            await self._enlist()
        return None

    # -- what others see ----------------------------------------------------------------------------

    @property
    def tick_age(self) -> float | None:
        """Seconds since the last tick, None before the first."""
        ticked = self.housekeeping.ticked_at
        return None if ticked is None else time.monotonic() - ticked

    @property
    def trouble(self) -> str:
        """Why the schema is not maintained although this host runs; empty when it is."""
        reasons = []
        age = self.tick_age
        if age is not None and age > self._stale_after:
            reasons.append(f"the last tick is {age:.0f} s old")
        if self.host.fires and (silent := time.monotonic() - self._firing_loop.last_ok) > self._stale_after:
            reasons.append(f"schedules were last looked at {silent:.0f} s ago")
        return "; ".join(reasons)

    def metrics(self) -> str:
        """The counters of the duties in the Prometheus text format."""
        duties, kept, firing = self.housekeeping, self.retention, self.firing
        fires = firing.total
        values: dict[str, float] = {
            "taskq_scheduler_jobs_reaped_total": duties.reaped,
            "taskq_scheduler_jobs_promoted_total": duties.promoted,
            "taskq_archived_jobs_total": kept.archived,
            "taskq_expired_archive_jobs_total": kept.expired,
            "taskq_cron_fired_total": fires.fired,
            "taskq_cron_suppressed_total": fires.suppressed,
            "taskq_cron_skipped_slots_total": fires.skipped,
            "taskq_cron_disabled_schedules": firing.auto_paused,
            "taskq_cron_oldest_due_seconds": round(firing.oldest_due, 3),
            "taskq_cron_lateness_seconds": round(firing.latest_lateness, 3),
            "taskq_cron_failed_total": fires.failed,
        }
        return "".join(map(_sample, values, values.values()))


def leader_metric(comes_first: bool) -> str:
    """The gauge whose sum over a fleet is 1, but for a moment in which the duties change hands."""
    return _sample("taskq_maintenance_leader_is_leader", int(comes_first))


def _sample(name: str, value: float) -> str:
    return f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n{name} {value}\n"
