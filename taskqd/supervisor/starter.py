"""Making processes for the slots that wait for one, by fork or by exec."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping

from taskqd.domain.jitter import jitter
from taskqd.supervisor.capture import Capture
from taskqd.supervisor.child import Child
from taskqd.supervisor.deaths import PAUSE, Deaths
from taskqd.supervisor.events import Event, Spawned, SpawnFailed
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.preload_phase import Way
from taskqd.supervisor.reaper import Reaper
from taskqd.supervisor.roster import Roster
from taskqd.supervisor.runtime import GroupFiles
from taskqd.supervisor.slot import State
from taskqd.supervisor.spawn import Forked, NewProcess, child_environment, spawn
from taskqd.supervisor.zygotes import Zygotes

Command = Callable[[ChildSpec], list[str]]


class Starter:
    """Starts what waits once a round, and nothing for a moment when many died at one time.

    ``environment`` returns what the processes of one mark inherit; ``command`` makes a command line. ``on_exit`` and
    ``on_stopped`` are told what becomes of each process.
    """

    def __init__(
        self,
        roster: Roster,
        apply: Callable[[Child, Event], None],
        *,
        files: GroupFiles,
        journal: Journal,
        reaper: Reaper,
        preload: Zygotes,
        environment: Callable[[str], Mapping[str, str]],
        command: Command,
        capture: bool,
        on_exit: Callable[[Child, int], None],
        on_stopped: Callable[[Child, bool], None],
    ) -> None:
        self._roster = roster
        self._apply = apply
        self._files = files
        self._journal = journal
        self._reaper = reaper
        self._preload = preload
        self._environment = environment
        self._command = command
        self._captures = capture
        self._on_exit = on_exit
        self._on_stopped = on_stopped
        self._instance = _new_instance()
        self._deaths = Deaths()

    async def round(self, plan: Plan) -> None:
        """Take over what was forked, and start what may."""
        for forked, made in self._preload.made():
            await self._take_forked(forked, made)
        for child in self._roster.next_to_start(plan.max_booting, self._waits_for_fork):
            if self._deaths.may_start(time.monotonic()):
                await self._spawn(plan, child)
                self._deaths.started(time.monotonic())

    def waits_until(self, now: float) -> float | None:
        """Return when something may be started again, or None when it may now."""
        return self._deaths.next_start(now)

    def noticed_end(self, child: Child, now: float) -> None:
        """Start nothing for a moment when many die at one time: what they share has to come back first."""
        if not child.slot.dies_unasked(now):
            return
        everybody = len(self._roster.all)
        together = self._deaths.died(child.name, now, everybody)
        if together:
            self._journal.tell("correlated-exit", "error", children=together, of=everybody, pause_s=PAUSE)

    def _waits_for_fork(self, child: Child) -> bool:
        return self._preload.way(child.spec) is Way.WAIT

    async def _spawn(self, plan: Plan, child: Child) -> None:
        child.health_socket = self._files.prepare_child_socket(
            child.spec.name, child.index, second=self._roster.rival(child) is not None
        )
        environment = child_environment(
            self._environment(child.spec.env_digest),
            child.spec,
            child.index,
            group=plan.group,
            instance=self._instance,
            health_socket=child.health_socket,
        )
        way = self._preload.way(child.spec)
        if way is Way.NONE:
            self._apply(child, SpawnFailed(f'preload = "require": {self._preload.reason(child.spec)}', any_jitter()))
            return
        try:
            with self._output_of(child) as output:
                if way is Way.FORK:
                    new = self._preload.fork(child, environment, output=output)
                else:
                    new = spawn(self._command(child.spec), environment, output=output)
        except OSError as error:
            self._apply(child, SpawnFailed(error.strerror or str(error), any_jitter()))
            return
        if new is not None:
            await self._take_over(child, new)

    @contextlib.contextmanager
    def _output_of(self, child: Child) -> Iterator[int | None]:
        """Give what a new process prints to, or None when it is the supervisor's own standard error."""
        if not self._captures:
            yield None
            return
        if child.capture is None:
            child.capture = Capture(child.name, self._journal.pass_on, colour=self._journal.human)
        output = child.capture.open()
        try:
            yield output
        finally:
            os.close(output)

    async def _take_forked(self, child: Child, made: NewProcess | str) -> None:
        if child.slot.state is not State.SPAWNING:  # told to stop meanwhile
            if not isinstance(made, str):
                made.drop()
        elif isinstance(made, str):
            self._apply(child, SpawnFailed(made, any_jitter()))
        else:
            await self._take_over(child, made)

    async def _take_over(self, child: Child, new: NewProcess) -> None:
        watch = self._reaper.watch_adopted if isinstance(new.process, Forked) else self._reaper.watch
        watch(new.process.pid, lambda code: self._on_exit(child, code))
        self._reaper.watch_stops(new.process.pid, lambda stopped: self._on_stopped(child, stopped))
        self._apply(child, Spawned(new.process.pid))
        self._preload.release(child, new)
        await child.adopt(new)


def _new_instance() -> str:
    """Return a random UUID; the module for these is large, and this process stays."""
    raw = bytearray(os.urandom(16))
    raw[6], raw[8] = raw[6] & 0x0F | 0x40, raw[8] & 0x3F | 0x80  # version 4, of the usual variant
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def any_jitter() -> float:
    """Return a factor around 1, so that processes that died together do not return together."""
    return jitter(0.8, 1.2)
