"""Runs actors: N consumers, each with one attempt at a time."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from asyncpg import Connection

from taskqd.actors.context import JobContext, JobEnqueuer
from taskqd.domain.signals import CancelOrigin
from taskqd.observe.logs import get_logger
from taskqd.worker.attempt import Attempt
from taskqd.worker.completer import Completer
from taskqd.worker.deferred import DEFERRED, DeferredPayloads
from taskqd.worker.explainer import Explainer, ran
from taskqd.worker.in_context import InContext
from taskqd.worker.injection import Injection
from taskqd.worker.outcome import CANCELLED, Outcome, Overran, Released, Succeeded
from taskqd.worker.progress import ProgressWriter
from taskqd.worker.slots import Slots
from taskqd.worker.transactional import Slot

if TYPE_CHECKING:
    from taskqd.worker.isolated.runner import Isolation

YIELD_EVERY = 32
"""Attempts after which a consumer that never had to wait lets the rest of the loop run."""

_log = get_logger("taskqd.consumer")


class Consumers:
    """Exactly ``slots.size`` consumers and, for plain functions, as many threads."""

    def __init__(
        self,
        slots: Slots,
        completer: Completer,
        progress: ProgressWriter,
        jobs: JobEnqueuer,
        *,
        worker_id: UUID,
        default_start_to_close: float | None,
        cleanup_grace: float,
        result_max_bytes: int,
        message_max_chars: int,
        max_backoff: float,
        injection: Injection | None = None,
        keeps_errors: bool = False,
    ) -> None:
        self.outcomes = Explainer(
            result_max_bytes=result_max_bytes,
            message_max_chars=message_max_chars,
            max_backoff=max_backoff,
            keeps_errors=keeps_errors,
        )
        self._injection = injection
        self._injected = frozenset[str]() if injection is None else injection.actors
        self._slots = slots
        self._completer = completer
        self._progress = progress
        self._jobs = jobs
        self._worker_id = worker_id
        self._default_start_to_close = default_start_to_close
        self._cleanup_grace = cleanup_grace
        self.isolation: Isolation | None = None
        """What runs isolated actors. None runs them here, as in the process that it has made for one."""
        self.deferred: DeferredPayloads | None = None
        """What makes the payloads of fired jobs that have none yet."""
        self._threads = ThreadPoolExecutor(slots.size, thread_name_prefix="taskqd-actor")
        self._running: dict[asyncio.Task[None], Attempt] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()

    # -- the consumers as a whole -------------------------------------------------------------------

    def start(self) -> None:
        """Start the consumers on the running loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._consume(), name=f"consumer-{n}") for n in range(self._slots.size)]
        for task in self._tasks:
            task.add_done_callback(self._on_end)

    @property
    def running(self) -> list[Attempt]:
        """The attempts whose handlers run now, plain functions' threads included."""
        return list(self._running.values())

    @property
    def all_given_up(self) -> bool:
        """True while every slot is held by a handler that was settled though it had not ended."""
        return len(self._running) == self._slots.size and all(one.given_up for one in self._running.values())

    @property
    def crashed(self) -> list[str]:
        """Consumers that ended by an error of ours; a worker with one is not ready."""
        return [
            f"{task.get_name()}: {task.exception()!r}"
            for task in self._tasks
            if task.done() and not task.cancelled() and task.exception() is not None
        ]

    def request_stop(self, origin: CancelOrigin) -> None:
        """Set the cancel event of every running attempt."""
        for attempt in self._running.values():
            attempt.cancellation.request(origin)

    def is_running(self, attempt: Attempt) -> bool:
        """True while the handler of the attempt runs."""
        return attempt in self._running.values()

    def cancel(self, attempt: Attempt | None = None) -> None:
        """Cancel the task of ``attempt``, or of all but those of cancelled jobs, which are cancelled one by one.

        A plain function in a thread cannot be cancelled and is left alone.
        """
        for task, running in list(self._running.items()):
            wanted = running is attempt if attempt is not None else running.climb is None
            if running.ended_at is not None:
                continue  # it has ended, and a transaction must not be cut at its commit
            if not wanted or running.forced:
                continue
            if self.isolation is not None and running.ref.isolated:
                running.forced = True
                self.isolation.force(running)
            elif not running.ref.is_sync:
                running.forced = True
                task.cancel()

    async def wait_ended(self, timeout: float) -> bool:
        """Wait until every consumer has ended (``slots.close()`` lets them); False after ``timeout`` seconds."""
        if all(task.done() for task in self._tasks):
            return True
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.critical("consumer-crashed", consumer=task.get_name(), exc_info=task.exception())
        if all(one.done() for one in self._tasks):
            self._ended.set()

    # -- one consumer -------------------------------------------------------------------------------

    async def _consume(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        slots, completer = self._slots, self._completer
        in_a_row = 0
        while True:
            attempt = await slots.get()
            if attempt is None:
                return
            self._running[task] = attempt
            attempt.started_at = time.monotonic()
            try:
                outcome = await self._run(attempt)
            finally:
                del self._running[task]
                if attempt.climb is not None:
                    attempt.climb.cancel()
            seconds = (attempt.ended_at or time.monotonic()) - attempt.started_at
            if task.cancelling():
                await _forget_cancellation(task)
            if outcome is not None and not attempt.given_up:
                completer.submit(outcome)
            slots.finished(seconds)
            in_a_row += 1
            if in_a_row >= YIELD_EVERY:
                in_a_row = 0
                await asyncio.sleep(0)

    async def _run(self, attempt: Attempt) -> Outcome | None:
        """Run one attempt and return its outcome; None when nobody wants it any more."""
        ref = attempt.ref
        assert attempt.started_at is not None  # noqa: S101
        if attempt.cancellation.origin is CancelOrigin.OPERATOR:
            return Released(attempt, None, CANCELLED)
        try:
            if attempt.payload == DEFERRED and self.deferred is not None:
                self._slots.more()
                attempt.payload = await self.deferred.payload(attempt)
            payload = ref.decode_payload(attempt.payload)
            if ref.isolated and self.isolation is not None:
                self._slots.more()
                end = await self.isolation.run(attempt, self._limit(attempt))
                return self.outcomes.failure(attempt, end) if isinstance(end, BaseException) else end
            context = contextvars.copy_context()
            if ref.name in self._injected:
                self._slots.more()
                return await self._run_injected(attempt, payload, context)
            arguments = self._arguments(attempt, payload, self._jobs)
            if ref.is_sync:
                call = partial(context.run, ref.fn, *arguments)
                return await self._run_in_thread(attempt, call, self._limit(attempt))
            body = InContext(ref.fn(*arguments), context)
            result = body.result if body.ends_at_once() else await self._rest(attempt, body)
            return self.outcomes.success(attempt, result)
        except BaseException as error:
            return self.outcomes.failure(attempt, error)

    async def _rest(self, attempt: Attempt, body: InContext, *, strictly: bool = False) -> Any:
        """Run a body that has begun to wait, until its attempt's limit, then cancel it. Raises ``Overran``; when
        ``strictly`` then also where the body ended in a way of its own."""
        self._slots.more()
        limit = self._limit(attempt)
        if limit is None:
            return await body
        left = max(0.0, limit - ran(attempt))
        timeout = asyncio.timeout(left)
        overdue = asyncio.get_running_loop().call_later(left + self._cleanup_grace, self._give_up, attempt, limit)
        try:
            async with timeout:
                result = await body
        except Exception as error:
            if timeout.expired() and (strictly or isinstance(error, TimeoutError)):
                raise Overran(limit) from None
            raise
        finally:
            overdue.cancel()
        if strictly and timeout.expired():
            raise Overran(limit)
        return result

    async def _run_injected(self, attempt: Attempt, payload: Any, context: contextvars.Context) -> Outcome | None:
        """Run an attempt whose actor depends on something, or works inside a transaction."""
        ref, injection = attempt.ref, self._injection
        assert injection is not None  # noqa: S101
        if ref.is_sync:
            arguments = self._arguments(attempt, payload, self._jobs)
            call = partial(context.run, injection.container.call_in_thread, ref, arguments)
            return await self._run_in_thread(attempt, call, self._limit(attempt))
        if ref.name not in injection.transactional:
            return await self._run_with(attempt, payload, context, {}, self._jobs)

        async def work(slot: Slot) -> Succeeded:
            jobs = slot.jobs() if ref.wants_ctx else self._jobs
            return await self._run_with(attempt, payload, context, {Connection: slot.connection}, jobs)

        return await injection.transactions.run(attempt, work)

    async def _run_with(
        self,
        attempt: Attempt,
        payload: Any,
        context: contextvars.Context,
        given: Mapping[type[Any], Any],
        jobs: JobEnqueuer,
    ) -> Succeeded:
        ref = attempt.ref
        assert self._injection is not None  # noqa: S101
        container = self._injection.container
        ready, scope = container.ready(ref), container.attempt(given)
        failed: BaseException | None = None
        try:
            dependencies = await scope.resolve(ref.dependencies) if ready is None else ready
            arguments = self._arguments(attempt, payload, jobs)
            body = InContext(ref.fn(*arguments, **dependencies), context)
            result = body.result if body.ends_at_once() else await self._rest(attempt, body, strictly=bool(given))
        except BaseException as error:
            failed = error
            raise
        finally:
            await scope.close(failed)
        return self.outcomes.success(attempt, result)

    def _arguments(self, attempt: Attempt, payload: Any, jobs: JobEnqueuer) -> tuple[Any, ...]:
        return (payload, self._context(attempt, payload, jobs)) if attempt.ref.wants_ctx else (payload,)

    def _give_up(self, attempt: Attempt, limit: float) -> None:
        """Settle an attempt whose actor has not ended after its cancellation. Its slot stays taken until it does."""
        if attempt.given_up:
            return
        _log.warning("cancellation-ignored", job_id=str(attempt.job_id), actor=attempt.ref.name, start_to_close=limit)
        attempt.given_up = True
        attempt.cancellation.request(CancelOrigin.TIMEOUT)
        self._completer.submit(self.outcomes.timed_out(attempt, limit))

    def _limit(self, attempt: Attempt) -> float | None:
        """Seconds the attempt may run: the job's own, else its actor's, else the worker's default."""
        if attempt.start_to_close is not None:
            return attempt.start_to_close
        declared = attempt.ref.start_to_close
        return self._default_start_to_close if declared is None else declared.total_seconds()

    async def _run_in_thread(self, attempt: Attempt, call: partial[Any], limit: float | None) -> Outcome | None:
        """Run a plain function. Its slot stays taken until its thread ends, whatever has become of the attempt."""
        self._slots.more()
        thread = asyncio.get_running_loop().run_in_executor(self._threads, _caught, call)
        done, _ = await asyncio.wait([thread], timeout=limit)
        if not done and not attempt.given_up:
            assert limit is not None  # noqa: S101
            attempt.cancellation.request(CancelOrigin.TIMEOUT)
            self._completer.submit(self.outcomes.timed_out(attempt, limit))
            attempt.given_up = True
        if not done:
            await asyncio.wait([thread])
            return None
        result, error = thread.result()
        return self.outcomes.success(attempt, result) if error is None else self.outcomes.failure(attempt, error)

    def _context(self, attempt: Attempt, payload: Any, jobs: JobEnqueuer) -> JobContext[Any]:
        return JobContext(
            job_id=attempt.job_id,
            actor=attempt.ref.name,
            queue=attempt.queue,
            attempt=attempt.number,
            fence_token=attempt.epoch,
            batch_id=attempt.batch_id,
            worker_id=self._worker_id,
            payload=payload,
            jobs=jobs,
            log=get_logger("taskqd.actor").bind(
                job_id=str(attempt.job_id), actor=attempt.ref.name, queue=attempt.queue, attempt=attempt.number
            ),
            cancellation=attempt.cancellation,
            progress=partial(self._progress.open, attempt),
        )


async def _forget_cancellation(task: asyncio.Task[None]) -> None:
    """Clear what the actor, or we, asked of the task, so that it hits no later attempt."""
    while task.cancelling():
        task.uncancel()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return  # asked for and never waited for: before Python 3.13 it survives uncancel()


def _caught(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call and return the result and the error. A future refuses to carry a StopIteration, and would never be done."""
    try:
        return call(), None
    except BaseException as error:
        return None, error
