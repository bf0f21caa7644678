"""Gives the jobs of dead workers back at once: through a sibling, the scheduler, or a helper process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from taskqd.domain.errors import TaskQError
from taskqd.supervisor.child import Child
from taskqd.supervisor.exits import WELL_RECYCLED
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.record import Entry, Record, is_gone
from taskqd.supervisor.slot import State

ANSWER_TIMEOUT = 2.0
"""Seconds that a process may take to settle a dead worker before another one is asked as well."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds between attempts while nobody can reach the database."""
_LOOK_INTERVAL = 0.1
_PATIENCE = 30.0
"""Seconds that a predecessor's process may take to be seen gone; then it is left to the leases."""
_BATCH = 500
_LINGER_TIME, _LINGER_INTERVAL = 5.0, 0.005
"""Seconds that a dead worker's zygote may take to end everything, and between two looks for it."""

Helper = Callable[[Sequence[str]], Awaitable[int]]


class Releaser:
    """Settles every worker that is reported gone, in the background and until it worked.

    Rows are fenced by their epochs, so that asking twice is harmless; a worker that lives is never given up to it.
    ``helper(worker_ids)`` runs a process that does it when no child can, and returns the rows taken.
    """

    def __init__(self, record: Record, journal: Journal, helper: Helper) -> None:
        self.children: Sequence[Child] = ()
        """Who may be asked."""
        self._record = record
        self._journal = journal
        self._helper = helper
        self._held_since = time.monotonic()
        self._unproven: list[Entry] = []
        self._gone: dict[str, float] = {}
        self._zygotes: dict[str, int] = {}
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, with what a predecessor left. Call it with the group's lock held."""
        if self._record.fault:
            self._journal.tell("record-unreadable", "warning", why=self._record.fault)
        self._held_since = time.monotonic()
        self._unproven = list(self._record.entries)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="releaser")

    async def finish(self, within: float) -> None:
        """Wait up to ``within`` seconds for what is under way, then end. What is left stays in the record."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._gone and not self._task.done():
                    self._settled.clear()
                    await self._settled.wait()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def heard(self, child: Child) -> None:
        """A child has said who it is."""
        worker_id = child.worker_id
        if worker_id is not None and child.slot.pid is not None and worker_id not in self._record:
            self._record.add(worker_id, child.slot.pid)

    def ended(self, child: Child, code: int) -> None:
        """The process of ``child`` has ended with ``code``."""
        worker_id = child.worker_id
        if worker_id is None:
            return
        if code in WELL_RECYCLED and child.left_nothing:
            self._record.forget([worker_id])
            return
        self._gone[worker_id] = time.monotonic()
        if child.zygote is not None:
            self._zygotes[worker_id] = child.zygote
        self._wake.set()

    def _lingers(self, worker_id: str) -> bool:
        """True while what runs of its isolated jobs may not have ended yet."""
        zygote = self._zygotes.get(worker_id)
        if zygote is None:
            return False
        if time.monotonic() - self._gone[worker_id] < _LINGER_TIME:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote, 0)
                return True
        del self._zygotes[worker_id]
        return False

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            self._wake.clear()
            self._look_for_gone()
            wait = _LOOK_INTERVAL if self._unproven else None
            ready = [worker for worker in sorted(self._gone) if not self._lingers(worker)]
            if ready:
                if await self._settle(ready[:_BATCH]):
                    pause = FIRST_PAUSE
                    continue
                wait, pause = pause, min(pause * 2, LONGEST_PAUSE)
            elif self._gone:
                wait = _LINGER_INTERVAL
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._wake.wait()

    def _look_for_gone(self) -> None:
        held_for = time.monotonic() - self._held_since
        gone = [entry for entry in self._unproven if is_gone(entry, held_for)]
        self._gone.update({entry.worker_id: self._held_since for entry in gone})
        self._unproven = [entry for entry in self._unproven if entry not in gone]
        if self._unproven and held_for > _PATIENCE:
            ids = [entry.worker_id for entry in self._unproven]
            self._journal.tell("jobs-left-to-leases", "warning", workers=ids, why="their processes may still live")
            self._record.forget(ids)
            self._unproven = []

    async def _settle(self, workers: list[str]) -> bool:
        """Settle ``workers`` through whoever can; True when somebody did."""
        faults: list[str] = []
        for child in self._candidates():
            answer = await child.ask("release", ANSWER_TIMEOUT, worker_ids=workers)
            taken = None if answer is None else answer.get("taken")
            if isinstance(taken, int):
                self._done(workers, taken, child.name)
                return True
            faults.append(f"{child.name}: {'no answer' if answer is None else answer.get('error')}")
        if not faults:
            try:
                self._done(workers, await self._helper(workers), "helper")
                return True
            except (TaskQError, OSError, LookupError, ValueError) as error:
                # Whatever it says, or does not say: one broken helper must not be the last attempt.
                faults.append(f"helper: {str(error) or type(error).__name__}")
        self._journal.tell("release-failed", "warning", workers=workers, why="; ".join(faults))
        return False

    def _candidates(self) -> Iterable[Child]:
        """Return who works: workers before the scheduler, those first that were heard of last."""
        ready = [child for child in self.children if child.slot.state is State.READY]
        return sorted(ready, key=lambda child: (child.spec.role != "worker", -(child.beat_at or 0.0)))

    def _done(self, workers: list[str], taken: int, by: str) -> None:
        now = time.monotonic()
        oldest = min(self._gone.pop(worker_id, now) for worker_id in workers)
        self._record.forget(workers)
        self._settled.set()
        self._journal.tell("jobs-released", workers=workers, jobs=taken, by=by, ms=round((now - oldest) * 1000, 1))
