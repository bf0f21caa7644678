"""The running parts of a worker, put together: what claims, runs, settles and renews."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.actors.di.container import Container
from taskqd.actors.registry import Registry
from taskqd.actors.reporter import ErrorReporter
from taskqd.client.enqueue import Enqueuer
from taskqd.client.jobs import Jobs
from taskqd.client.reads import JobReader
from taskqd.client.wake import WakeSender
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.leases import lease_threshold
from taskqd.domain.signals import CancelOrigin
from taskqd.observe.logs import get_logger
from taskqd.settings import Settings
from taskqd.storage.credentials import Credential, login_of
from taskqd.storage.groups import GroupRow
from taskqd.storage.listener import Listener
from taskqd.storage.release import release_workers
from taskqd.storage.rotation import Rotation, told
from taskqd.storage.schema_name import cancel_channel, wake_channel
from taskqd.storage.statements import load
from taskqd.storage.swap import SwapPool
from taskqd.storage.turn import Turn
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.cancel import CancelLadder
from taskqd.worker.closing import all_within
from taskqd.worker.completer import Completer
from taskqd.worker.consumer import Consumers
from taskqd.worker.deferred import DeferredPayloads
from taskqd.worker.drain import Drain
from taskqd.worker.heartbeat import Heartbeat
from taskqd.worker.hooks import HookRunner
from taskqd.worker.idle import IdleWatch
from taskqd.worker.injection import AutonomousWake, Injection
from taskqd.worker.isolated.launch import Launched
from taskqd.worker.isolated.runner import Isolation, orders_of
from taskqd.worker.outcome import ISOLATED, UNSTARTED, Outcome, Released
from taskqd.worker.pools import open_pools
from taskqd.worker.producer import Producer
from taskqd.worker.progress import ProgressWriter
from taskqd.worker.reporter import ErrorReports
from taskqd.worker.shutdown import TAIL, ShutdownPlan
from taskqd.worker.slot_pool import open_slot_pool
from taskqd.worker.slots import Slots
from taskqd.worker.transactional import SlotTransactions
from taskqd.worker.watchdog import trip

COLLECT_AFTER = 10_000
"""Objects that are new since the last collection of garbage when the next begins."""

_log = get_logger("taskqd.worker")


class Engine:
    """One worker's pools, slots, producer, consumers, completer, heartbeat and listener.

    Built on the event loop it runs on, by :meth:`open`; ``start``, then ``drain``, then ``close``.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        worker_id: UUID,
        group: str,
        dispatch_pool: SwapPool,
        worker_pool: SwapPool,
        credential: Credential | None,
        slot_pool: SwapPool | None = None,
    ) -> None:
        schema = settings.schema_name
        self._settings = settings
        self._registry = registry
        self._worker_id = worker_id
        self._sql = load("worker", schema)
        self._dispatch_pool = dispatch_pool
        self._worker_pool = worker_pool
        self.pools = tuple(pool for pool in (dispatch_pool, worker_pool, slot_pool) if pool is not None)
        self.isolation: Isolation | None = None
        """What runs isolated actors, where there are any."""
        self.isolated = False
        """True while the database has not answered for so long that running jobs were stopped."""
        self._quiet = False
        self._draining = False
        self._leases = Leases()
        self.slots = Slots(settings.max_concurrency, self._room_made)
        self._progress = ProgressWriter(
            dispatch_pool,
            schema,
            interval=settings.progress_coalesce_interval,
            size_limit=settings.progress_data_max_bytes,
            command_timeout=settings.dispatcher_command_timeout,
            on_failure=loop_failed,
        )
        self.hooks = HookRunner(
            dispatch_pool,
            schema,
            registry,
            command_timeout=settings.dispatcher_command_timeout,
            on_failure=loop_failed,
        )
        self.producer = Producer(
            dispatch_pool,
            schema,
            registry,
            settings.queues,
            self.slots,
            self._leases,
            worker_id=worker_id,
            lock_lease=settings.lock_lease,
            poll_interval=settings.notify_poll_interval if settings.notify_enabled else settings.poll_interval,
            command_timeout=settings.dispatcher_command_timeout,
            release=lambda attempts: self.hand_back(attempts, UNSTARTED),
            on_failure=loop_failed,
        )
        self.completer = Completer(
            dispatch_pool,
            schema,
            self._leases,
            command_timeout=settings.dispatcher_command_timeout,
            on_repended=self.producer.woken,
            before=self._progress.store_last,
            on_ended=self._ended,
            on_freed=self.producer.freed,
            relay=self.producer.relay,
            on_backlog=self.slots.hold,
        )
        self._wake = WakeSender(worker_pool, schema, loop_failed)
        enqueuer = Enqueuer(
            schema,
            key_max_bytes=settings.idempotency_key_max_bytes,
            max_backoff=settings.max_retry_backoff,
            heartbeat_window=(2 * settings.heartbeat_interval, settings.lock_lease),
        )
        self.container = Container(registry.providers, {Settings: settings})
        self.transactions: SlotTransactions | None = None
        """Those of the slots, where actors work in transactions."""
        if slot_pool is not None:
            self.transactions = SlotTransactions(
                slot_pool,
                enqueuer,
                self._wake,
                self.completer,
                self._progress,
                command_timeout=settings.dispatcher_command_timeout,
            )
        self.consumers = Consumers(
            self.slots,
            self.completer,
            self._progress,
            Jobs(worker_pool, enqueuer, AutonomousWake(self._wake, registry)),
            worker_id=worker_id,
            default_start_to_close=settings.default_start_to_close,
            cleanup_grace=settings.cleanup_grace_period,
            result_max_bytes=settings.result_max_bytes,
            message_max_chars=settings.exception_message_max_chars,
            max_backoff=settings.max_retry_backoff,
            injection=Injection.of(registry, self.container, self.transactions),
            keeps_errors=ErrorReporter in registry.providers,
        )
        self.consumers.deferred = DeferredPayloads(
            dispatch_pool, schema, registry, worker_id=worker_id, timeout=settings.dispatcher_command_timeout
        )
        self.ladder = CancelLadder(
            dispatch_pool,
            schema,
            self._leases,
            self.consumers,
            self.completer,
            grace=settings.cancellation_grace_period,
            cleanup_grace=settings.cleanup_grace_period,
            command_timeout=settings.dispatcher_command_timeout,
        )
        self.heartbeat = Heartbeat(
            settings.direct_dsn(),
            schema,
            group,
            worker_id,
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
            on_cancelled=self.ladder.begin,
            on_isolated=self._on_isolated,
            on_recovered=self._on_recovered,
            on_unprovable=lambda why: trip("lease", why),
            login=login_of(settings),
        )
        self.listener: Listener | None = None
        if settings.notify_enabled:
            self.listener = Listener(
                settings.direct_dsn(),
                schema,
                group,
                {wake_channel(schema): self.producer.woken, cancel_channel(schema): self.heartbeat.beat_soon},
                on_failure=loop_failed,
                check_interval=settings.notify_health_check_interval,
                setup_timeout=settings.notify_listener_setup_timeout,
                backoff=settings.notify_reconnect_backoff_initial,
                login=login_of(settings),
            )
        self.credentials = Rotation(
            login_of(settings),
            credential,
            {
                "dispatch pool": dispatch_pool.swap,
                "worker pool": worker_pool.swap,
                **({} if slot_pool is None else {"slot pool": slot_pool.swap}),
                "heartbeat": self.heartbeat.renew,
                **({} if self.listener is None else {"listener": self.listener.renew}),
            },
            interval=settings.pg_credential_refresh_interval,
            on_renewed=lambda results: told(_log, results),
            on_failure=loop_failed,
            turn=Turn.from_environ(),
        )
        self.reports: ErrorReports | None = None
        """What tells of failures, where the application registers somebody to be told."""
        self.group_row = GroupRow(dispatch_pool, schema, group, loop_failed)
        """That of the group that this worker is part of, if any."""

    @classmethod
    async def open(
        cls,
        settings: Settings,
        registry: Registry,
        worker_id: UUID,
        group: str,
        *,
        enlist: Callable[[SwapPool], Awaitable[None]],
        on_retry: Callable[[str, float], None],
    ) -> Engine:
        """Open the pools, make what actors depend on, and build the parts.

        Arguments and errors are those of ``open_pools``, and the errors of ``open_slot_pool`` and ``Container.open``.
        """
        dispatch, worker, credential = await open_pools(settings, group, enlist=enlist, on_retry=on_retry)
        pools = [dispatch, worker]
        slot_pool = None
        try:
            if registry.is_transactional:
                slot_pool = await open_slot_pool(settings, group, on_retry=on_retry)
                pools.append(slot_pool)
            engine = cls(settings, registry, worker_id, group, dispatch, worker, credential, slot_pool)
            await engine.open_dependencies()
        except BaseException:
            for pool in pools:
                pool.terminate()
            raise
        return engine

    async def open_dependencies(self) -> None:
        """Make what actors depend on, and what is told of failures. Raises ``ProviderFailed``."""
        reporting = [ErrorReporter] if ErrorReporter in self._registry.providers else []
        here = (ref for ref in self._registry.values() if not ref.isolated)
        await self.container.open(here, *reporting)
        if reporting:
            reader = JobReader(self._dispatch_pool, self._settings.schema_name)
            self.reports = ErrorReports(self.container.find(ErrorReporter), reader, on_failure=loop_failed)

    async def isolate(self, zygote: Launched, on_lost: Callable[[], None]) -> None:
        """Run isolated actors in processes that ``zygote`` forks. Arguments and errors are ``Isolation.start``'s."""
        settings = self._settings
        self.isolation = self.consumers.isolation = Isolation(
            zygote,
            self._progress,
            self._worker_pool,
            self._wake.request,
            orders_of(settings, self._worker_id),
            cleanup_grace=settings.cleanup_grace_period,
            result_max_bytes=settings.result_max_bytes,
        )
        await self.isolation.start(on_lost)

    def start(self) -> None:
        """Start every part, the producer last."""
        _spare_collections()
        if self.reports is not None:
            self.reports.loop.start()
        self.heartbeat.start()
        self._wake.start()
        self._progress.loop.start()
        self.hooks.start()
        self.completer.start()
        self.consumers.start()
        if self.listener is not None:
            self.listener.start()
        self.credentials.start()
        self.producer.start()

    def ended_part(self) -> str:
        """Name a part that has ended while all of them should run, with its error; empty while none has."""
        if self._draining:
            return ""
        loops = (self.producer.loop, self._progress.loop, self.hooks.loop)
        return "; ".join([*self.consumers.crashed, *(f"{loop.name} was cancelled" for loop in loops if loop.has_ended)])

    def set_quiet(self, quiet: bool) -> None:
        """Claim nothing more while quiet; what runs goes on."""
        self._quiet = quiet
        self._apply_pause()

    def watch_idle(self, max_runtime: float | None, on_end: Callable[[ExitCode], None]) -> IdleWatch:
        """Start looking for the moment when the queues are empty; see :class:`IdleWatch`."""
        watch = IdleWatch(
            self._dispatch_pool,
            self._settings.schema_name,
            self._settings.queues,
            list(self._registry),
            self._worker_id,
            max_runtime=max_runtime,
            command_timeout=self._settings.dispatcher_command_timeout,
            on_end=on_end,
            on_failure=loop_failed,
        )
        watch.start()
        return watch

    @property
    def held(self) -> int:
        """Rows that this worker holds and nobody has settled."""
        return len(self._leases)

    async def release(self, workers: Sequence[UUID]) -> int:
        """Settle what these dead workers held; return how many rows came back."""
        if self._worker_id in workers:
            raise ValueError("a worker does not release its own rows")
        return await release_workers(
            self._dispatch_pool,
            self._settings.schema_name,
            workers,
            timeout=self._settings.dispatcher_command_timeout,
        )

    # -- events of the parts ------------------------------------------------------------------------

    def _ended(self, outcome: Outcome, status: str) -> None:
        self.hooks.ended(outcome, status)
        if self.reports is not None:
            self.reports.ended(outcome, status)

    def _room_made(self) -> None:
        self.producer.room_made()

    def _apply_pause(self) -> None:
        if not self._draining:
            self.producer.pause(self._quiet or self.isolated)

    def _on_lost(self, attempts: Sequence[Attempt]) -> None:
        running = set(self.consumers.running)
        for attempt in attempts:
            if attempt not in running or attempt.ended_at is not None:
                continue  # its outcome is with the completer, or its transaction, which finds out by itself
            attempt.disowned = True
            self._leases.discard(attempt)
            self.completer.lost += 1
            attempt.cancellation.request(CancelOrigin.LEASE_LOST)
            self.consumers.cancel(attempt)
            _log.warning("lease-lost", job_id=str(attempt.job_id), epoch=attempt.epoch, actor=attempt.ref.name)

    def _on_isolated(self) -> None:
        """Leases are about to end: stop what runs, claim nothing, and stay for when the database is back."""
        _log.error("worker-isolated", held=len(self._leases))
        self.isolated = True
        self._apply_pause()
        self.hand_back(self.slots.take_all(), ISOLATED)
        self.consumers.request_stop(CancelOrigin.SHUTDOWN)
        self.cancel_all()

    def _on_recovered(self) -> None:
        _log.info("worker-recovered")
        self.isolated = False
        self.ladder.hurry(False)
        self._apply_pause()

    def cancel_all(self) -> None:
        """Cancel what runs, and whatever ignores a cancellation sooner."""
        self.ladder.hurry()
        self.consumers.cancel()

    def hand_back(self, attempts: list[Attempt], cause: str) -> None:
        """Give back rows that have not begun, for the reason ``cause``."""
        for attempt in attempts:
            self.completer.submit(Released(attempt, None, cause))

    # -- stop ---------------------------------------------------------------------------------------

    async def drain(self, plan: ShutdownPlan, plan_changed: asyncio.Event, enter: Callable[[str], None]) -> None:
        """Stop by ``plan``, whose times may move earlier, saying so by ``plan_changed``; ``enter`` is told each phase.

        Unstarted rows go back, handlers may finish, then are cancelled, then released.
        """
        self._draining = True
        await Drain(self, plan, plan_changed, enter).run()

    async def end_claims(self) -> None:
        """Claim nothing more; a claim under way may end."""
        await self.producer.stop(self._settings.dispatcher_command_timeout)

    async def record_stop(self) -> None:
        """Record that this worker stops: what it leaves behind is no crash then."""
        try:
            await self._dispatch_pool.execute(self._sql.stop_worker, self._worker_id, timeout=2.0)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            # Rows left behind are then counted as crashes, which spends an attempt of theirs.
            _log.warning("stop-not-recorded", error=type(error).__name__)

    async def close(self, *, with_group: bool = False) -> None:
        """Close every part at once, each within its bound; what does not close in time goes with the process.

        ``with_group``: the whole group ends.
        """
        self.heartbeat.stop()
        closes: list[Awaitable[Any]] = [
            self.producer.stop(0.1),
            self._progress.loop.stop(0.1),
            self._wake.close(),
            self.credentials.stop(0.5),
            self.group_row.loop.stop(0.1),
            self.completer.stop(TAIL - 1),
            self.container.close(),
            self.heartbeat.wait_stopped(TAIL - 1),
        ]
        if self.listener is not None:
            closes.append(self.listener.stop(TAIL - 1))
        if self.isolation is not None:
            closes.append(self.isolation.close())
        await all_within(TAIL - 1, *closes)
        farewells: list[Awaitable[Any]] = [self._dispatch_pool.execute(self._sql.unregister_worker, self._worker_id)]
        if with_group:
            farewells.append(self.group_row.withdraw())
        await all_within(0.5, *farewells)
        await all_within(0.5, *(pool.close() for pool in self.pools))
        for pool in self.pools:
            pool.terminate()


def _spare_collections() -> None:
    """What is in memory by now stays: collections need not look at it. And thousands of objects come and go with the
    jobs of one claim, which is no reason to look for garbage."""
    gc.freeze()
    young, *older = gc.get_threshold()
    if young:
        gc.set_threshold(max(young, COLLECT_AFTER), *older)


def loop_failed(name: str, error: BaseException, streak: int) -> None:
    """Log the failure of a background loop; it goes on after a backoff."""
    _log.warning("loop-failed", loop=name, streak=streak, error=f"{type(error).__name__}: {error}")
