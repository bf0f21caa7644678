"""The scheduler process from boot to exit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
import uvloop

from taskqd.domain.background import finished_before
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.ids import new_uuid
from taskqd.health.control import ControlLink, Drain
from taskqd.health.lines import GROUP_ENDS
from taskqd.health.server import HealthServer, Report
from taskqd.maintenance.core import POOL_SIZE, STATEMENT_TIMEOUT, Host, MaintenanceCore, leader_metric
from taskqd.maintenance.firing import FireCounts
from taskqd.observe import logs
from taskqd.observe.place import tell_place
from taskqd.settings import Settings
from taskqd.storage.boot import boot_pool
from taskqd.storage.connect import create_pool
from taskqd.storage.credentials import choose_source, login_of
from taskqd.storage.groups import GroupRow
from taskqd.storage.release import release_workers
from taskqd.storage.rotation import Rotation, told
from taskqd.storage.turn import Turn

ONCE_BUDGET = 300.0
"""Seconds that ``--once`` may take."""

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
        self._stopping = asyncio.Event()
        self._phase = "booting"
        self._signals = 0
        self._link = ControlLink.from_environ()
        self._pool: Any = None
        self._credentials: Rotation | None = None
        self._health: HealthServer | None = None
        self._core: MaintenanceCore | None = None
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
            core = self._duties
            await core.enlist()
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
            core.start()
            assert self._credentials is not None  # noqa: S101 - opened with the pool
            self._credentials.start()
            if self._link is not None:
                self._group_row = GroupRow(self._pool, self._schema, self._group, self._loop_failed)
                self._group_row.loop.start()
            if not self._stopping.is_set():
                self._phase = "running"
                if self._link is not None:
                    self._link.send_ready()
                _log.info("scheduler-ready", scheduler_id=str(self.id), tick_cadence=self._settings.sweep_interval)
            await self._stopping.wait()
            self._phase = "draining"
            _log.info("shutdown-phase", phase=self._phase)
            await core.stop()
            await self._withdraw_group()
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
                core = self._duties
                counts = await core.housekeeping.tick()
                fires, fired = await core.firing.fire_due(self._stopping.is_set, ONCE_BUDGET)
                promoted, done = await core.housekeeping.promote(self._stopping.is_set, until - time.monotonic())
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
        host = Host(self.id, "scheduler", settings.worker_group)
        self._core = MaintenanceCore(self._pool, settings, host, on_failure=self._loop_failed)

    @property
    def _duties(self) -> MaintenanceCore:
        assert self._core is not None  # noqa: S101 - made with the pool
        return self._core

    async def _withdraw_group(self) -> None:
        if self._group_row is None or not self._group_ends:
            return
        try:
            await self._group_row.withdraw()
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
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

    # -- what others see ----------------------------------------------------------------------------

    def _beat_fields(self) -> dict[str, object]:
        core = self._core
        age, beaten = (None, None) if core is None else (core.tick_age, core.beaten_at)
        return {
            "phase": self._phase,
            "inflight": 0,
            "slots": 0,
            "db_ok_age_ms": 0 if beaten is None else round((time.monotonic() - beaten) * 1000),
            "tick_age_ms": None if age is None else round(age * 1000),
            "scheduler_id": str(self.id),
            "maintains": core is not None and core.comes_first,
            **({} if self._credentials is None else self._credentials.beat()),
        }

    def _live(self) -> Report:
        return Report(True, {"live": True, "phase": self._phase})

    def _ready(self) -> Report:
        reasons = [] if self._phase == "running" else [f"the scheduler is {self._phase}"]
        if self._core is not None and self._core.trouble:
            reasons.append(self._core.trouble)
        return Report(not reasons, {"ready": not reasons, "reason": "; ".join(reasons), "phase": self._phase})

    def _metrics(self) -> str:
        core = self._core
        return "" if core is None else core.metrics() + leader_metric(core.comes_first)
