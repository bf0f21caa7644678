"""The scheduler process from boot to exit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import uvloop

from taskqd.domain.background import BackgroundLoop, finished_before
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.ids import new_uuid
from taskqd.health.control import ControlLink, Drain
from taskqd.health.lines import GROUP_ENDS
from taskqd.health.server import HealthServer, Report
from taskqd.maintenance.firing import FireCounts, Firing, FiringLoop
from taskqd.maintenance.housekeeping import Housekeeping, HousekeepingLoops
from taskqd.maintenance.retention import Retention, RetentionLoop
from taskqd.observe import logs
from taskqd.observe.place import tell_place
from taskqd.settings import Settings
from taskqd.storage.boot import boot_pool
from taskqd.storage.connect import create_pool
from taskqd.storage.credentials import choose_source, login_of
from taskqd.storage.groups import GroupRow
from taskqd.storage.release import release_workers
from taskqd.storage.rotation import Rotation, told
from taskqd.storage.statements import load
from taskqd.storage.turn import Turn

POOL_SIZE = 2
STATEMENT_TIMEOUT = 10.0
"""Seconds that one maintenance statement may take."""
STOP_TIMEOUT = STATEMENT_TIMEOUT + 5.0
ONCE_BUDGET = 300.0
"""Seconds that ``--once`` may take."""
STALE_TICK = 30.0
"""Seconds without a tick after which the scheduler is not ready, or three cadences where that is longer."""

_log = logs.get_logger("taskqd.scheduler")


def run_scheduler(settings: Settings, once: bool = False) -> int:
    """Run the scheduler until it is asked to stop, or one round with ``once``; return its exit code.

    ``once`` exits 0 when nothing is left due or it was asked to stop, 75 when its time budget ended first, and prints
    one line of JSON: outcome, counts. Raises as :func:`taskqd.worker.main.run_worker` does when it cannot start.
    """
    logs.configure(settings.log_format, settings.log_level, role="scheduler")
    scheduler = Scheduler(settings)
    return uvloop.run(scheduler.run_once() if once else scheduler.run())


class Scheduler:
    """One scheduler: the maintenance duties, a durable heartbeat row, a health server."""

    def __init__(self, settings: Settings) -> None:
        self.id = new_uuid()
        self._settings = settings
        self._schema = settings.schema_name
        self._group = os.environ.get("TASKQD_GROUP") or settings.worker_group
        self._sql = load("scheduler", self._schema)
        self._stopping = asyncio.Event()
        self._phase = "booting"
        self._signals = 0
        self._link = ControlLink.from_environ()
        self._pool: Any = None
        self._credentials: Rotation | None = None
        self._health: HealthServer | None = None
        self._schedules: FiringLoop | None = None
        self._beaten_at: float | None = None
        self._group_row: GroupRow | None = None
        self._group_ends = False

    async def run(self) -> int:
        """Maintain the schema until asked to stop."""
        self._install_signals()
        if self._link is not None:
            await self._link.start(
                self._beat_fields, self._on_drain, on_release=self._on_release, on_reload=self._on_reload
            )
        try:
            if not await finished_before(self._open(), self._stopping):
                return ExitCode.DONE
            await self._pool.execute(self._sql.forget_schedulers)
            await self._pool.execute(
                self._sql.register_scheduler,
                self.id,
                socket.gethostname(),
                os.getpid(),
                self._settings.worker_group,
            )
            loops = HousekeepingLoops(
                self._core, tick_cadence=self._settings.sweep_interval, on_failure=self._loop_failed
            )
            tick = loops.loops[0]
            self._schedules = schedules = FiringLoop(
                self._firing,
                may_begin=lambda: self._core.ticked_at is not None or tick.failures > 0,
                on_failure=self._loop_failed,
            )
            retention = RetentionLoop(self._retention, on_failure=self._loop_failed)
            beat = BackgroundLoop("scheduler-beat", self._beat, cadence=1.0, on_failure=self._loop_failed)
            if self._settings.health_enabled:
                self._health = HealthServer(
                    self._settings.health_socket_path,
                    live=self._live,
                    ready=self._ready,
                    metrics=self._metrics,
                    on_place=tell_place,
                )
                await self._health.start()
                if self._settings.metrics_port is not None:
                    await self._health.listen_on_port(self._settings.metrics_host, self._settings.metrics_port)
            loops.start()
            schedules.loop.start()
            retention.loop.start()
            assert self._credentials is not None  # noqa: S101 - opened with the pool
            self._credentials.start()
            if self._link is not None:
                self._group_row = GroupRow(self._pool, self._schema, self._group, self._loop_failed)
                self._group_row.loop.start()
            beat.start()
            if not self._stopping.is_set():
                self._phase = "running"
                if self._link is not None:
                    self._link.send_ready()
                _log.info("scheduler-ready", scheduler_id=str(self.id), tick_cadence=self._settings.sweep_interval)
            await self._stopping.wait()
            self._phase = "draining"
            _log.info("shutdown-phase", phase=self._phase)
            await asyncio.gather(
                *(loop.stop(STOP_TIMEOUT) for loop in (*loops.loops, schedules.loop, retention.loop, beat))
            )
            await self._unregister()
        finally:
            await self._close()
        return ExitCode.DONE

    async def run_once(self) -> int:
        """One tick, then due schedules, then promotion until nothing is due."""
        self._install_signals()
        outcome, counts, promoted, fires = "stopped", {}, 0, FireCounts()
        try:
            if await finished_before(self._open(), self._stopping) and not self._stopping.is_set():
                outcome = "nothing_due"
                until = time.monotonic() + ONCE_BUDGET
                counts = await self._core.tick()
                fires, fired = await self._firing.fire_due(self._stopping.is_set, ONCE_BUDGET)
                promoted, done = await self._core.promote(self._stopping.is_set, until - time.monotonic())
                if not (fired and done):
                    outcome = "stopped" if self._stopping.is_set() else "budget_exhausted"
                elif fires.claimed:
                    outcome = "fired"
                elif promoted or counts.get("reaped"):
                    outcome = "maintained"
        finally:
            await self._close()
        json.dump({"outcome": outcome, "promoted": promoted, **counts, "schedules": asdict(fires)}, sys.stdout)
        sys.stdout.write("\n")
        return ExitCode.TRY_AGAIN if outcome == "budget_exhausted" else ExitCode.DONE

    async def _open(self) -> None:
        settings = self._settings
        login = login_of(settings)
        open_pool = partial(
            create_pool,
            settings.direct_dsn(),
            role="scheduler",
            schema=self._schema,
            group=self._group,
            min_size=1,
            max_size=POOL_SIZE,
            command_timeout=STATEMENT_TIMEOUT,
            max_inactive=settings.pool_max_inactive_lifetime,
            pinned=True,
            login=login,
        )
        self._pool, credential = await boot_pool(settings, open_pool, on_retry=self._database_away)
        self._credentials = Rotation(
            login,
            credential,
            {"scheduler pool": self._pool.swap},
            interval=settings.pg_credential_refresh_interval,
            on_renewed=lambda results: told(_log, results),
            on_failure=self._loop_failed,
            turn=Turn.from_environ(),
        )
        self._core = Housekeeping(self._pool, self._schema, statement_timeout=STATEMENT_TIMEOUT)
        self._retention = Retention(self._pool, self._schema, settings)
        self._firing = Firing(self._pool, self._schema, self.id, statement_timeout=STATEMENT_TIMEOUT)

    async def _unregister(self) -> None:
        try:
            async with asyncio.timeout(2.0):
                await self._pool.execute(self._sql.stop_scheduler, self.id)
                if self._group_row is not None and self._group_ends:
                    await self._group_row.withdraw()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            _log.warning("stop-not-recorded", error=type(error).__name__)

    async def _close(self) -> None:
        if self._health is not None:
            await self._health.stop()
        if self._credentials is not None:
            await self._credentials.stop(0.5)
        if self._group_row is not None:
            await self._group_row.loop.stop(0.1)
        if self._pool is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._pool.close()
            except TimeoutError:
                self._pool.terminate()
        if self._link is not None:
            await self._link.close(self._phase)

    # -- events -------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals >= 3:
            os._exit(ExitCode.KILLED)
        self._stopping.set()

    def _on_drain(self, drain: Drain) -> None:
        self._group_ends = drain.reason == GROUP_ENDS
        self._stopping.set()

    async def _on_release(self, workers: list[UUID]) -> int:
        if self._pool is None:
            raise RuntimeError(f"the scheduler is {self._phase}")
        return await release_workers(self._pool, self._schema, workers, timeout=STATEMENT_TIMEOUT)

    async def _on_reload(self, source: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        if self._credentials is None:
            raise RuntimeError(f"the scheduler is {self._phase}")
        if source is not None:
            await choose_source(self._settings, source)
        return await self._credentials.renew()

    def _database_away(self, why: str, pause: float) -> None:
        _log.warning("database-unavailable", why=why, retry_in=round(pause, 2))

    def _loop_failed(self, name: str, error: BaseException, streak: int) -> None:
        _log.warning("loop-failed", loop=name, streak=streak, error=f"{type(error).__name__}: {error}")

    async def _beat(self) -> float | None:
        since = self._beaten_at if self._beaten_at is not None else 0.0
        now = time.monotonic()
        core = self._core
        await self._pool.execute(
            self._sql.beat_scheduler,
            self.id,
            core.ticked_at is not None and core.ticked_at >= since,
            core.promoted_at is not None and core.promoted_at >= since,
        )
        self._beaten_at = now
        return None

    # -- what others see ----------------------------------------------------------------------------

    @property
    def _tick_age(self) -> float | None:
        ticked = self._core.ticked_at if self._pool is not None else None
        return None if ticked is None else time.monotonic() - ticked

    def _beat_fields(self) -> dict[str, object]:
        age = self._tick_age
        beaten = self._beaten_at
        return {
            "phase": self._phase,
            "inflight": 0,
            "slots": 0,
            "db_ok_age_ms": 0 if beaten is None else round((time.monotonic() - beaten) * 1000),
            "tick_age_ms": None if age is None else round(age * 1000),
            "scheduler_id": str(self.id),
            **({} if self._credentials is None else self._credentials.beat()),
        }

    def _live(self) -> Report:
        return Report(True, {"live": True, "phase": self._phase})

    def _ready(self) -> Report:
        reasons = []
        if self._phase != "running":
            reasons.append(f"the scheduler is {self._phase}")
        age = self._tick_age
        limit = max(STALE_TICK, 3 * self._settings.sweep_interval)
        if age is not None and age > limit:
            reasons.append(f"the last tick is {age:.0f} s old")
        if self._schedules is not None and (silent := time.monotonic() - self._schedules.loop.last_ok) > limit:
            reasons.append(f"schedules were last looked at {silent:.0f} s ago")
        return Report(not reasons, {"ready": not reasons, "reason": "; ".join(reasons), "phase": self._phase})

    def _metrics(self) -> str:
        core, firing, fires = self._core, self._firing, self._firing.total
        return (
            f"# TYPE taskq_scheduler_jobs_reaped_total counter\ntaskq_scheduler_jobs_reaped_total {core.reaped}\n"
            f"# TYPE taskq_scheduler_jobs_promoted_total counter\ntaskq_scheduler_jobs_promoted_total {core.promoted}\n"
            f"# TYPE taskq_archived_jobs_total counter\ntaskq_archived_jobs_total {self._retention.archived}\n"
            f"# TYPE taskq_expired_archive_jobs_total counter\n"
            f"taskq_expired_archive_jobs_total {self._retention.expired}\n"
            f"# TYPE taskq_cron_fired_total counter\ntaskq_cron_fired_total {fires.fired}\n"
            f"# TYPE taskq_cron_suppressed_total counter\ntaskq_cron_suppressed_total {fires.suppressed}\n"
            f"# TYPE taskq_cron_skipped_slots_total counter\ntaskq_cron_skipped_slots_total {fires.skipped}\n"
            f"# TYPE taskq_cron_disabled_schedules gauge\ntaskq_cron_disabled_schedules {firing.auto_paused}\n"
            f"# TYPE taskq_cron_oldest_due_seconds gauge\ntaskq_cron_oldest_due_seconds {firing.oldest_due:.3f}\n"
            f"# TYPE taskq_cron_lateness_seconds gauge\ntaskq_cron_lateness_seconds {firing.latest_lateness:.3f}\n"
            f"# TYPE taskq_cron_failed_total counter\ntaskq_cron_failed_total {fires.failed}\n"
        )
