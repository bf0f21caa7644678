"""Writes outcomes to the database in groups."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain, repeat
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.domain.background import BackgroundLoop
from taskqd.observe.logs import get_logger
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.lane_claims import NO_CLAIM, Relay
from taskqd.worker.outcome import Abandoned, CommitLost, Failed, Outcome, Released, Snoozed, Succeeded

GROUP = 256
LINGER = 0.002
"""Seconds a group is collected for, unless the completer was idle."""
BACKLOG = 8 * GROUP
"""Outcomes of either kind that may wait here; beyond it nothing of the kind is begun."""
RETRIES = (0.05, 0.2, 0.8)
"""Seconds before a settlement that failed is tried again; the last of them as often as the budget allows."""
RETRY_BUDGET = 5.0
FIRST_STRAGGLER_PAUSE, LONGEST_STRAGGLER_PAUSE = 0.05, 1.0

BAD_DATA = (asyncpg.DataError, asyncpg.ProgramLimitExceededError, UnicodeError)
"""What Postgres, or the driver, says to values it cannot store; trying the same again cannot help."""

_log = get_logger("taskqd.completer")


class Completer:
    """Takes outcomes and settles them: at once when idle, else in groups of 2 ms or 256 rows.

    A row that somebody else holds locked is retried alone and delays no other. When the database cannot be written
    the group is retried within 5 s; what still fails is left to its lease. What Postgres refuses to store is found by
    bisection and settles as failed with a diagnostic, so that every outcome can be written.

    ``on_repended()`` is called when a settlement put a job straight back into its queue, ``before(attempts)`` before
    attempts are settled, ``on_ended(outcome, status)`` once for each that was applied, with its job's status then, and
    ``on_freed(attempt)`` for each that gave back a limit or an identity. Others wait for those, so they are settled
    beside the groups, not behind them, and their successes by a statement that may claim for others too, which
    ``relay(attempts)`` gives it. ``on_backlog(plain, limited)`` is called when outcomes of what nothing limits, or of
    what something does, begin or cease to wait in greater number than they may.
    """

    def __init__(
        self,
        pool: Any,
        schema: str,
        leases: Leases,
        *,
        command_timeout: float,
        on_repended: Callable[[], None],
        before: Callable[[Sequence[Attempt]], Awaitable[None]],
        on_ended: Callable[[Outcome, str], None],
        on_freed: Callable[[Attempt], None],
        relay: Callable[[Sequence[Attempt]], AbstractAsyncContextManager[Relay]],
        on_backlog: Callable[[bool, bool], None],
    ) -> None:
        self._pool = pool
        self._sql = load("worker", schema)
        self._leases = leases
        self._command_timeout = command_timeout
        self._on_repended = on_repended
        self._before = before
        self._on_ended = on_ended
        self._on_freed = on_freed
        self._relay = relay
        self._on_backlog = on_backlog
        self._waiting: deque[Outcome] = deque()
        self._limited: deque[Outcome] = deque()
        """Those of attempts that hold what others wait for."""
        self._writing = 0
        self._stragglers: list[_Straggler] = []
        self._last_write = 0.0
        self._backlog = (False, False)
        self._empty = asyncio.Event()
        self._empty.set()
        self.succeeded = 0
        self.failed = 0
        self.lost = 0
        """Outcomes of attempts that were no longer this worker's."""
        self.disowned = 0
        """Outcomes that could not be written and were left to their leases."""
        self._loop = BackgroundLoop("completer", self._step, cadence=60.0, on_failure=_unexpected)
        self._limited_loop = BackgroundLoop(
            "completer-limited", self._step_limited, cadence=60.0, on_failure=_unexpected
        )
        self._straggler_loop = BackgroundLoop(
            "completer-stragglers", self._step_stragglers, cadence=60.0, on_failure=_unexpected
        )

    @property
    def _loops(self) -> tuple[BackgroundLoop, ...]:
        return (self._loop, self._limited_loop, self._straggler_loop)

    def start(self) -> None:
        """Start to settle."""
        for loop in self._loops:
            loop.start()

    async def stop(self, timeout: float) -> None:
        """Let what is being settled finish within ``timeout`` seconds; see :meth:`flush`."""
        await asyncio.gather(*(loop.stop(timeout) for loop in self._loops))

    def submit(self, outcome: Outcome) -> None:
        """Take an outcome. The attempt's lease is renewed until it is settled."""
        limited = bool(outcome.attempt.lane)
        (self._limited if limited else self._waiting).append(outcome)
        self._empty.clear()
        if len(self._waiting) >= BACKLOG or len(self._limited) >= BACKLOG:
            self._tell_backlog()
        (self._limited_loop if limited else self._loop).wake()

    def settled(self, outcome: Succeeded) -> None:
        """Take note of a success that its own transaction has written."""
        self._leases.discard(outcome.attempt)
        self.succeeded += 1
        if outcome.attempt.lane:
            self._on_freed(outcome.attempt)
        if outcome.attempt.ref.has_hooks:
            self._on_ended(outcome, "succeeded")

    def leave(self, attempt: Attempt) -> None:
        """Leave an attempt to its lease: the reaper gives its job to somebody else."""
        attempt.disowned = True
        self._leases.discard(attempt)
        self.disowned += 1

    async def flush(self, timeout: float) -> bool:
        """Wait until everything is settled or disowned; False after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    # -- the loops ----------------------------------------------------------------------------------

    async def _step(self) -> float | None:
        if self._waiting:
            if len(self._waiting) < GROUP and time.monotonic() - self._last_write < LINGER:
                await asyncio.sleep(LINGER)
            await self._settle_group(self._waiting)
            self._last_write = time.monotonic()
        self._tell_empty()
        return 0.0 if self._waiting else None

    async def _step_limited(self) -> float | None:
        if self._limited:
            await self._settle_group(self._limited)
        self._tell_empty()
        return 0.0 if self._limited else None

    async def _step_stragglers(self) -> float | None:
        await self._settle_stragglers()
        self._tell_empty()
        return min((straggler.due - time.monotonic() for straggler in self._stragglers), default=None)

    def _tell_empty(self) -> None:
        if not (self._waiting or self._limited or self._writing or self._stragglers):
            self._empty.set()

    def _tell_backlog(self) -> None:
        limited = len(self._limited) >= BACKLOG
        backlog = (len(self._waiting) >= BACKLOG, limited)
        if backlog != self._backlog:
            self._backlog = backlog
            self._on_backlog(*backlog)

    async def _settle_group(self, waiting: deque[Outcome]) -> None:
        group = [waiting.popleft() for _ in range(min(GROUP, len(waiting)))]
        self._tell_backlog()
        self._writing += 1
        try:
            await self._settle_all(group)
        finally:
            self._writing -= 1

    async def _settle_all(self, group: Sequence[Outcome]) -> None:
        await self._before([outcome.attempt for outcome in group])
        by_kind: dict[type[Outcome], list[Outcome]] = {}
        for outcome in group:
            if outcome.attempt.disowned and not isinstance(outcome, Released):
                self._leases.discard(outcome.attempt)  # counted by whoever disowned it
            else:
                by_kind.setdefault(type(outcome), []).append(outcome)
        for kind, outcomes in by_kind.items():
            outcomes.sort(key=lambda outcome: outcome.attempt.job_id)
            await self._settle(kind, outcomes)

    async def _settle(self, kind: type[Outcome], outcomes: list[Outcome]) -> None:
        deadline = time.monotonic() + RETRY_BUDGET
        for failures, pause in enumerate(chain(RETRIES, repeat(RETRIES[-1]))):
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - time.monotonic()):
                    outcomes = await self._write(kind, outcomes, relays=failures == 0)
                    while outcomes:
                        await self._classify(outcomes[-1])
                        outcomes.pop()
            except BAD_DATA as error:
                await self._bisect(kind, outcomes, error)
                return
            except asyncpg.LockNotAvailableError:  # somebody holds a gate that one of them gives back
                self._retry_alone(*outcomes)
                return
            except Exception as error:
                if time.monotonic() + pause >= deadline:
                    self._disown(outcomes, error)
                    return
                await asyncio.sleep(pause)
            else:
                return

    async def _write(self, kind: type[Outcome], outcomes: list[Outcome], *, relays: bool) -> list[Outcome]:
        """Write outcomes of one kind and return those it did not apply to. ``relays`` lets it carry a claim."""
        if not outcomes:
            return []
        statement, columns = self._statement(kind, outcomes)
        relayed = False
        if kind is Succeeded:
            applied = None
            if relays and any(outcome.attempt.lane for outcome in outcomes):
                applied = await self._relayed(statement, columns, [outcome.attempt for outcome in outcomes])
                relayed = applied is not None
            if applied is None:
                applied = await self._pool.fetchval(statement, *columns, *NO_CLAIM, timeout=self._command_timeout) or []
            statuses = ["succeeded"] * len(applied)
            self.succeeded += len(applied)
        else:
            record = await self._pool.fetchrow(statement, *columns, timeout=self._command_timeout)
            applied, statuses = record["ids"] or [], record["statuses"] or []
            self.failed += record["failed"]
            if record["repended"]:
                self._on_repended()
        became = dict(zip(applied, statuses, strict=True))
        left = []
        for outcome in outcomes:
            status = became.get(outcome.attempt.job_id)
            if status is None:
                left.append(outcome)
                continue
            self._leases.discard(outcome.attempt)
            if outcome.attempt.lane and not relayed:
                self._on_freed(outcome.attempt)
            if outcome.attempt.ref.has_hooks or status == "failed":
                self._on_ended(outcome, status)
        return left

    async def _relayed(self, statement: str, columns: list[Any], attempts: list[Attempt]) -> list[UUID] | None:
        """Write successes that give back what others wait for, and claim for those in the same commit; None where
        nothing may be claimed now, or the claim was refused and the successes with it."""
        try:
            async with self._relay(attempts) as relay:
                if not relay.carries:
                    return None
                relay.records = await self._pool.fetch(
                    statement, *columns, *relay.arguments, timeout=self._command_timeout
                )
        except asyncpg.LockNotAvailableError:
            raise  # of a gate that they give back; claims wait for none
        except asyncpg.PostgresError as error:
            _log.info("claim-refused", jobs=len(attempts), error=type(error).__name__)
            return None
        return relay.records[0]["ids"] or []

    def _statement(self, kind: type[Outcome], outcomes: Sequence[Any]) -> tuple[str, list[Any]]:
        ids = [outcome.attempt.job_id for outcome in outcomes]
        epochs = [outcome.attempt.epoch for outcome in outcomes]
        seconds = [outcome.seconds for outcome in outcomes]
        if kind is Succeeded:
            return self._sql.settle_succeeded, [ids, epochs, seconds, [outcome.result for outcome in outcomes]]
        if kind is Snoozed:
            return self._sql.settle_snoozed, [ids, epochs, seconds, [outcome.delay for outcome in outcomes]]
        if kind is Released:
            return self._sql.settle_released, [ids, epochs, seconds, [outcome.cause for outcome in outcomes]]
        if kind is Abandoned:
            return self._sql.settle_abandoned, [ids, epochs, seconds]
        return self._sql.settle_failed, [
            ids,
            epochs,
            seconds,
            [outcome.error_class for outcome in outcomes],
            [outcome.message for outcome in outcomes],
            [outcome.traceback for outcome in outcomes],
            [outcome.retry_kind for outcome in outcomes],
            [outcome.delay for outcome in outcomes],
            [outcome.exhausted_class for outcome in outcomes],
        ]

    # -- what a settlement did not apply to ---------------------------------------------------------

    async def _classify(self, outcome: Outcome) -> None:
        """Find out why an outcome did not apply: the row is locked, it is settled already, or it is lost."""
        attempt = outcome.attempt
        state = await self._pool.fetchrow(
            self._sql.settle_state, [attempt.job_id], [attempt.epoch], timeout=self._command_timeout
        )
        if state["held"]:
            self._retry_alone(outcome)
        elif _is_replay(outcome, state):
            self._leases.discard(attempt)
            if state["same_epoch"]:  # it ended the job, and the answer that would have counted it was lost
                self.succeeded += state["status"] == "succeeded"
                self.failed += state["status"] == "failed"
                self._on_ended(outcome, state["status"])
        else:
            self.drop(outcome)

    def _retry_alone(self, *outcomes: Outcome) -> None:
        self._stragglers.extend(map(_Straggler, outcomes))
        self._straggler_loop.wake()

    async def _settle_stragglers(self) -> None:
        due = [straggler for straggler in self._stragglers if straggler.due <= time.monotonic()]
        for straggler in due:
            self._stragglers.remove(straggler)
            self._writing += 1
            try:
                await self._settle(type(straggler.outcome), [straggler.outcome])
            finally:
                self._writing -= 1
            for again in self._stragglers:
                if again.outcome.attempt is straggler.outcome.attempt:
                    again.back_off(straggler.pause)

    def drop(self, outcome: Outcome) -> None:
        """Count an outcome whose attempt is no longer this worker's."""
        self._leases.discard(outcome.attempt)
        if isinstance(outcome, Released) and outcome.seconds is None:
            return  # a replayed hand-back leaves no trace to recognise; nothing was lost by it
        self.lost += 1
        _log.warning(
            "lease-lost",
            job_id=str(outcome.attempt.job_id),
            epoch=outcome.attempt.epoch,
            actor=outcome.attempt.ref.name,
            outcome=type(outcome).__name__.lower(),
        )

    # -- what could not be written ------------------------------------------------------------------

    async def _bisect(self, kind: type[Outcome], outcomes: list[Outcome], error: BaseException) -> None:
        if len(outcomes) > 1:
            middle = len(outcomes) // 2
            await self._settle(kind, outcomes[:middle])
            await self._settle(kind, outcomes[middle:])
            return
        (outcome,) = outcomes
        if isinstance(outcome, Failed) and outcome.error_class == UNSTORABLE:
            self._disown(outcomes, error)
            return
        await self._settle(Failed, [unstorable(outcome, error)])

    def _disown(self, outcomes: list[Outcome], error: BaseException) -> None:
        for outcome in outcomes:
            self.leave(outcome.attempt)
        _log.error("terminal-write-failed", jobs=len(outcomes), error=f"{type(error).__name__}: {error}")


UNSTORABLE = "OutcomeNotStorable"
"""Error class of a job whose own outcome Postgres refused to store."""


def unstorable(outcome: Outcome, error: BaseException) -> Failed:
    """Return what is stored in place of an outcome that Postgres refused to store."""
    _log.error(
        "outcome-not-storable",
        job_id=str(outcome.attempt.job_id),
        actor=outcome.attempt.ref.name,
        error=type(error).__name__,
    )
    return Failed(
        outcome.attempt,
        outcome.seconds or 0.0,
        UNSTORABLE,
        f"the outcome ({type(outcome).__name__}) holds a value that Postgres refused: {type(error).__name__}",
        None,
        retry_kind="non_retryable",
    )


class _Straggler:
    """An outcome whose row somebody else holds locked."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.pause = FIRST_STRAGGLER_PAUSE
        self.due = time.monotonic() + self.pause

    def back_off(self, previous: float) -> None:
        self.pause = min(LONGEST_STRAGGLER_PAUSE, previous * 2)
        self.due = time.monotonic() + self.pause


_ENDS: dict[type[Outcome], tuple[str, ...]] = {
    Succeeded: ("succeeded",),
    Failed: ("failed", "cancelled"),
    CommitLost: ("succeeded", "failed", "cancelled"),
    Snoozed: ("failed", "cancelled"),
    Released: ("cancelled",),
    Abandoned: ("abandoned",),
}
"""The statuses in which an outcome may leave a job under its own epoch."""


def _is_replay(outcome: Outcome, state: Any) -> bool:
    """Whether the row shows that this very outcome was written before its answer was lost."""
    if state["same_epoch"] and state["status"] in _ENDS[type(outcome)]:
        return True
    if isinstance(outcome, Released):
        return bool(state["outcome"] == "interrupted")
    return bool(
        state["outcome"] == {Failed: "retried", CommitLost: "retried", Snoozed: "snoozed"}.get(type(outcome), "none")
    )


def _unexpected(name: str, error: BaseException, streak: int) -> None:
    _log.error("loop-failed", loop=name, streak=streak, error=f"{type(error).__name__}: {error}", exc_info=error)
