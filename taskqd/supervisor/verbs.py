"""What may be asked of a running group by ``POST`` to its socket, by SIGHUP and by SIGUSR2."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from taskqd.domain.errors import TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.names import nearest
from taskqd.health.server import Verb
from taskqd.supervisor.board import Board
from taskqd.supervisor.child import Child
from taskqd.supervisor.line import Change, Line, RefusedError, Rest
from taskqd.supervisor.monitor import Monitor
from taskqd.supervisor.reload import Reloader, Surroundings
from taskqd.supervisor.roll import AWAY, reached, tell_end
from taskqd.supervisor.slot import State
from taskqd.supervisor.workgroup import MAX_REPLICAS, SCHEDULER

_WITHIN_REACH = frozenset({State.READY, State.BACKOFF, State.FATAL, *AWAY})


class Verbs:
    """``reload``, ``restart``, ``drain``, ``quiet``, ``resume`` and ``scale``.

    Each takes a JSON object: ``name`` of a worker (``io``) or of one process (``io.0``), all workers without it;
    ``replicas`` for ``scale``; ``wait``, false for an answer as soon as it is accepted. The answer's lines are
    ``accepted``, any number of ``progress`` with a ``text``, and ``done`` with ``exit_code`` and ``text``. What was
    accepted is done whether or not somebody reads on.
    """

    NAMES = ("reload", "restart", "drain", "quiet", "resume", "scale")

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._line = Line(around.journal)
        self._monitor: Monitor | None = None
        self._reloader: Reloader | None = None
        self._hung_up_early = False
        makers = (self._reload, self._restart, self._drain, self._quiet, self._resume, self._scale)
        self._makers: dict[str, Callable[[dict[str, Any]], Change]] = dict(zip(self.NAMES, makers, strict=True))

    def routes(self) -> dict[str, Verb]:
        """Return what the group's socket takes a POST for."""
        return {f"/{name}": partial(self._answer, make) for name, make in self._makers.items()}

    def attach(self, monitor: Monitor, board: Board) -> None:
        """Change this group from now on."""
        self._monitor, self._reloader = monitor, Reloader(monitor, self._around)
        board.change = lambda: self._line.current
        self._line.on_end = lambda verb, code: monitor.watch.tally.reloaded(code) if verb == "reload" else None
        monitor.on_stop = self._stop
        monitor.watch.renewal.in_change = lambda: bool(self._line.current)
        monitor.watch.renewal.succeed = self._succeed
        if self._hung_up_early:
            self.hang_up()

    def hang_up(self) -> None:
        """SIGHUP: reload. As many as come while one waits are one."""
        if self._monitor is None:
            self._hung_up_early = True
        else:
            self._try("sighup-refused", lambda: self._reload({}))

    def renew(self, _reason: str) -> None:
        """SIGUSR2: a fresh process for each. As many as come while one waits are one."""
        _, reloader = self._running()
        find = self._targets({}, scheduler=True)

        async def renew(change: Change) -> None:
            await reloader.restart(change, find())

        self._try("sigusr2-refused", lambda: self._line.add("renew", renew, join=True))

    def _try(self, refused: str, make: Callable[[], Change]) -> None:
        try:
            make()
        except RefusedError as error:
            self._around.journal.tell(refused, "warning", why=str(error))

    def _succeed(self, child: Child, why: str) -> bool:
        """Replace a process by a fresh one that starts first; False when there is no room for both."""
        _, reloader = self._running()
        if not reloader.has_room_for_two(child):
            return False

        async def recycle(change: Change) -> None:
            await reloader.recycle(change, child, why)

        try:
            self._line.add("recycle", recycle)
        except RefusedError:
            return False
        return True

    def _stop(self, _reason: str) -> None:
        if self._reloader is not None:
            self._reloader.declaration.close()
        self._line.close("the group is stopping")

    async def close(self, timeout: float) -> None:
        """Wait for what was broken off by the stop of the group."""
        self._line.close("the group has stopped")
        await self._line.wait_closed(timeout)
        if self._reloader is not None:
            self._reloader.declaration.close()
            await self._reloader.declaration.wait_closed(timeout)

    async def _answer(
        self, make: Callable[[dict[str, Any]], Change], arguments: dict[str, Any]
    ) -> AsyncIterator[Mapping[str, Any]]:
        wait = arguments.pop("wait", True)
        try:
            change = make(arguments)
        except TaskQError as error:
            yield {"op": "done", "exit_code": int(error.exit_code), "text": str(error)}
            return
        yield {"op": "accepted", "verb": change.verb}
        if wait:
            async for line in change.follow():
                yield line

    # -- the verbs --------------------------------------------------------------------------------

    def _reload(self, arguments: dict[str, Any]) -> Change:
        _, reloader = self._running()
        _refuse_others(arguments)
        return self._line.add("reload", reloader.reload, join=True)

    def _restart(self, arguments: dict[str, Any]) -> Change:
        _, reloader = self._running()
        find = self._targets(arguments, scheduler=True)

        async def restart(change: Change) -> None:
            await reloader.restart(change, find())

        return self._line.add("restart", restart)

    def _scale(self, arguments: dict[str, Any]) -> Change:
        monitor, reloader = self._running()
        replicas = arguments.pop("replicas", None)
        if not isinstance(replicas, int) or isinstance(replicas, bool) or not 1 <= replicas <= MAX_REPLICAS:
            raise RefusedError(f"replicas = {replicas!r} must be a whole number from 1 to {MAX_REPLICAS}")
        name = arguments.pop("name", None)
        _refuse_others(arguments)
        workers = [spec.name for spec in monitor.plan.children if spec.role == "worker"]
        if name not in workers:
            there = ", ".join(workers)
            raise RefusedError(f"no worker {name!r}{nearest(str(name), workers)}; there are: {there}")

        async def scale(change: Change) -> None:
            if name not in [spec.name for spec in monitor.plan.children]:
                raise RefusedError(f"{name} was removed by a reload")
            await reloader.scale(change, name, replicas)

        return self._line.add("scale", scale)

    def _drain(self, arguments: dict[str, Any]) -> Change:
        monitor, _ = self._running()
        find = self._targets(arguments)

        async def drain(change: Change) -> Rest:
            targets = find()
            for child in targets:
                change.tell(f"{child.name} drains", child=child.name)
                child.drained = True
                monitor.retire(child)
            return partial(_drained, change, targets)

        return self._line.add("drain", drain)

    def _quiet(self, arguments: dict[str, Any]) -> Change:
        self._running()
        if str(arguments.get("name")).partition(".")[0] == SCHEDULER:
            raise RefusedError("the scheduler claims no jobs that it could leave alone: drain it to stop it")
        find = self._targets(arguments)
        change = Change("quiet")  # it ends nothing and starts nothing, so that it need not wait in the line
        names = {child.name for child in find()}
        for child in self._everybody(names):
            child.set_quiet(True)
            change.tell(f"{child.name} claims nothing, {child.beat.get('inflight', 0)} jobs go on", child=child.name)
        self._around.journal.tell("quiet-done", why=", ".join(sorted(names)))
        change.end(ExitCode.DONE, f"quiet: {', '.join(sorted(names))}")
        return change

    def _resume(self, arguments: dict[str, Any]) -> Change:
        monitor, _ = self._running()
        find = self._targets(arguments, scheduler=True)

        async def resume(change: Change) -> Rest:
            targets = find()
            for child in targets:
                if child.drained or child.slot.state is State.FATAL:
                    change.tell(f"{child.name} starts again", child=child.name)
                    child.drained = False
                    monitor.rehire(child)
                elif child.quiet:
                    change.tell(f"{child.name} claims again", child=child.name)
            for child in self._everybody({child.name for child in targets}):
                if child.quiet:
                    child.set_quiet(False)
            return partial(_resumed, change, targets)

        return self._line.add("resume", resume)

    # -- who is meant -----------------------------------------------------------------------------

    def _running(self) -> tuple[Monitor, Reloader]:
        if self._monitor is None or self._reloader is None:
            raise RefusedError("the group is still being checked before its start: try again", ExitCode.TRY_AGAIN)
        return self._monitor, self._reloader

    def _targets(self, arguments: dict[str, Any], *, scheduler: bool = False) -> Callable[[], list[Child]]:
        """Return what finds the members that are meant, at once and again when it is their turn.

        Without a name all workers are, and with ``scheduler`` the scheduler too.
        """
        name = arguments.pop("name", None)
        _refuse_others(arguments)
        monitor, _ = self._running()

        def find() -> list[Child]:
            members = monitor.roster.members
            if name is None:
                return [child for child in members if scheduler or child.spec.role == "worker"]
            found = monitor.roster.named(name) or [child for child in members if child.name == name]
            if not found:
                known = list(dict.fromkeys(child.spec.name for child in members))
                raise RefusedError(f"no {name!r}{nearest(str(name), known)}; there are: {', '.join(known)}")
            return found

        find()
        return find

    def _everybody(self, names: set[str]) -> list[Child]:
        """Return the processes of these names, newcomers and leavers included."""
        monitor, _ = self._running()
        return [child for child in monitor.roster.all if child.name in names]


async def _drained(change: Change, targets: list[Child]) -> None:
    for child in targets:
        await reached(child, AWAY | {State.READY})
        tell_end(change, child)
    unclean = [child.name for child in targets if child.slot.unclean or child.slot.state is State.LOST]
    back = [child.name for child in targets if child.slot.state is State.READY]
    if back:
        change.end(ExitCode.ERROR, f"resumed meanwhile: {', '.join(back)}")
    elif unclean:
        change.end(ExitCode.KILLED, f"drained, but these did not end well: {', '.join(unclean)}")
    else:
        change.end(ExitCode.DONE, f"drained: {', '.join(child.name for child in targets)}")


async def _resumed(change: Change, targets: list[Child]) -> None:
    for child in targets:
        await reached(child, _WITHIN_REACH)
    missing = [child for child in targets if child.slot.state is not State.READY]
    if missing:
        end = missing[0].slot.last_exit
        why = f" ({end.why})" if end is not None else ""
        change.end(ExitCode.ERROR, f"{missing[0].name} is {missing[0].slot.state}{why}")
    else:
        change.end(ExitCode.DONE, f"resumed: {', '.join(child.name for child in targets)}")


def _refuse_others(arguments: Mapping[str, Any]) -> None:
    if arguments:
        raise RefusedError(f"unknown argument {next(iter(arguments))!r}")
