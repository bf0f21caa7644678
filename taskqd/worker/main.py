"""A worker process from boot to exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import uvloop

from taskqd.actors.registry import Registry, load_registry, reservations_of
from taskqd.actors.schedules import declared_schedules
from taskqd.domain.background import finished_before
from taskqd.domain.budget import LEADER_EXTRA, compute_connection_budget
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.ids import new_uuid
from taskqd.health.control import ControlLink, Drain
from taskqd.health.fork_safety import open_sockets
from taskqd.health.lines import GROUP_ENDS
from taskqd.health.server import HealthServer
from taskqd.observe import logs
from taskqd.observe.place import tell_place
from taskqd.settings import Settings
from taskqd.storage.credentials import choose_source
from taskqd.storage.schedules import register_schedules
from taskqd.storage.statements import load
from taskqd.storage.swap import SwapPool
from taskqd.worker import report
from taskqd.worker.closing import all_within
from taskqd.worker.engine import Engine, loop_failed
from taskqd.worker.hosting import Hosting
from taskqd.worker.idle import IdleWatch
from taskqd.worker.injection import announce
from taskqd.worker.isolated.launch import Launched, launch
from taskqd.worker.shutdown import LAST_SECOND, TAIL, ShutdownPlan, exit_within
from taskqd.worker.stuck import StuckWatch
from taskqd.worker.watchdog import Watchdog

_ENLIST_TIMEOUT = 30.0
"""Seconds that one statement at the start may take."""
HOST_STOP_TIMEOUT = 20.0
"""Seconds that the end of maintenance may take where the jobs' time lasts as long."""

_log = logs.get_logger("taskqd.worker")


def run_worker(settings: Settings, actors: str, *, until_idle: bool = False, max_runtime: float | None = None) -> int:
    """Run a worker until it is asked to stop; return its exit code. ``actors`` is ``module:attribute``.

    With ``until_idle`` it also stops when its queues are empty, or after ``max_runtime`` seconds.

    Raises ``RegistryError``, ``DatabaseUnavailableError``, ``DatabaseAuthError``, ``SchemaNotMigratedError`` or
    ``SchemaOutOfRangeError`` when it cannot start.
    """
    name = os.environ.get("TASKQD_NAME")
    label = f"{name}.{os.environ.get('TASKQD_INDEX', '0')}" if name else settings.worker_label
    log = {"format": settings.log_format, "level": settings.log_level, **({"worker": label} if label else {})}
    logs.configure(**log)
    inherited = open_sockets() if sys.platform == "linux" else {}
    registry = load_registry(actors)
    worker = Worker(settings, registry, label, launch(registry, actors, settings, inherited, log))
    if until_idle:
        worker.stop_when_idle(max_runtime)
    return uvloop.run(_run(worker))


async def _run(worker: Worker) -> int:
    patience, code = LAST_SECOND, ExitCode.INTERNAL
    try:
        code = await worker.run()
        patience = 0.0 if worker.busy else LAST_SECOND
    except asyncio.CancelledError:
        _log.critical("worker-cancelled", why="a handler has cancelled tasks of ours, or stopped the event loop")
    finally:
        # The event loop and the interpreter would wait for tasks and threads that handlers may keep for ever.
        if worker.has_worked:
            exit_within(patience, code)
    return code


class Worker:
    """One worker process: boot, signals, the supervisor's link, the health server, the shutdown."""

    def __init__(
        self, settings: Settings, registry: Registry, label: str | None, zygote: Launched | None = None
    ) -> None:
        self.id = new_uuid()
        self._settings = settings
        self._registry = registry
        self._label = label
        self._zygote = zygote
        self._group = os.environ.get("TASKQD_GROUP") or settings.worker_group
        self._sql = load("worker", settings.schema_name)
        self._phase = "booting"
        self._engine: Engine | None = None
        self._stopping = asyncio.Event()
        self._plan: ShutdownPlan | None = None
        self._plan_changed = asyncio.Event()
        self._until_idle = False
        self._max_runtime: float | None = None
        self._idle_watch: IdleWatch | None = None
        self._stuck_watch: StuckWatch | None = None
        self._hosting: Hosting | None = None
        self._end: ExitCode | None = None
        self._recycled = False
        self._group_ends = False
        self._signals = 0
        self._quiet = False
        self._link = ControlLink.from_environ()
        self._watchdog = Watchdog(
            budget=settings.watchdog_loop_lag_budget,
            warn=settings.watchdog_loop_lag_warn_budget,
            check_interval=settings.watchdog_check_interval,
            ended=lambda: "" if self._engine is None else self._engine.ended_part(),
        )
        self._health = HealthServer(
            settings.health_socket_path,
            live=lambda: report.live(self._phase),
            ready=lambda: report.ready(self._engine, self._phase, settings.heartbeat_interval),
            metrics=self._metrics,
            on_place=tell_place,
        )

    def stop_when_idle(self, max_runtime: float | None) -> None:
        """Stop once the queues are empty, at the latest after ``max_runtime`` seconds. Call it before :meth:`run`."""
        self._until_idle, self._max_runtime = True, max_runtime

    @property
    def busy(self) -> bool:
        """True while a handler runs, one whose job was released included."""
        return self._engine is not None and bool(self._engine.consumers.running)

    @property
    def has_worked(self) -> bool:
        """True once a handler may have run."""
        return self._engine is not None

    async def run(self) -> ExitCode:
        """Boot, work until asked to stop, or idle where that was asked, stop.

        Return 75 when a fresh process is to follow, what :class:`IdleWatch` says when it ended the worker, else 0.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            if await finished_before(self._boot(), self._stopping):
                self._announce()
                await self._stopping.wait()
                await self._drain()
        finally:
            await self._close()
        if self._end is not None:
            return self._end
        return ExitCode.TRY_AGAIN if self._recycled else ExitCode.DONE

    # -- boot ---------------------------------------------------------------------------------------

    async def _boot(self) -> None:
        settings = self._settings
        if self._link is not None:
            await self._link.start(
                self._beat,
                self._on_drain,
                self._on_quiet,
                on_release=self._on_release,
                on_reload=self._on_reload,
            )
        if settings.health_enabled:
            await self._health.start()
            if settings.metrics_port is not None:
                await self._health.listen_on_port(settings.metrics_host, settings.metrics_port)
        if settings.watchdog_enabled:
            self._watchdog.start()
        self._engine = await Engine.open(
            settings, self._registry, self.id, self._group, enlist=self._enlist, on_retry=self._database_away
        )
        if self._zygote is not None:
            await self._engine.isolate(self._zygote, self._recycle)
        self._engine.set_quiet(self._quiet)
        if self._link is not None:
            self._link.send_ready()  # before threads are started that the rest would compete with
        self._engine.start()
        self._stuck_watch = StuckWatch(
            self._engine.consumers, settings.cleanup_grace_period, self._on_stuck, loop_failed
        )
        self._stuck_watch.loop.start()
        self._hosting = Hosting(
            settings, self.id, self._group, self._engine.pools[0], self._engine.credentials, on_failure=loop_failed
        )
        self._hosting.start()
        if self._until_idle:
            self._idle_watch = self._engine.watch_idle(self._max_runtime, self._on_idle)
        if self._link is not None:
            self._engine.group_row.loop.start()

    def _beat(self) -> dict[str, object]:
        hosts = self._hosting is not None and self._hosting.maintains
        told = report.beat(self._engine, self._phase, self._settings.max_concurrency, self.id)
        return {**told, "maintains": hosts}

    def _metrics(self) -> str:
        hosting = "" if self._hosting is None else self._hosting.metrics()
        return report.metrics(self._engine) + self._watchdog.stalls.metrics() + hosting

    def _database_away(self, why: str, pause: float) -> None:
        _log.warning("database-unavailable", why=why, retry_in=round(pause, 2))

    async def _enlist(self, pool: SwapPool) -> None:
        """Make this worker and its actors known."""
        await self._store_actors(pool)
        await self._store_schedules(pool)
        await self._register(pool)
        if self._link is not None:
            self._link.send_progress("registered")

    async def _store_actors(self, pool: SwapPool) -> None:
        max_backoff = self._settings.max_retry_backoff
        for name, slots in sorted(reservations_of(self._registry).items()):
            await pool.execute(self._sql.set_reservation, name, slots, timeout=_ENLIST_TIMEOUT)
        for ref in self._registry.values():
            retry = ref.retry
            stored = await pool.fetchval(
                self._sql.sync_actor,
                ref.name,
                ref.queue,
                retry.max_attempts,
                retry.kind,
                retry.backoff,
                min(retry.base.total_seconds(), max_backoff),
                min(retry.cap.total_seconds(), max_backoff),
                retry.stored_jitter,
                None if retry.time_budget is None else retry.time_budget.total_seconds(),
                ref.priority,
                ref.has_hooks,
                ref.max_pending,
                ref.max_concurrent,
                None if ref.result_ttl is None else ref.result_ttl.total_seconds(),
                sorted(reservation.name for reservation in ref.reservations) or None,
                timeout=_ENLIST_TIMEOUT,
            )
            if stored is not None and stored != ref.queue:  # None: another worker stores the same right now
                _log.warning("actor-config-queue-override", actor=ref.name, declared=ref.queue, stored=stored)

    async def _store_schedules(self, pool: SwapPool) -> None:
        """Create the schedules that the actors declare. Those that exist are an operator's to change."""
        declared = [one.definition for one in declared_schedules(self._registry.values()).values()]
        for name, differs in (await register_schedules(pool, self._settings.schema_name, declared)).items():
            _log.warning("schedule-differs", schedule=name, differs=differs, holds="what is stored")

    async def _register(self, pool: SwapPool) -> None:
        settings = self._settings
        await pool.execute(
            self._sql.register_worker,
            self.id,
            socket.gethostname(),
            os.getpid(),
            settings.queues,
            settings.max_concurrency,
            self._label,
            settings.workgroup_instance,
            settings.worker_group,
            timeout=_ENLIST_TIMEOUT,
        )
        unconsumed = sorted({ref.queue for ref in self._registry.values()} - set(settings.queues))
        if unconsumed:
            _log.info("actors-on-unconsumed-queues", queues=unconsumed, consumed=settings.queues)

    def _announce(self) -> None:
        settings = self._settings
        self._phase = "running"
        if self._engine is not None:
            announce(self._registry, self._engine.transactions)
        budget = compute_connection_budget(
            max_concurrency=settings.max_concurrency,
            dispatcher_pool_size=settings.dispatcher_pool_size,
            heartbeat_pool_size=settings.heartbeat_pool_size,
            leader=False,
            maintenance=settings.maintenance,
        )
        _log.info(
            "worker-startup-budget",
            direct=budget.direct,
            pooled=budget.pooled,
            total=budget.total,
            leader_extra=LEADER_EXTRA if settings.maintenance == "auto" else 0,
            pgbouncer_recommended=budget.pgbouncer_recommended,
            lock_lease=settings.lock_lease,
            shutdown_seconds=settings.cancellation_grace_period + settings.cleanup_grace_period + TAIL,
        )
        _log.info(
            "worker-ready",
            worker_id=str(self.id),
            queues=settings.queues,
            actors=len(self._registry),
            max_concurrency=settings.max_concurrency,
        )

    # -- stop ---------------------------------------------------------------------------------------

    def _on_signal(self) -> None:
        self._signals += 1
        plan = self._begin_stop()
        self._recycled = False
        if self._signals == 2:
            plan.hurry()
            self._plan_changed.set()
        elif self._signals > 2:
            os._exit(ExitCode.KILLED)

    def _on_drain(self, drain: Drain) -> None:
        plan = self._begin_stop()
        self._recycled = drain.recycle
        self._group_ends = drain.reason == GROUP_ENDS
        plan.tighten(drain.cancel_ns / 1e9, drain.force_ns / 1e9, drain.deadline_ns / 1e9)
        self._watchdog.set_deadline(plan.deadline)
        self._plan_changed.set()

    def _begin_stop(self) -> ShutdownPlan:
        if self._plan is None:
            settings = self._settings
            self._plan = ShutdownPlan.from_now(
                settings.cancellation_grace_period,
                settings.cleanup_grace_period,
                settings.termination_grace_period,
            )
            self._watchdog.set_deadline(self._plan.deadline)
            self._stopping.set()
        return self._plan

    def _recycle(self) -> None:
        """Stop by itself, so that a fresh process follows."""
        if self._plan is None:
            self._recycled = True
            self._begin_stop()

    def _on_stuck(self) -> None:
        """Make room for a fresh process at once: nothing that runs here is waited for."""
        self._recycle()
        if self._plan is not None:
            for _ in range(2):
                self._plan.hurry()
            self._plan_changed.set()

    def _on_idle(self, code: ExitCode) -> None:
        if self._plan is None:
            self._end = code
            self._begin_stop()

    def _on_quiet(self, quiet: bool) -> None:
        self._quiet = quiet  # it may come before there is an engine
        if self._engine is not None:
            self._engine.set_quiet(quiet)

    async def _on_release(self, workers: list[UUID]) -> int:
        if self._engine is None:
            raise RuntimeError(f"the worker is {self._phase}")
        return await self._engine.release(workers)

    async def _on_reload(self, source: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        if self._engine is None:
            raise RuntimeError(f"the worker is {self._phase}")
        if source is not None:
            await choose_source(self._settings, source)
        return await self._engine.credentials.renew()

    def _enter(self, phase: str) -> None:
        self._phase = phase
        inflight = len(self._engine.consumers.running) if self._engine is not None else 0
        _log.info("shutdown-phase", phase=phase, inflight=inflight)
        if self._link is not None:
            self._link.send_draining(phase, inflight)

    async def _drain(self) -> None:
        if self._engine is None:
            return
        plan = self._begin_stop()
        # Beside the rest, from the beginning: what its transactions need they mostly have before the jobs end.
        hosting = asyncio.ensure_future(self._end_hosting(plan))
        await self._engine.drain(plan, self._plan_changed, self._enter)
        await hosting

    async def _end_hosting(self, plan: ShutdownPlan) -> None:
        """End what maintains the schema, when its statements have ended, or the jobs' time."""
        if self._hosting is None:
            return
        ending = asyncio.ensure_future(self._hosting.stop(HOST_STOP_TIMEOUT))
        while not ending.done() and time.monotonic() < plan.force_at:
            await asyncio.wait([ending], timeout=0.1)
        ending.cancel()

    async def _close(self) -> None:
        self._phase = "closing"
        if self._idle_watch is not None:
            await self._idle_watch.stop()
        if self._stuck_watch is not None:
            await self._stuck_watch.loop.stop(0.1)
        if self._hosting is not None:
            await all_within(1.0, self._hosting.stop(0.5))
        if self._engine is not None:
            await self._engine.close(with_group=self._group_ends)
        await all_within(1.0, self._health.stop())
        self._watchdog.stop()
        if self._link is not None:
            await self._link.close(self._phase, held=0 if self._engine is None else self._engine.held)
