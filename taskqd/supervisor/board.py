"""What the group says about itself: the answers of its socket."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from taskqd.domain.names import nearest
from taskqd.health.server import Report, Route, Verb
from taskqd.supervisor.capture import Capture
from taskqd.supervisor.child import DUMP_PAUSE, Child
from taskqd.supervisor.exposition import own_series
from taskqd.supervisor.machine import Machine
from taskqd.supervisor.scrape import merge, scrape
from taskqd.supervisor.slot import ALIVE, State
from taskqd.supervisor.stopping import last_moment
from taskqd.supervisor.tally import Tally

_DUMP_TIME = 2.0
"""Seconds in which a process must have shown its stacks."""

_LOG_PAUSE = 0.2
"""Seconds between two looks at what was printed, for whoever follows."""

_SIGN_OF_LIFE = 10.0
"""Seconds after which whoever follows hears something even when nothing was printed."""

_PULSE_LIMIT = 10.0
"""Seconds without a round of the supervisor after which it does not count as alive."""


class Board:
    """Answers ``/startup``, ``/live``, ``/ready``, ``/status`` and ``/metrics``. Never touches the database."""

    def __init__(self, group: str) -> None:
        self._group = group
        self.phase = "preflight"
        """``preflight``, ``running`` or ``stopping``."""
        self.children: Sequence[Child] = ()
        """Who has a place in the group."""
        self.others: Callable[[], Sequence[Child]] = tuple
        """Who is about to have one, or had one."""
        self.change: Callable[[], str] = str
        """What is being changed: ``reload``, ``restart`` …, or nothing."""
        self.budget: dict[str, Any] = {}
        self.grace: float | None = None
        """What the platform grants for a stop, in seconds, once that is known."""
        self.born = time.monotonic()
        self.came_up = False
        """Every process was ready at the same time once."""
        self.pulse = time.monotonic()
        """When the supervisor made its last round."""
        self.stops_by: float | None = None
        """When a group that stops will be gone at the latest; monotonic seconds."""
        self.unknown_reaped: Callable[[], int] = int
        self.lines_dropped: Callable[[], int] = int
        """Lines that the supervisor could not write to its log."""
        self.generation: Callable[[], int] = int
        """Counts the reloads and restarts that started processes."""
        self.claim_age: Callable[[Child, float], float | None] = lambda _child, _now: None
        """For how long a worker that could has not looked for work."""
        self.machine: Machine | None = None
        """What the kernel grants the group, once somebody looks."""
        self.preload: Callable[[], dict[str, Any]] = dict
        """What there is to know of the process that workers are forked from."""
        self.tally = Tally()
        """What the supervisor counts."""

    def routes(self) -> dict[str, Route]:
        """Return what the group's socket serves besides the usual."""
        return {"/startup": self.startup, "/status": self.status}

    def verbs(self) -> dict[str, Verb]:
        """Return what the group's socket does for its own user, besides changes."""
        return {"/dump": self.dump, "/logs": self.logs}

    async def logs(self, arguments: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Yield what the processes called ``name``, or all, printed last; with ``follow`` what comes from now on."""
        name = arguments.get("name")
        wanted = [child for child in self.children if name in (None, child.name, child.spec.name)]
        if not wanted:
            names = [child.name for child in self.children]
            yield {"error": f"no process {name!r}{nearest(str(name), names) or ': there are ' + ', '.join(names)}"}
            return
        if all(child.capture is None for child in self.children):
            yield {
                "error": "nothing is captured here: the processes print to the standard error of their supervisor; "
                'set [supervisor] logs = "capture"'
            }
            return
        marks: dict[Capture, int] = {}
        silent_since = time.monotonic()
        while True:
            for child in [each for each in self.children if name in (None, each.name, each.spec.name)]:
                capture = child.capture
                if capture is not None and (text := capture.since(marks.get(capture, 0))):
                    marks[capture] = capture.total
                    silent_since = time.monotonic()
                    yield {"child": child.name, "text": text}
            if not arguments.get("follow"):
                return
            if time.monotonic() - silent_since > _SIGN_OF_LIFE:
                silent_since = time.monotonic()
                yield {}  # whoever has gone is noticed only when something is written to him
            await asyncio.sleep(_LOG_PAUSE)

    async def dump(self, arguments: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Let the process ``name`` show the stacks of its threads, and yield them, or an error."""
        name = str(arguments.get("name"))
        names = {child.name: child for child in self.children}
        if name not in names:
            known = nearest(name, names) or f": there are {', '.join(names) or 'none yet'}"
            yield {"error": f"no process {name!r}{known}"}
            return
        child = names[name]
        if child.slot.pid is None or child.beat_at is None:
            yield {"error": f"{name} is {child.slot.state} and cannot be asked"}
            return
        mark, seen = child.shown, child.shown
        child.send_signal(signal.SIGUSR1)
        began = grew = time.monotonic()
        while time.monotonic() - began < _DUMP_TIME:
            await asyncio.sleep(0.01)
            child.look_for_words()
            if child.shown > seen:
                seen, grew = child.shown, time.monotonic()
            elif seen > mark and time.monotonic() - grew > DUMP_PAUSE:
                break
        if stacks := child.shown_since(mark):
            yield {"stacks": stacks}
        else:
            why = "a signal has stopped it" if child.stopped else "it may be stuck in the kernel"
            yield {"error": f"{name} showed nothing within {_DUMP_TIME:g} s: {why}"}

    def startup(self) -> Report:
        """Yes once every process was ready."""
        return self._report(self.came_up, self._waiting_for())

    def live(self) -> Report:
        """Yes while the supervisor makes its rounds, whatever its children and the database do."""
        age = time.monotonic() - self.pulse
        alive = self.phase == "preflight" or age < _PULSE_LIMIT
        return self._report(alive, "ok" if alive else f"the supervisor made no round for {age:.0f} s")

    def ready(self) -> Report:
        """Yes while every process works, none is degraded, and the database answers them."""
        reason = self._unready()
        return self._report(not reason, reason or f"{len(self.children)}/{len(self.children)} ready")

    @property
    def is_ready(self) -> bool:
        """The same in one word."""
        return not self._unready()

    def status(self) -> Report:
        """Everything there is to know."""
        now = time.monotonic()
        reason = self._unready()
        body = {
            "reason": "ok",
            "group": self._group,
            "phase": self.phase,
            "ready": not reason,
            "why_not_ready": reason or None,
            "change": self.change() or None,
            "children": [child.status(now) for child in self.children],
            "coming_or_going": [child.status(now) for child in self.others()],
            "budget": self.budget,
            "up_s": round(now - self.born, 1),
            "grace_s": self.grace,
            "stop_budget_s": None if self.grace is None else round(last_moment(0.0, self.grace), 2),
            "preload": self.preload(),
            **({} if self.machine is None else self.machine.describe()),
        }
        return Report(True, body)

    def headline(self) -> str:
        """Return the state of the group in one line, for the service manager's status."""
        if self.phase == "preflight":
            return self._waiting_for()
        if self.stops_by is not None:
            alive = [child for child in self.children if child.slot.state in ALIVE]
            jobs = sum(int(_number(child, "inflight") or 0) for child in alive)
            left = max(0.0, self.stops_by - time.monotonic())
            return f"stopping: {len(alive)} processes, {jobs} jobs, at most {left:.0f} s left"
        line = self._unready() or f"{len(self.children)}/{len(self.children)} ready"
        required, available = self.budget.get("required"), self.budget.get("available")
        return f"{line}, budget {required}/{available} connections" if available else line

    async def metrics(self) -> str:
        """The series of the group and of its processes, in the Prometheus text format."""
        own = own_series(self, time.monotonic())
        reachable = [child for child in self.children if child.health_socket and child.slot.state is State.READY]
        texts = await scrape({child.name: child.health_socket for child in reachable})
        return own + "".join(f"{line}\n" for line in merge(texts))

    def _report(self, ok: bool, reason: str) -> Report:
        return Report(ok, {"reason": reason, "group": self._group, "phase": self.phase})

    def _unready(self) -> str:
        """Return why the group is not ready, or an empty string."""
        if self.phase != "running":
            return f"the group is in {self.phase}" if self.phase == "preflight" else "the group is stopping"
        for child in self.children:
            if child.slot.state is not State.READY:
                return self._waiting_for()
            age = child.database_age()
            if age is not None and age > child.spec.database_stale_after:
                return f"the database has not answered {child.name} for {age:.0f} s"
            if child.slot.degraded:
                return f"{child.name} failed {child.slot.unstable} times in a row"
        return ""

    def _waiting_for(self) -> str:
        if self.phase == "preflight":
            return "checking the workgroup and the database"
        missing = [child for child in self.children if child.slot.state is not State.READY]
        if not missing:
            return "ok"
        first = missing[0]
        what = f"{first.name} is {first.slot.state}"
        if first.slot.last_exit is not None and first.slot.state not in ALIVE:
            what += f" ({first.slot.last_exit.why})"
        return f"{len(self.children) - len(missing)}/{len(self.children)} ready: {what}"


def _number(child: Child, key: str) -> float | None:
    value = child.beat.get(key)
    return value if isinstance(value, int | float) else None
