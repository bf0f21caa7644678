"""Bringing a running group to what its file says now, or to fresh processes of the same kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from taskqd.domain.errors import ConfigError
from taskqd.domain.exit_codes import ExitCode
from taskqd.health.server import check_socket_path
from taskqd.supervisor.changes import Changes, Costs, Order, diff, needs_restart, order, rescale, same_process
from taskqd.supervisor.child import Child
from taskqd.supervisor.consult import consult
from taskqd.supervisor.declaration import Declaration
from taskqd.supervisor.exits import Exit, ExitClass
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.line import Change, RefusedError
from taskqd.supervisor.monitor import Monitor
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.reaper import Reaper
from taskqd.supervisor.roll import AbortedError, Roll
from taskqd.supervisor.runtime import GroupFiles
from taskqd.supervisor.sdnotify import Notifier


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a reload needs besides the group itself."""

    file: str
    environ: Mapping[str, str]
    reaper: Reaper
    files: GroupFiles
    journal: Journal
    notifier: Notifier


class Reloader:
    """Makes the changes of one group that start and end processes."""

    def __init__(self, monitor: Monitor, around: Surroundings) -> None:
        self._monitor = monitor
        self._around = around
        self.declaration = Declaration(
            around.file, around.environ, around.reaper, around.journal, lambda: monitor.plan, monitor.take_over
        )
        self._unsettled: dict[str, int] = {}
        """Names of which a reload was aborted half way, and the generation that their processes should have by now."""

    async def reload(self, change: Change) -> None:
        """Check the file as a start would, then change what differs. The old group goes on when anything is wrong.

        Ends the change with 0, with 1 when a new process did not come up, else with what the check said: 78 for
        what is refused, 69 and 75 as for a start.
        """
        self._around.notifier.reloading("reloading")
        try:
            await self._reload(change)
        finally:
            self._around.notifier.reloaded("reload ended")

    async def restart(self, change: Change, targets: Sequence[Child]) -> None:
        """Replace processes by fresh ones of the same kind."""
        names = tuple(dict.fromkeys(child.spec.name for child in targets))
        async with self.declaration.raised(change, self._cost_of_one(names)):
            plan = self._monitor.plan
            pace = order(plan, plan, Changes((), names, {}, (), ()))
            specs = {spec.name: spec for spec in plan.children}
            self._monitor.begin_generation(plan, names)
            roll = Roll(self._monitor, change)
            for child in sorted(targets, key=lambda child: pace.rolls.index(child.spec.name)):
                await roll.replace(child, specs[child.spec.name], surge=self._surges(child, pace))
            change.end(ExitCode.DONE, f"restarted: {', '.join(child.name for child in targets)}")

    def has_room_for_two(self, child: Child) -> bool:
        """True when a successor of this process may start before it ends."""
        plan = self._monitor.plan
        return self._surges(child, order(plan, plan, Changes((), (child.spec.name,), {}, (), ())))

    async def recycle(self, change: Change, child: Child, why: str) -> None:
        """Put a fresh process beside one that has done enough, then let that one go."""
        spec = next(spec for spec in self._monitor.plan.children if spec.name == child.spec.name)
        async with self.declaration.raised(change, self._cost_of_one([spec.name])):
            surge = self.has_room_for_two(child)
            await Roll(self._monitor, change).replace(child, spec, surge=surge, recycled=why)
            old = child.slot
            code = int(ExitCode.TRY_AGAIN) if old.last_exit is None else old.last_exit.code
            end = Exit(code, ExitClass.RECYCLE, f"recycled: {why}")
            for new in self._monitor.roster.named(spec.name):
                if new.index == child.index:
                    new.slot = replace(new.slot, restarts=old.restarts, recycled=old.recycled + 1, last_exit=end)
            change.end(ExitCode.DONE, f"{child.name} is recycled: {why}")

    async def scale(self, change: Change, name: str, replicas: int) -> None:
        """Run another number of processes of a name, until the next reload."""
        spec = next(spec for spec in self._monitor.plan.children if spec.name == name)
        more = max(replicas - spec.replicas, 0) * self._cost_of_one([name])
        async with self.declaration.raised(change, more):
            new = rescale(self._monitor.plan, name, replicas)
            self._check_paths(new)
            roll = Roll(self._monitor, change)
            if replicas > spec.replicas:
                await roll.grow(spec, range(spec.replicas, replicas))
            else:
                await roll.shrink(self._monitor.roster.named(name)[replicas:])
            self._monitor.take_over(new)
            change.end(ExitCode.DONE, f"{name} runs {replicas} processes, before {spec.replicas}")

    async def _reload(self, change: Change) -> None:
        change.tell("checks the workgroup and the database")
        await self.declaration.settled()
        new = await self._ask(change)
        async with self.declaration.lowered_after():
            await self._change_to(new, change)

    async def _change_to(self, new: Plan, change: Change) -> None:
        old = self._monitor.plan
        refused = needs_restart(old, new)
        if refused:
            raise RefusedError("\n".join(refused), ExitCode.REFUSED)
        self._check_paths(new)
        self._monitor.learn(new)
        changes = diff(old, new, self._unsettled)
        step = _Step(self._monitor, old, new, changes)
        change.tell(_summary(changes), **changes.describe())
        self._monitor.take_over(step.plan)
        if not await self._renew_credentials(change):
            return
        if changes.nothing:
            change.end(ExitCode.DONE, "reloaded: nothing to change", **changes.describe())
            return
        self._monitor.begin_generation(new, [*changes.rolled, *changes.added])
        try:
            await self._make(step, Roll(self._monitor, change))
        except AbortedError as error:
            self._unsettled |= dict.fromkeys(step.open, self._monitor.generation if step.moved else 0)
            text = f"reload aborted: {error}; not made: {', '.join(step.open)}"
            change.end(error.exit_code, text, not_made=list(step.open), **changes.describe())
            return
        finally:
            self._monitor.end_generation()
        self._unsettled.clear()
        change.end(ExitCode.DONE, f"reloaded: {_summary(changes)}", **changes.describe())

    async def _ask(self, change: Change) -> Plan:
        def warn(text: str) -> None:
            self._around.journal.tell("preflight-warning", "warning", why=text)
            change.tell(f"warning: {text}")

        around = self._around
        return await consult(
            [around.file, "--for", "run", *self.declaration.held],
            reaper=around.reaper,
            environ=around.environ,
            on_warning=warn,
        )

    async def _renew_credentials(self, change: Change) -> bool:
        """Put every process on the present credential; end the change, and say False, where one cannot."""
        report = await self._monitor.reload_credentials()
        failed = [f"{child['name']}: {child['error']}" for child in report["children"] if not child["ok"]]
        if failed:
            text = f"reload aborted: some sessions keep the credential they have: {'; '.join(failed)}"
            change.end(ExitCode.ERROR, text, credentials=report)
            return False
        change.tell(
            f"credentials renewed in {len(report['children'])} processes, {report['ms']:.0f} ms", credentials=report
        )
        return True

    async def _make(self, step: _Step, roll: Roll) -> None:
        pace = order(step.old, step.new, step.changes)
        if not pace.grow_first:
            await self._shrink(step, roll)
        for name in pace.rolls:
            await self._roll(step, roll, name, pace)
        await self._grow(step, roll)
        if pace.grow_first:
            await self._shrink(step, roll)

    async def _roll(self, step: _Step, roll: Roll, name: str, pace: Order) -> None:
        spec = step.wanted[name]
        for child in self._monitor.roster.named(name)[: spec.replicas]:
            stale = step.moved or child.generation < self._unsettled.get(name, 0)
            if stale or not same_process(child.spec, spec):
                await roll.replace(child, spec, surge=self._surges(child, pace))
        step.made(name, keep_replicas=True)

    async def _grow(self, step: _Step, roll: Roll) -> None:
        for name in step.changes.added:
            await roll.grow(step.wanted[name], range(step.wanted[name].replicas))
            step.made(name)
        for name, (before, after) in step.changes.scaled.items():
            if after > before:
                await roll.grow(step.wanted[name], range(before, after))
                step.made(name)

    async def _shrink(self, step: _Step, roll: Roll) -> None:
        """Let go what is not wanted any more, all at once."""
        leaving: list[Child] = []
        for name in step.changes.removed:
            leaving += self._monitor.roster.named(name)
        for name, (before, after) in step.changes.scaled.items():
            if after < before:
                leaving += self._monitor.roster.named(name)[after:]
        await roll.shrink(leaving)
        for name in step.changes.removed:
            step.made(name)
        for name, (before, after) in step.changes.scaled.items():
            if after < before:
                step.made(name, keep_spec=True)

    def _cost_of_one(self, names: Collection[str]) -> int:
        """Return the connections of the largest process among these."""
        unit = Costs(self._monitor.plan).unit
        return max((unit.get(name, 0) for name in names), default=0)

    def _surges(self, child: Child, pace: Order) -> bool:
        """True when the new process may start before the old one ends: a scheduler never, for want of room not."""
        if child.spec.role != "worker" or child.spec.name not in pace.surge:
            return False
        try:
            check_socket_path(self._around.files.child_socket(child.spec.name, child.index, second=True))
        except ConfigError:
            return False
        return True

    def _check_paths(self, plan: Plan) -> None:
        self._around.files.check_paths((spec.name, index) for spec in plan.children for index in range(spec.replicas))


class _Step:
    """How far a reload has come: which names run by the new plan already."""

    def __init__(self, monitor: Monitor, old: Plan, new: Plan, changes: Changes) -> None:
        self.old = old
        self.new = new
        self.changes = changes
        self.moved = old.app_dir != new.app_dir
        self.wanted = {spec.name: spec for spec in new.children}
        self._monitor = monitor
        self._running = {spec.name: spec for spec in old.children}
        for name in (*changes.unchanged, *changes.scaled):
            if name not in changes.rolled:
                self._running[name] = replace(self.wanted[name], replicas=self._running[name].replicas)
                for child in monitor.roster.named(name):
                    child.spec = self._running[name]  # it may differ in what the supervisor alone reads

    @property
    def open(self) -> list[str]:
        """The names that do not run as the new plan wants."""
        return [
            name
            for name in dict.fromkeys([*self._running, *self.wanted])
            if self._running.get(name) != self.wanted.get(name)
        ]

    @property
    def plan(self) -> Plan:
        """The plan that the group runs by just now."""
        names = [*self.wanted, *(name for name in self._running if name not in self.wanted)]
        children = tuple(self._running[name] for name in names if name in self._running)
        rows = {row["name"]: row for row in (*_rows(self.old), *_rows(self.new))}
        budget = {**self.new.budget, "workers": [rows[spec.name] for spec in children if spec.name in rows]}
        return replace(self.new, children=children, budget=budget)

    def made(self, name: str, *, keep_replicas: bool = False, keep_spec: bool = False) -> None:
        """The processes of ``name`` are as they are wanted, but for their number or but for what they are."""
        before, after = self._running.get(name), self.wanted.get(name)
        if after is None:
            del self._running[name]
        elif before is not None and keep_replicas:
            self._running[name] = replace(after, replicas=before.replicas)
        elif before is not None and keep_spec:
            self._running[name] = replace(before, replicas=after.replicas)
        else:
            self._running[name] = after
        self._monitor.take_over(self.plan if self.open else self.new)


def _rows(plan: Plan) -> Collection[dict[str, Any]]:
    return list(plan.budget.get("workers", ()))


def _summary(changes: Changes) -> str:
    parts = [
        f"{len(changes.unchanged)} unchanged",
        *(f"{name} replaced" for name in changes.rolled),
        *(f"{name} {before}→{after}" for name, (before, after) in changes.scaled.items()),
        *(f"{name} added" for name in changes.added),
        *(f"{name} removed" for name in changes.removed),
    ]
    return ", ".join(parts)
