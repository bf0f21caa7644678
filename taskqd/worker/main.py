"""A worker process from boot to exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import asyncpg
import uvloop

from taskqd.actors.registry import Registry, load_registry
from taskqd.client.enqueue import Enqueuer
from taskqd.client.jobs import Jobs
from taskqd.client.wake import WakeSender
from taskqd.domain.background import finished_before
from taskqd.domain.budget import compute_connection_budget, worker_pool_size
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.ids import new_uuid
from taskqd.domain.leases import lease_threshold
from taskqd.domain.signals import CancelOrigin
from taskqd.health.control import ControlLink, Drain
from taskqd.health.server import HealthServer, Report
from taskqd.observe import logs
from taskqd.settings import Settings
from taskqd.storage.connect import connect_with_retry, create_pool
from taskqd.storage.listener import WakeListener
from taskqd.storage.migrate import check_schema
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.completer import Completer
from taskqd.worker.consumer import Consumers
from taskqd.worker.heartbeat import Heartbeat
from taskqd.worker.outcome import ISOLATED, SHUTDOWN, UNSTARTED, Released
from taskqd.worker.producer import Producer
from taskqd.worker.shutdown import TAIL, ShutdownPlan
from taskqd.worker.slots import Slots
from taskqd.worker.watchdog import Watchdog, trip

DATABASE_STALE = 3
"""Beats without an answer after which a worker is not ready."""

_log = logs.get_logger("taskqd.worker")


def run_worker(settings: Settings, actors: str) -> int:
    """Run a worker until it is asked to stop; return its exit code. ``actors`` is ``module:attribute``.

    Raises ``RegistryError``, ``DatabaseUnavailableError``, ``DatabaseAuthError``, ``SchemaNotMigratedError`` or
    ``SchemaOutOfRangeError`` when it cannot start.
    """
    name = os.environ.get("TASKQD_NAME") or settings.worker_label
    bound = {} if name is None else {"worker": f"{name}.{os.environ.get('TASKQD_INDEX', '0')}"}
    logs.configure(settings.log_format, settings.log_level, **bound)
    registry = load_registry(actors)
    code = uvloop.run(Worker(settings, registry).run())
    if any(thread.name.startswith("taskqd-actor") for thread in threading.enumerate()):
        # Interpreter exit would join threads that a plain function may keep for ever.
        os._exit(code)
    return code


class Worker:
    """One worker: producer, consumers, completer, heartbeat thread, listener, health server, watchdog."""

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self.id = new_uuid()
        self._settings = settings
        self._registry = registry
        self._schema = settings.schema_name
        self._group = os.environ.get("TASKQD_GROUP") or settings.worker_group
        self._sql = load("worker", self._schema)
        self._stopping = asyncio.Event()
        self._phase = "booting"
        self._plan: ShutdownPlan | None = None
        self._plan_changed = asyncio.Event()
        self._signals = 0
        self._isolated = False
        self._link = ControlLink.from_environ()

    # -- life ---------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Boot, work until asked to stop, stop."""
        self._install_signals()
        try:
            if not await finished_before(self._boot(), self._stopping):
                await self._close_quietly()
                return ExitCode.DONE
        except BaseException:
            await self._close_quietly()
            raise
        if not self._stopping.is_set():
            self._phase = "running"
            if self._link is not None:
                self._link.send_ready()
            _log.info("worker-ready", worker_id=str(self.id), queues=self._settings.queues)
        await self._stopping.wait()
        await self._stop()
        return ExitCode.DONE

    _dispatch_pool: Any = None
    _worker_pool: Any = None
    _wake: WakeSender | None = None
    _listener: WakeListener | None = None
    _health: HealthServer | None = None
    _heartbeat: Heartbeat | None = None
    _watchdog: Watchdog | None = None

    async def _boot(self) -> None:
        settings = self._settings
        await self._start_link()
        connection = await connect_with_retry(
            settings.direct_dsn(),
            role="boot",
            schema=self._schema,
            group=self._group,
            boot_timeout=settings.database_boot_timeout,
            on_retry=lambda why, pause: _log.warning("database-unavailable", why=why, retry_in=round(pause, 2)),
        )
        try:
            await check_schema(connection, self._schema)
            await self._register(connection)
        finally:
            await connection.close()
        self._progress("pools")
        await self._open_pools()
        self._assemble()
        await self._start()

    async def _start_link(self) -> None:
        if self._link is not None:
            await self._link.start(self._beat, self._on_drain, self._on_quiet)

    def _progress(self, step: str) -> None:
        if self._link is not None:
            self._link.send_progress(step)

    async def _register(self, connection: asyncpg.Connection) -> None:
        settings = self._settings
        max_backoff = settings.max_retry_backoff
        for ref in self._registry.values():
            retry = ref.retry
            stored = await connection.fetchval(
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
            )
            if stored != ref.queue:
                _log.warning("actor-config-queue-override", actor=ref.name, declared=ref.queue, stored=stored)
        await connection.execute(
            self._sql.register_worker,
            self.id,
            socket.gethostname(),
            os.getpid(),
            settings.queues,
            settings.max_concurrency,
            os.environ.get("TASKQD_NAME") or settings.worker_label,
            settings.workgroup_instance,
            settings.worker_group,
        )
        unconsumed = sorted({ref.queue for ref in self._registry.values() if ref.queue not in settings.queues})
        if unconsumed:
            _log.warning("actors-on-unconsumed-queues", queues=unconsumed, consumed=settings.queues)

    async def _open_pools(self) -> None:
        settings = self._settings
        cache_size, cache_lifetime = settings.statement_cache()
        self._dispatch_pool = await create_pool(
            settings.direct_dsn(),
            role="dispatch",
            schema=self._schema,
            group=self._group,
            min_size=1,
            max_size=settings.dispatcher_pool_size,
            command_timeout=settings.dispatcher_command_timeout,
            max_inactive=settings.pool_max_inactive_lifetime,
            pinned=True,
        )
        self._worker_pool = await create_pool(
            settings.pooled_dsn(),
            role="worker",
            schema=self._schema,
            group=self._group,
            min_size=1,
            max_size=worker_pool_size(settings.max_concurrency),
            command_timeout=30.0,
            statement_cache_size=cache_size,
            max_cached_statement_lifetime=cache_lifetime,
            max_inactive=settings.pool_max_inactive_lifetime,
            is_pooled=settings.pg_is_pooled,
        )

    def _assemble(self) -> None:
        settings = self._settings
        self._leases = Leases()
        self._slots = Slots(settings.max_concurrency, lambda: self._producer.room_made())
        self._completer = Completer(
            self._dispatch_pool,
            self._schema,
            self._leases,
            command_timeout=settings.dispatcher_command_timeout,
            on_repended=lambda: self._producer.woken(),
        )
        self._producer = Producer(
            self._dispatch_pool,
            self._schema,
            self._registry,
            settings.queues,
            self._slots,
            self._leases,
            worker_id=self.id,
            lock_lease=settings.lock_lease,
            poll_interval=settings.notify_poll_interval if settings.notify_enabled else settings.poll_interval,
            command_timeout=settings.dispatcher_command_timeout,
            release=lambda attempts: self._release(attempts, UNSTARTED),
            on_failure=self._loop_failed,
        )
        self._wake = WakeSender(self._worker_pool, self._schema, self._loop_failed)
        enqueuer = Enqueuer(
            self._schema,
            key_max_bytes=settings.idempotency_key_max_bytes,
            max_backoff=settings.max_retry_backoff,
        )
        self._consumers = Consumers(
            self._slots,
            self._completer,
            Jobs(self._worker_pool, enqueuer, self._wake),
            worker_id=self.id,
            default_start_to_close=settings.default_start_to_close,
            result_max_bytes=settings.result_max_bytes,
            message_max_chars=settings.exception_message_max_chars,
        )
        self._heartbeat = Heartbeat(
            settings.direct_dsn(),
            self._schema,
            self._group,
            self.id,
            self._leases,
            interval=settings.heartbeat_interval,
            command_timeout=settings.heartbeat_command_timeout,
            lock_lease=settings.lock_lease,
            threshold=lease_threshold(
                settings.lock_lease,
                settings.heartbeat_interval,
                settings.heartbeat_command_timeout,
                settings.max_heartbeat_failures,
            ),
            max_failures=settings.max_heartbeat_failures,
            on_lost=self._on_lost,
            on_isolated=self._on_isolated,
            on_recovered=self._on_recovered,
            on_unprovable=lambda why: trip("lease", why),
        )
        if settings.notify_enabled:
            self._listener = WakeListener(
                settings.direct_dsn(),
                self._schema,
                self._group,
                on_wake=self._producer.woken,
                on_failure=self._loop_failed,
                check_interval=settings.notify_health_check_interval,
                setup_timeout=settings.notify_listener_setup_timeout,
                backoff=settings.notify_reconnect_backoff_initial,
            )
        if settings.watchdog_enabled:
            self._watchdog = Watchdog(
                budget=settings.watchdog_loop_lag_budget,
                warn=settings.watchdog_loop_lag_warn_budget,
                check_interval=settings.watchdog_check_interval,
            )
        if settings.health_enabled:
            self._health = HealthServer(
                settings.health_socket_path, live=self._live, ready=self._ready, metrics=self._metrics
            )

    async def _start(self) -> None:
        assert self._heartbeat is not None and self._wake is not None  # noqa: S101
        if self._health is not None:
            await self._health.start()
        if self._watchdog is not None:
            self._watchdog.start()
        self._heartbeat.start()
        self._wake.start()
        self._completer.loop.start()
        self._consumers.start()
        if self._listener is not None:
            self._listener.start()
        self._producer.loop.start()
        settings = self._settings
        budget = compute_connection_budget(
            max_concurrency=settings.max_concurrency,
            dispatcher_pool_size=settings.dispatcher_pool_size,
            heartbeat_pool_size=settings.heartbeat_pool_size,
            leader=False,
        )
        _log.info(
            "worker-startup-budget",
            direct=budget.direct,
            pooled=budget.pooled,
            total=budget.total,
            leader_extra=2,
            pgbouncer_recommended=budget.pgbouncer_recommended,
            max_concurrency=settings.max_concurrency,
            lock_lease=settings.lock_lease,
            shutdown_seconds=settings.cancellation_grace_period + settings.cleanup_grace_period + TAIL,
        )

    # -- events -------------------------------------------------------------------------------------

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._begin_stop()
        elif self._signals == 2 and self._plan is not None:
            self._plan.hurry()
            self._plan_changed.set()
        else:
            os._exit(ExitCode.KILLED)

    def _begin_stop(self) -> ShutdownPlan:
        if self._plan is None:
            settings = self._settings
            self._plan = ShutdownPlan.from_now(
                settings.cancellation_grace_period,
                settings.cleanup_grace_period,
                settings.termination_grace_period,
            )
            self._stopping.set()
        self._guard_deadline()
        return self._plan

    def _on_drain(self, drain: Drain) -> None:
        self._signals = max(self._signals, 1)
        plan = self._begin_stop()
        plan.tighten(drain.cancel_ns / 1e9, drain.force_ns / 1e9, drain.deadline_ns / 1e9)
        self._plan_changed.set()
        self._guard_deadline()

    def _guard_deadline(self) -> None:
        if self._watchdog is not None and self._plan is not None:
            self._watchdog.set_deadline(self._plan.deadline)

    def _on_quiet(self, quiet: bool) -> None:
        if self._phase == "running":
            self._producer.pause(quiet or self._isolated)

    def _on_lost(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            running = attempt in self._consumers.running
            if not running:
                continue  # it was settled between the snapshot and the answer, or is about to be classified
            attempt.disowned = True
            self._leases.discard(attempt)
            self._completer.lost += 1
            attempt.cancellation.request(CancelOrigin.LEASE_LOST)
            self._consumers.cancel(attempt)
            _log.warning("lease-lost", job_id=str(attempt.job_id), epoch=attempt.epoch, actor=attempt.ref.name)

    def _on_isolated(self) -> None:
        """The database has not answered for so long that leases are about to end: stop what runs, keep the process."""
        _log.error("worker-isolated", held=len(self._leases))
        self._isolated = True
        self._producer.pause(True)
        self._release(self._slots.take_all(), ISOLATED)
        self._consumers.request_stop(CancelOrigin.SHUTDOWN)
        self._consumers.cancel()

    def _on_recovered(self) -> None:
        _log.info("worker-recovered")
        self._isolated = False
        if self._phase == "running":
            self._producer.pause(False)

    def _release(self, attempts: list[Attempt], cause: str) -> None:
        for attempt in attempts:
            self._completer.submit(Released(attempt, None, cause))

    def _loop_failed(self, name: str, error: BaseException, streak: int) -> None:
        _log.warning("loop-failed", loop=name, streak=streak, error=f"{type(error).__name__}: {error}")

    # -- stop ---------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        plan = self._plan
        assert plan is not None  # noqa: S101
        self._enter("draining")
        mark = asyncio.ensure_future(self._mark_stopping())
        await self._producer.loop.stop(self._settings.dispatcher_command_timeout)
        self._release(self._slots.take_all(), SHUTDOWN)
        self._slots.close()
        self._consumers.request_stop(CancelOrigin.SHUTDOWN)
        if not await self._wait_consumers(lambda: plan.cancel_at):
            self._enter("cancelling")
            self._consumers.cancel()
            if not await self._wait_consumers(lambda: plan.force_at):
                self._enter("releasing")
                self._release_running()
        await asyncio.wait([mark], timeout=1.0)
        await self._completer.flush(max(0.5, min(TAIL, plan.deadline - time.monotonic() - 1.0)))
        self._enter("closing")
        await self._close_quietly()

    def _enter(self, phase: str) -> None:
        self._phase = phase
        inflight = len(self._consumers.running)
        _log.info("shutdown-phase", phase=phase, inflight=inflight)
        if self._link is not None:
            self._link.send_draining(phase, inflight)

    async def _mark_stopping(self) -> None:
        try:
            await self._dispatch_pool.execute(self._sql.stop_worker, self.id, timeout=2.0)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            # Rows left behind are then counted as crashes, which spends an attempt of theirs.
            _log.warning("stop-not-recorded", error=type(error).__name__)

    async def _wait_consumers(self, until: Any) -> bool:
        """Wait for the consumers until a time that a second signal may move."""
        while (left := until() - time.monotonic()) > 0:
            self._plan_changed.clear()
            ended = asyncio.ensure_future(self._consumers.wait_ended(left))
            changed = asyncio.ensure_future(self._plan_changed.wait())
            await asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if ended.done() and ended.result():
                return True
            ended.cancel()
        return await self._consumers.wait_ended(0.01)

    def _release_running(self) -> None:
        """Hand back what ignored its cancellation. A plain function's row stays: its thread still works on it."""
        for attempt in self._consumers.running:
            if not attempt.ref.is_sync:
                attempt.disowned = True
                assert attempt.started_at is not None  # noqa: S101
                self._completer.submit(Released(attempt, time.monotonic() - attempt.started_at, SHUTDOWN))

    async def _close_quietly(self) -> None:
        """Close everything at once, each within its bound; what does not close in time goes with the process."""
        closes: list[Awaitable[Any]] = []
        if self._listener is not None:
            closes.append(self._listener.stop(TAIL - 1))
        if self._health is not None:
            closes.append(self._health.stop())
        if self._wake is not None:
            closes.append(self._wake.close())
        if self._heartbeat is not None:
            self._heartbeat.stop()
            closes.append(self._heartbeat.wait_stopped(TAIL - 1))
        if self._watchdog is not None and self._plan is None:
            self._watchdog.stop()
        if hasattr(self, "_completer"):
            closes.append(self._completer.loop.stop(TAIL - 1))
        await self._all_within(closes, TAIL - 0.5)
        if self._dispatch_pool is not None and hasattr(self, "_leases"):
            await self._all_within([self._dispatch_pool.execute(self._sql.unregister_worker, self.id)], 0.5)
        pools = [pool for pool in (self._dispatch_pool, self._worker_pool) if pool is not None]
        await self._all_within([pool.close() for pool in pools], 1.0)
        for pool in pools:
            pool.terminate()
        if self._link is not None:
            await self._link.close(self._phase)

    async def _all_within(self, closes: list[Awaitable[Any]], timeout: float) -> None:
        tasks = [asyncio.ensure_future(close) for close in closes]
        if not tasks:
            return
        done, late = await asyncio.wait(tasks, timeout=timeout)
        for task in late:
            task.cancel()
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                _log.warning("close-failed", error=repr(task.exception()))

    # -- what others see ----------------------------------------------------------------------------

    def _beat(self) -> dict[str, object]:
        booted = self._phase != "booting"
        return {
            "phase": self._phase,
            "inflight": self._slots.busy if booted else 0,
            "slots": self._settings.max_concurrency,
            "db_ok_age_ms": round(self._heartbeat.age * 1000) if self._heartbeat is not None else 0,
            "claims": self._producer.claimed if booted else 0,
            "done": self._completer.succeeded if booted else 0,
            "failed": self._completer.failed if booted else 0,
            "worker_id": str(self.id),
        }

    def _live(self) -> Report:
        return Report(True, {"live": True, "phase": self._phase})

    def _ready(self) -> Report:
        reasons = []
        if self._phase != "running":
            reasons.append(f"the worker is {self._phase}")
        if self._isolated:
            reasons.append("the database has not answered; running jobs were stopped")
        elif self._heartbeat is not None and self._heartbeat.age > DATABASE_STALE * self._settings.heartbeat_interval:
            reasons.append(f"the last good heartbeat is {self._heartbeat.age:.0f} s old")
        reasons.extend(self._consumers.crashed)
        return Report(
            not reasons,
            {
                "ready": not reasons,
                "reason": "; ".join(reasons),
                "phase": self._phase,
                "active_jobs": self._slots.busy,
                "listening": self._listener is not None and self._listener.connected,
            },
        )

    def _metrics(self) -> str:
        values = {
            "taskq_active_jobs": self._slots.busy,
            "taskq_worker_max_concurrency": self._settings.max_concurrency,
            "taskq_worker_waiting_jobs": self._slots.waiting,
            "taskq_worker_jobs_succeeded_total": self._completer.succeeded,
            "taskq_worker_jobs_failed_total": self._completer.failed,
            "taskq_worker_leases_lost_total": self._completer.lost,
            "taskq_worker_outcomes_disowned_total": self._completer.disowned,
        }
        lines = []
        for name, value in values.items():
            lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"
