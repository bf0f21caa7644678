"""Tells actors of the ends of their jobs."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from taskqd.actors.actor import ActorRef
from taskqd.actors.registry import Registry
from taskqd.client.reads import JobReader
from taskqd.client.rows import JobRow
from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.domain.errors import RecordedError
from taskqd.observe.logs import get_logger
from taskqd.storage.statements import load
from taskqd.worker.outcome import Failed, Outcome, Released, Succeeded

AT_ONCE = 8
"""Hooks that run at the same time."""
MAX_WAITING = 10_000
"""Ends that wait here for their hooks; more are handed to the database."""
UNSEEN_EVERY = 5.0
"""Seconds between two looks for ends that no worker saw."""
TAKEN_FOR = 4 * 300.0
"""Seconds after which an end that a worker took, and did not tell, is another's: a few times the longest hook."""
_NOTHING = object()

_log = get_logger("taskqd.hooks")


@dataclass(slots=True)
class _End:
    job_id: UUID
    epoch: int
    ref: ActorRef[Any, Any]
    status: str
    value: Any = _NOTHING
    error: BaseException | None = None
    stored: bool = False
    """True when the database remembers that it is still to be told."""


class HookRunner:
    """Calls the hooks of actors, a few at a time: at once for ends that this worker settled, within seconds for those
    that no worker saw. What is not told when the worker stops is handed to the database, and told by another."""

    def __init__(
        self, pool: Any, schema: str, registry: Registry, *, command_timeout: float, on_failure: FailureHook
    ) -> None:
        self._pool = pool
        self._sql = load("worker", schema)
        self._reader = JobReader(pool, schema)
        self._refs = {name: ref for name, ref in registry.items() if ref.has_hooks}
        self._command_timeout = command_timeout
        self._waiting: deque[_End] = deque()
        self._telling: set[asyncio.Task[None]] = set()
        self._overflow: list[_End] = []
        self.loop = BackgroundLoop("hooks", self._step, cadence=UNSEEN_EVERY, on_failure=on_failure)

    def start(self) -> None:
        """Start, if any actor has hooks."""
        if self._refs:
            self.loop.start()

    def ended(self, outcome: Outcome, status: str) -> None:
        """Take an end that was just settled; ``status`` is the job's now."""
        attempt = outcome.attempt
        never_began = isinstance(outcome, Released) and outcome.seconds is None
        if never_began or not attempt.ref.has_hooks or status not in _HOOK_OF:
            return
        end = _End(attempt.job_id, attempt.epoch, attempt.ref, status)
        if isinstance(outcome, Succeeded):
            end.value = outcome.value
        elif isinstance(outcome, Failed):
            end.error = outcome.error
        (self._waiting if len(self._waiting) < MAX_WAITING else self._overflow).append(end)
        self.loop.wake()

    async def finish(self, timeout: float) -> None:
        """Tell what can be told within ``timeout`` seconds and hand the rest to the database. Call it at the end."""
        try:
            async with asyncio.timeout(timeout):
                while self._waiting or self._telling:
                    self.loop.wake()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        await self.loop.stop(0.1)
        for task in self._telling:
            task.cancel()
        await self._defer(list(self._untold()))

    def _untold(self) -> Sequence[_End]:
        untold = [*self._overflow, *self._waiting, *(task.end for task in self._telling if isinstance(task, _Telling))]
        return [end for end in untold if not end.stored]

    async def _step(self) -> None:
        if self._overflow:
            overflow, self._overflow = self._overflow, []
            await self._defer(overflow)
        while self._waiting and not self.loop.stopping:
            await self._tell([self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))])
        if self._refs and not self.loop.stopping:
            await self._tell(await self._unseen())

    # -- ends that the database keeps ----------------------------------------------------------------

    async def _unseen(self) -> list[_End]:
        records = await self._pool.fetch(
            self._sql.take_unseen_ends, list(self._refs), AT_ONCE, TAKEN_FOR, timeout=self._command_timeout
        )
        if len(records) == AT_ONCE:
            self.loop.wake()
        return [_End(job, epoch, self._refs[actor], status, stored=True) for job, epoch, actor, status in records]

    async def _defer(self, ends: Sequence[_End]) -> None:
        if not ends:
            return
        try:
            await self._pool.execute(
                self._sql.defer_ends,
                [end.job_id for end in ends],
                [end.epoch for end in ends],
                [end.ref.name for end in ends],
                [end.status for end in ends],
                timeout=self._command_timeout,
            )
        except Exception as error:
            _log.error("hooks-lost", ends=len(ends), error=type(error).__name__)

    # -- one hook ------------------------------------------------------------------------------------

    async def _tell(self, ends: Sequence[_End]) -> None:
        tasks = [_Telling(self._call(end), end) for end in ends]
        self._telling.update(tasks)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._telling.difference_update(task for task in tasks if task.done() and not task.cancelled())
        # Not the hook's own errors, which are logged: the database did not answer. What it keeps it will give again.
        errors = [error for error in results if isinstance(error, Exception)]
        failed = [end for end, result in zip(ends, results, strict=True) if isinstance(result, Exception)]
        self._waiting.extend(end for end in failed if not end.stored)
        if errors:
            raise errors[0]

    async def _call(self, end: _End) -> None:
        name = _HOOK_OF[end.status]
        hook = getattr(end.ref.hooks, name)
        timeout = getattr(end.ref.hooks, f"{name}_timeout")
        row = None if hook is None else await self._reader.find(end.job_id)
        if hook is not None and row is not None:
            try:
                async with asyncio.timeout(timeout):
                    arguments = (row, *_more(name, end, row))
                    if inspect.iscoroutinefunction(hook):
                        await hook(*arguments)
                    else:
                        await asyncio.to_thread(hook, *arguments)
            except Exception as error:
                _log.warning("hook-failed", hook=name, actor=end.ref.name, job_id=str(end.job_id), error=repr(error))
        if end.stored:
            await self._pool.execute(self._sql.forget_unseen_end, end.job_id, end.epoch, timeout=self._command_timeout)


class _Telling(asyncio.Task[None]):
    """The call of one end's hook, which knows its end."""

    def __init__(self, coroutine: Any, end: _End) -> None:
        super().__init__(coroutine, name=f"hook-{end.job_id}")
        self.end = end


_HOOK_OF = {
    "succeeded": "on_success",
    "failed": "on_retry_exhausted",
    "crashed": "on_retry_exhausted",
    "cancelled": "on_cancel",
    "abandoned": "on_cancel",
}


def _more(name: str, end: _End, row: JobRow) -> tuple[Any, ...]:
    """What a hook is given beside the row."""
    if name == "on_success":
        return (end.ref.decode_result(row.result_text) if end.value is _NOTHING else end.value,)
    if name == "on_retry_exhausted":
        return (end.error or RecordedError(row.error_class or "", row.error_message or ""),)
    return ()
