"""The running group: starts, watches, restarts and stops its processes."""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from taskqd.domain.exit_codes import ExitCode
from taskqd.health.lines import GROUP_ENDS
from taskqd.supervisor.board import Board
from taskqd.supervisor.cgroup import Cgroup
from taskqd.supervisor.child import DUMP_PAUSE, Child
from taskqd.supervisor.environments import Environments
from taskqd.supervisor.events import (
    AskToDrain,
    Beat,
    Due,
    Effect,
    EndGroup,
    Event,
    Exited,
    Ready,
    Rearm,
    Retire,
    Send,
    Settle,
    Start,
    Tell,
)
from taskqd.supervisor.heap import give_back
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.progress import Progress
from taskqd.supervisor.reaper import Reaper
from taskqd.supervisor.release import Releaser
from taskqd.supervisor.roster import Roster
from taskqd.supervisor.rotation import rotate
from taskqd.supervisor.runtime import GroupFiles
from taskqd.supervisor.sdnotify import Notifier
from taskqd.supervisor.slot import ALIVE, State
from taskqd.supervisor.spawn import child_command
from taskqd.supervisor.starter import Command, Starter, any_jitter
from taskqd.supervisor.state import step
from taskqd.supervisor.stop_requests import StopRequests
from taskqd.supervisor.stopping import deadlines
from taskqd.supervisor.watch import Watch
from taskqd.supervisor.zygotes import Zygotes

ROUND = 1.2
"""The longest time between two rounds, in seconds: as a rule a beat comes before and is the occasion of one."""

_NEXT = 0.7
"""Seconds after a round from which on a beat is the occasion of the next one."""

_TOGETHER = 0.008
"""Seconds that such a beat waits for those of the others, who beat at the same moment: to be woken is what costs."""

_ASKED = 1.0
"""Seconds in which a silent process that was asked for its stacks has begun to write them, as a rule."""

_GAP = 1.0
"""A round that comes this much too late, in seconds, means that the machine or the supervisor stood still."""


class Monitor:
    """Runs the processes of ``plan`` until :meth:`stop` is called or the group cannot go on."""

    def __init__(
        self,
        plan: Plan,
        *,
        files: GroupFiles,
        board: Board,
        journal: Journal,
        reaper: Reaper,
        environments: Environments,
        command: Command = child_command,
        notifier: Notifier | None = None,
        releaser: Releaser,
        preload: Zygotes,
        capture: bool = False,
        cgroup: Cgroup | None = None,
    ) -> None:
        self._plan = plan
        self._notifier = notifier or Notifier("")
        self._files = files
        self._board = board
        self._journal = journal
        self._reaper = reaper
        self._releaser = releaser
        self._preload = preload
        self._environments = environments
        self.generation = 1
        """Counts the states of the group; each reload and restart that starts processes begins a new one."""
        self.roster = Roster()
        for spec in plan.children:
            for index in range(spec.replicas):
                self.roster.place(Child(spec, index, spec.timing, self._apply))
        self._children = self.roster.all
        self.on_stop: Callable[[str], None] = _nobody_to_tell
        """Told why the group is asked to stop, before anything is stopped."""
        cgroup = cgroup or Cgroup()
        self.watch = Watch(lambda: self._plan, lambda: self._children, self._apply, journal, cgroup)
        for child in self._children:
            self.watch.tally.expect(child.spec.name, child.index)
        self._stops = StopRequests(lambda: self._plan, self._children, self._apply, board, journal)
        self._progress = Progress(board, journal, on=capture and journal.human)
        self._starter = Starter(
            self.roster,
            self._apply,
            files=files,
            journal=journal,
            reaper=reaper,
            preload=preload,
            environment=self._environment,
            command=command,
            capture=capture,
            on_exit=self._exited,
            on_stopped=self.watch.stopped,
        )
        self._came_up: set[str] = set()
        self._wake = asyncio.Event()
        preload.on_change = self._wake.set
        self._failure: ExitCode | None = None

    async def run(self) -> int:
        """Run the group and return the exit code of the supervisor."""
        self._board.children, self._board.budget = self.roster.members, self._plan.budget
        self._board.others = self.roster.others
        self._releaser.children = self._children
        self._board.unknown_reaped = lambda: self._reaper.unknown
        self._board.tally, self._board.grace = self.watch.tally, self._plan.grace
        self._board.machine, self._board.claim_age = self.watch.machine, self.watch.claim_age
        self._board.generation = lambda: self.generation
        self._board.phase = "running"
        self._journal.tell("workgroup.start", children=len(self._children), grace_s=self._plan.grace)
        for child in self._children:
            self._apply(child, Start())
        last = time.monotonic()
        while not self._stops.over(time.monotonic()):
            self._wake.clear()
            now = self._board.pulse = time.monotonic()
            self._notice_gap(now - last)
            last = now
            self._stop_if_hopeless()
            self._take_stops(now)
            await self._starter.round(self._plan)  # before the rest: a replacement waits for nothing else
            self.watch.round(now)
            for child in self._children:
                if child.slot.deadline is not None and child.slot.deadline <= now:
                    self._apply(child, Due())
                self._tell_dump(child)
            self._tend_preload(now)
            self.roster.sweep()
            self._notify()
            self._progress.round()
            await self._pause()
        self._progress.end()
        return self._result()

    def stop(self, reason: str) -> None:
        """Ask all processes to end. A second call cancels what still runs, a third kills it."""
        self.on_stop(reason)
        self._stops.add(reason)
        self._wake.set()

    async def reload_credentials(self) -> dict[str, Any]:
        """Have every process take the present credential in place; return what came of it for each."""
        return await rotate(self._children, self._journal)

    # -- changes of the running group -------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """What the group runs by."""
        return self._plan

    def take_over(self, plan: Plan) -> None:
        """Run by ``plan`` from now on: its limits and times hold at once, and for what is started later all of it."""
        self._plan, self._board.budget, self._board.grace = plan, plan.budget, plan.grace
        timings = {spec.name: spec.timing for spec in plan.children}
        for child in self._children:
            child.slot = replace(child.slot, timing=timings.get(child.spec.name, child.slot.timing))
        self._wake.set()

    def learn(self, plan: Plan) -> None:
        """Read what ``plan`` needs besides itself. Raises ``EnvChangedError``."""
        self._environments.learn(plan.children, keep=[child.spec for child in self._children])

    def begin_generation(self, plan: Plan, names: Collection[str]) -> None:
        """What starts from now on is new: those called ``names`` are forked, if at all, from processes that import the
        actors of ``plan`` afresh. What the others are forked from stays, and until the end what those run by now."""
        self.generation += 1
        afresh = {spec.zygote for spec in plan.children if spec.name in names}
        still = [child.spec for child in self._children]
        self._preload.start([*plan.children, *still], self._environment, afresh=afresh)

    def end_generation(self) -> None:
        """The change is made, or given up: what is not wanted any more to fork from ends."""
        if not self._stops.any:
            self._preload.start(self._plan.children, self._environment)

    def _environment(self, mark: str) -> dict[str, str]:
        return self._environments.marked(mark, self._plan.app_dir)

    def hire(self, spec: ChildSpec, index: int) -> Child:
        """Start a process on trial: it has no place yet, and is not started again when it ends."""
        child = Child(spec, index, spec.timing, self._apply, generation=self.generation)
        self.roster.admit(child)
        self.watch.tally.expect(spec.name, index)
        self._apply(child, Start(trial=True))
        return child

    def seat(self, child: Child, instead_of: Child | None = None) -> None:
        """End the trial of a process and give it its place, which may be another's."""
        self._apply(child, Settle())
        self.roster.seat(child, instead_of)

    def retire(self, child: Child, replaced: str | None = None) -> None:
        """Ask a process to end, within the time that a stop of the group would give it.

        ``replaced``: why it makes room for a fresh one, where it does.
        """
        child.deadlines = deadlines(time.monotonic(), self._plan.grace, child.spec.graces)
        self._apply(child, Retire(child.deadlines.kill, replaced))

    def rehire(self, child: Child) -> None:
        """Start a retired or given up process again, or keep one that was about to be."""
        self._apply(child, Start())

    def dismiss(self, child: Child) -> None:
        """Take away a process's place."""
        self.roster.dismiss(child)

    # -- rounds -----------------------------------------------------------------------------------

    async def _pause(self) -> None:
        now = time.monotonic()
        due = [child.slot.deadline for child in self._children if child.slot.deadline is not None]
        due += [at for at in (self._stops.last_moment, self._starter.waits_until(now)) if at is not None]
        rest = min(ROUND, self._notifier.patience)
        longest = DUMP_PAUSE if any(self._shows(child, now) for child in self._children) else rest
        wait = max(0.0, min(longest, min(due, default=now + longest) - now))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._wake.wait()

    def _shows(self, child: Child, now: float) -> bool:
        """True while its stacks are to be told in a moment: it writes them, or has just been asked for them."""
        return child.shows or (child.slot.state is State.STALLED and now - child.slot.since < _ASKED)

    def _notice_gap(self, gap: float) -> None:
        self.watch.tally.round(gap)
        if gap > ROUND + _GAP:
            self._journal.tell("standstill", "warning", gap_s=round(gap, 1))
            for child in self._children:
                self._apply(child, Rearm(gap))

    def _notify(self) -> None:
        """Tell the service manager, once a round: a supervisor that makes none is not fed to its watchdog."""
        booting = [child.slot.deadline for child in self._children if child.slot.state is State.BOOTING]
        booting.append(self._preload.ready_by)
        if latest := max((deadline for deadline in booting if deadline is not None), default=None):
            self._notifier.boot_until(latest)
        self._notifier.round(self._board.headline(), ready=self._board.came_up)

    def _take_stops(self, now: float) -> None:
        begun = self._stops.begun
        self._stops.take(now)
        if self._stops.begun and not begun:
            self._preload.end()
            self._notifier.stopping(self._board.headline())

    def _stop_if_hopeless(self) -> None:
        """End a group whose workers are all given up: it would only pretend to be there."""
        workers = [child for child in self._children if child.spec.role == "worker"]
        if not self._stops.any and all(child.slot.state is State.FATAL for child in workers):
            self._failure = ExitCode.REFUSED
            self.stop("no worker is left that could be restarted")

    def _result(self) -> int:
        killed = [child.name for child in self._children if child.slot.unclean or child.slot.state in ALIVE]
        code = self._failure if self._failure is not None else ExitCode.KILLED if killed else ExitCode.DONE
        lost = self.watch.tally.jobs_killed
        self._journal.tell("shutdown-complete", exit_code=int(code), not_clean=killed or None, jobs_killed=lost or None)
        return int(code)

    def _tend_preload(self, now: float) -> None:
        self._preload.tick(now)
        if not self._stops.any:
            self._preload.lay_in(self._children, now)
        refused = self._preload.refusal([child.spec for child in self._children])
        if refused is not None and not self._board.came_up and not self._stops.any:
            self._failure, why = refused
            self.stop(why)

    # -- events and what follows from them --------------------------------------------------------

    def _apply(self, child: Child, event: Event) -> None:
        before = child.slot.state
        child.slot, effects = step(child.slot, event, time.monotonic())
        for effect in effects:
            self._perform(child, effect)
        if isinstance(event, Ready):
            self._came_up.add(child.spec.name)
            ready = [other.slot.state is State.READY for other in self.roster.members]
            if not self._board.came_up and all(ready):
                self._board.came_up = True
                give_back()
            self._settle_socket(child)
        if isinstance(event, Beat):
            self._beaten(child)
        if child.slot.state is not before:
            child.moved.set()
            self._wake.set()

    def _beaten(self, child: Child) -> None:
        self._releaser.heard(child)
        if "error" in child.beat:
            self._journal.tell("beat-error", "warning", child=child.name, error=child.beat["error"])
        if time.monotonic() - self._board.pulse >= _NEXT and not self._wake.is_set():
            if len(self._children) > 1:
                select.select((), (), (), _TOGETHER)
            self._wake.set()

    def _perform(self, child: Child, effect: Effect) -> None:
        if isinstance(effect, Tell):
            self.watch.told(child, effect)
        match effect:
            case Send(number):
                child.send_signal(number)
            case AskToDrain():
                why = None if self._stops.begun else child.slot.replaced
                child.ask_to_drain(why or (GROUP_ENDS if self._stops.begun else "retired"), recycle=why is not None)
            case Tell("child-exit", level, fields):
                words = child.last_words()
                if level == "info":
                    words["output"] = None  # nothing went wrong that it could explain
                self._journal.tell("child-exit", level, child=child.name, **fields, **words)
            case Tell(event, level, fields):
                self._journal.tell(event, level, child=child.name, **fields)
            case EndGroup(code, why):
                if self._failure is None:
                    self._failure = code
                    self.stop(f"{child.name} {why}")

    def _exited(self, child: Child, code: int) -> None:
        child.bury(code)
        came_up = child.spec.name in self._came_up
        oom = self.watch.died_of_memory(child, code)
        self._starter.noticed_end(child, time.monotonic())
        self._apply(child, Exited(code, came_up, child.said_goodbye, any_jitter(), oom))
        self._releaser.ended(child, code)
        if (rival := self.roster.rival(child)) is not None:
            self._settle_socket(rival)

    def _settle_socket(self, child: Child) -> None:
        """Give a process that has outlived the other of its name the socket's usual path."""
        if self.roster.rival(child) is None:
            child.health_socket = self._files.settle_child_socket(child.health_socket, child.spec.name, child.index)

    def _tell_dump(self, child: Child) -> None:
        if child.slot.state is State.KILLING:
            return  # what it shows now is told with its end
        stacks = child.read_dump()
        if stacks:
            self._journal.tell("stacks", "warning", child=child.name, pid=child.slot.pid, stacks=stacks)


def _nobody_to_tell(_reason: str) -> None:
    """Nobody makes changes of this group."""
