"""How a worker stops: what has not begun goes back, what runs may finish, then is cancelled, then released."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from taskqd.domain.signals import CancelOrigin
from taskqd.worker.outcome import SHUTDOWN, Released
from taskqd.worker.shutdown import TAIL, ShutdownPlan

if TYPE_CHECKING:
    from taskqd.worker.engine import Engine

CLAIM_TAIL = 1.0
"""Seconds, at least, that a claim under way and the record of the stop may take."""
KILL_TAIL = 2.0
"""Seconds that a worker which stops waits for the ends of the processes that it has killed."""
HOOK_TAIL = 1.0
"""Seconds that a worker which stops gives the hooks that are still to be called."""


class Drain:
    """One stop of ``engine``. Arguments are those of ``Engine.drain``."""

    def __init__(
        self, engine: Engine, plan: ShutdownPlan, plan_changed: asyncio.Event, enter: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._plan_changed = plan_changed
        self._enter = enter

    async def run(self) -> None:
        """Return once everything is settled or left to its lease, or the time of the plan is over."""
        engine, plan = self._engine, self._plan
        self._enter("draining")
        recorded = asyncio.ensure_future(engine.record_stop())
        engine.slots.close()
        engine.consumers.request_stop(CancelOrigin.SHUTDOWN)
        engine.hand_back(engine.slots.take_all(), SHUTDOWN)
        # Beside the rest: a claim that the database does not answer must not use up the time of what runs.
        claims = asyncio.ensure_future(self._end_claims())
        if not await self._consumers_ended(lambda: plan.cancel_at):
            self._enter("cancelling")
            engine.cancel_all()
            if not await self._consumers_ended(lambda: plan.force_at):
                self._enter("releasing")
                self._release_running()
                if engine.isolation is not None:
                    await engine.isolation.wait_idle(KILL_TAIL)
        await asyncio.wait([recorded, claims], timeout=max(CLAIM_TAIL, plan.force_at - time.monotonic()))
        await engine.completer.flush(max(0.5, min(TAIL, plan.deadline - time.monotonic() - 1.0)))
        ends: list[Awaitable[None]] = [engine.hooks.finish(HOOK_TAIL)]
        if engine.reports is not None:
            ends.append(engine.reports.finish(HOOK_TAIL))
        await asyncio.gather(*ends)

    async def _end_claims(self) -> None:
        await self._engine.end_claims()
        self._engine.hand_back(self._engine.slots.take_all(), SHUTDOWN)  # what a claim under way brought

    async def _consumers_ended(self, until: Callable[[], float]) -> bool:
        consumers = self._engine.consumers
        while (left := until() - time.monotonic()) > 0:
            self._plan_changed.clear()
            ended = asyncio.ensure_future(consumers.wait_ended(left))
            changed = asyncio.ensure_future(self._plan_changed.wait())
            await asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if ended.done() and ended.result():
                return True
            ended.cancel()
        return await consumers.wait_ended(0.01)

    def _release_running(self) -> None:
        """Hand back what ignored its cancellation. A plain function's row stays: its thread still works on it."""
        engine = self._engine
        for attempt in engine.consumers.running:
            if engine.isolation is not None and attempt.ref.isolated:
                engine.isolation.kill(attempt)
                continue
            if attempt.started_at is None or attempt.ref.is_sync or attempt.given_up:
                continue
            if attempt.climb is not None:
                engine.ladder.abandon(attempt)
            else:
                attempt.disowned = True
                engine.completer.submit(Released(attempt, time.monotonic() - attempt.started_at, SHUTDOWN))
