"""The zygotes of a group: one for each registry of actors and each environment that it is imported in."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.child import Child
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.preload import Preload, ZygoteCommand, zygote_command
from taskqd.supervisor.preload_phase import Phase, Way
from taskqd.supervisor.reaper import Reaper
from taskqd.supervisor.slot import State
from taskqd.supervisor.spawn import NewProcess

Key = tuple[str, str]
"""The actors as ``module:attribute``, and the mark of the environment."""

_CALM = 0.25
"""Seconds without an event after which there is time to lay in a process."""

_BOOTS = 2.0
"""Seconds that a boot is given before that; one that takes longer waits for something."""

_WORST_FIRST = (Phase.UNFIT, Phase.DOWN, Phase.IMPORTING, Phase.READY, Phase.OFF)


class Forkable(Protocol):
    """A kind of worker, as far as it matters here."""

    @property
    def name(self) -> str:
        """What its processes are called."""

    @property
    def preload(self) -> str:
        """``auto``, ``require`` or ``off``."""

    @property
    def zygote(self) -> Key:
        """What it is forked from."""


def forked_alike(workers: Iterable[Forkable]) -> dict[Key, list[str]]:
    """Return what zygotes there must be, each with the names of the workers that are forked from it."""
    found: defaultdict[Key, list[str]] = defaultdict(list)
    for worker in workers:
        if worker.preload != "off":
            found[worker.zygote].append(worker.name)
    return {key: list(dict.fromkeys(names)) for key, names in found.items()}


class Zygotes:
    """Keeps a zygote for all workers that have their actors and their environment in common."""

    def __init__(self, *, reaper: Reaper, journal: Journal, command: ZygoteCommand = zygote_command) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when workers may be started that had to wait."""
        self._reaper = reaper
        self._journal = journal
        self._command = command
        self._all: dict[Key, Preload] = {}
        self._gone = {"restarts": 0, "forked": 0, "execed": 0}
        """What those counted that are no more."""
        self._execed = 0
        """Workers that were started by exec and had no zygote."""

    def start(
        self,
        workers: Iterable[Forkable],
        environment: Callable[[str], Mapping[str, str]],
        *,
        afresh: Collection[Key] = (),
    ) -> None:
        """Have a zygote for each distinct ``zygote`` of ``workers`` and no other; those ``afresh`` are replaced.

        ``environment`` gives that of a mark. What they fork comes to this process, which must be the parent in the end.
        """
        wanted = forked_alike(workers)
        for key in self._all.keys() - wanted.keys():
            self._drop(key)
        for key, names in wanted.items():
            if key in self._all and key not in afresh:
                self._all[key].workers = names
            else:
                self._begin(key, names, environment)

    def end(self) -> None:
        """Fork nothing more. What was forked goes on."""
        for zygote in self._all.values():
            zygote.end()

    async def stop(self) -> None:
        """End, and return when the zygotes are gone."""
        await asyncio.gather(*(zygote.stop() for zygote in self._all.values()))

    def tick(self, now: float) -> None:
        """Start those that are due, end those that are overdue."""
        for zygote in self._all.values():
            zygote.tick(now)

    def way(self, spec: ChildSpec) -> Way:
        """Return how a process of ``spec`` is to be started now."""
        zygote = self._all.get(spec.zygote)
        return Way.EXEC if zygote is None else zygote.way(spec)

    def lay_in(self, children: Collection[Child], now: float) -> None:
        """Have a process made beforehand where there is none, unless any of ``children`` comes up or goes."""
        wanting = [key for key, zygote in self._all.items() if zygote.wants_spare]
        if not wanting or not all(_is_calm(child, now) for child in children):
            return
        up = {child.slot.pid for child in children if child.slot.state is State.READY and child.slot.pid is not None}
        for key in wanting:
            self._all[key].lay_in(up)

    def fork(self, child: Child, environment: Mapping[str, str], *, output: int | None = None) -> NewProcess | None:
        """See :meth:`Preload.fork`."""
        return self._all[child.spec.zygote].fork(child, environment, output=output)

    def made(self) -> list[tuple[Child, NewProcess | str]]:
        """Take what was forked since the last call, or why it was not."""
        return [made for zygote in self._all.values() for made in zygote.made()]

    def release(self, child: Child, new: NewProcess) -> None:
        """Count a new process, and let a forked one go on, now that the supervisor watches it."""
        zygote = self._all.get(child.spec.zygote)
        if zygote is not None:
            zygote.release(child, new)
        elif child.spec.role == "worker":
            self._execed += 1

    @property
    def ready_by(self) -> float | None:
        """When the imports that go on must be over, in monotonic seconds; None when none does."""
        return max((by for zygote in self._all.values() if (by := zygote.ready_by) is not None), default=None)

    def refusal(self, specs: Sequence[ChildSpec]) -> tuple[ExitCode, str] | None:
        """Return why the group cannot come up: a worker requires what is not to be had."""
        for key, zygote in self._all.items():
            refused = zygote.refusal([spec for spec in specs if spec.zygote == key])
            if refused is not None:
                return refused
        return None

    def reason(self, spec: ChildSpec) -> str:
        """Return why no process of ``spec`` may be forked, or an empty string."""
        zygote = self._all.get(spec.zygote)
        return "" if zygote is None else zygote.reason()

    def status(self) -> dict[str, Any]:
        """Return what a person wants to know: of all together, where ``state`` is the worst, and of each."""
        each = [zygote.status() for zygote in self._all.values()]
        worst = min((Phase(one["state"]) for one in each), key=_WORST_FIRST.index, default=Phase.OFF)
        counts = {what: gone + sum(one[what] for one in each) for what, gone in self._gone.items()}
        why = "; ".join(dict.fromkeys(one["why"] for one in each if one["why"])) or None
        return {
            "state": str(worst),
            "why": why,
            **counts,
            "execed": counts["execed"] + self._execed,
            "zygotes": each,
        }

    def _begin(self, key: Key, names: Sequence[str], environment: Callable[[str], Mapping[str, str]]) -> None:
        actors, mark = key
        zygote = self._all.get(key)
        if zygote is None:
            zygote = self._all[key] = Preload(reaper=self._reaper, journal=self._journal, command=self._command)
            zygote.on_change = self._changed
        zygote.start([actors], environment(mark), names)

    def _drop(self, key: Key) -> None:
        zygote = self._all.pop(key)
        zygote.end()
        status = zygote.status()
        for what in self._gone:
            self._gone[what] += status[what]

    def _changed(self) -> None:
        self.on_change()


def _is_calm(child: Child, now: float) -> bool:
    slot = child.slot
    return slot.state is not State.SPAWNING and now - slot.since >= (_BOOTS if slot.state is State.BOOTING else _CALM)
