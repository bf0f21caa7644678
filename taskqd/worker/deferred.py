"""Payloads that are made when a fired job first runs."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from taskqd.actors.actor import ActorRef
from taskqd.actors.schedules import PayloadFactory, declared_schedules
from taskqd.domain.errors import PayloadFactoryError, TaskQError
from taskqd.observe.logs import get_logger
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt

DEFERRED = "null"
"""What a job carries whose payload is still to be made: no actor's model is ``null``."""
FACTORY_TIMEOUT = 5.0
"""Seconds that one factory may take."""

_log = get_logger("taskqd.worker.deferred")


class DeferredPayloads:
    """Makes payloads by the factories that the actors of this worker declare, and stores them with their jobs."""

    def __init__(
        self, pool: Any, schema: str, registry: Mapping[str, ActorRef[Any, Any]], *, worker_id: UUID, timeout: float
    ) -> None:
        self._pool = pool
        self._sql = load("schedules", schema)
        self._worker_id = worker_id
        self._timeout = timeout
        self._factories: dict[str, PayloadFactory] = {
            declared.definition.payload_factory: declared.factory
            for declared in declared_schedules(registry.values()).values()
            if declared.definition.payload_factory is not None and declared.factory is not None
        }

    async def payload(self, attempt: Attempt) -> str:
        """Return the payload of a job that was claimed with none, and store it for its retries.

        Raises ``PayloadFactoryError`` where none could be made: the schedule has a strike then. A factory that hangs in
        a thread is left behind.
        """
        record = await self._pool.fetchrow(self._sql.deferred, attempt.job_id, attempt.epoch, timeout=self._timeout)
        if record is None:
            return attempt.payload  # null is what somebody enqueued
        about = json.loads(record["schedule"])
        name = about["payload_factory"]
        factory = self._factories.get(name)
        if factory is None:
            raise TaskQError(  # retried: a worker of another release may know it
                f"payload factory {name!r} of schedule {about['name']!r} is declared by no actor of this worker"
            )
        try:
            async with asyncio.timeout(FACTORY_TIMEOUT):
                made = await _call(factory, datetime.fromisoformat(about["due_at"]))
            text = attempt.ref.encode_payload(made)
        except Exception as error:
            hung = isinstance(error, TimeoutError)
            why = f"took longer than {FACTORY_TIMEOUT:g} s" if hung else f"{type(error).__name__}: {error}"
            problem = f"payload factory {name!r} of schedule {about['name']!r}: {why}"
            await self._strike(attempt, UUID(about["id"]), about["name"], problem)
            raise PayloadFactoryError(problem) from (None if hung or isinstance(error, TaskQError) else error)
        await self._pool.execute(
            self._sql.store_payload, attempt.job_id, attempt.epoch, text, UUID(about["id"]), timeout=self._timeout
        )
        return text

    async def _strike(self, attempt: Attempt, schedule: UUID, name: str, problem: str) -> None:
        paused = await self._pool.fetchval(
            self._sql.strike_schedule,
            attempt.job_id,
            attempt.epoch,
            schedule,
            problem.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode(),
            self._worker_id,
            timeout=self._timeout,
        )
        if paused:
            _log.error("schedule-auto-paused", schedule=name, error=problem)


async def _call(factory: PayloadFactory, slot: datetime) -> Any:
    arguments = (slot,) if inspect.signature(factory).parameters else ()
    if inspect.iscoroutinefunction(factory):
        return await factory(*arguments)
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if not made.done():
            made.set_result(result) if error is None else made.set_exception(error)

    def run() -> None:
        result: Any = None
        raised: Exception | None = None
        try:
            result = factory(*arguments)
        except StopIteration as error:  # no future carries it
            raised = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            raised = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, raised)

    # A thread of its own: one that hangs must keep neither a slot nor the process.
    threading.Thread(target=run, name="taskqd-payload-factory", daemon=True).start()
    result = await made
    return await result if inspect.isawaitable(result) else result
