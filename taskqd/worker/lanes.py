"""The lanes that a worker claims from beside the plain ones: limited, taking turns, or one identity at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

from taskqd.domain.jitter import jitter
from taskqd.worker.attempt import Attempt
from taskqd.worker.rules import Rules

CLOSED = 0.25
"""Seconds before a lane is tried again whose limit was reached: another worker may have made room."""
CONTENDED = 0.01
"""Seconds before it is tried again when another claimer was at the same gate."""
MAX_FREED = 1000


class Unit:
    """One part of a claim: a lane, the lanes of fairness keys of a queue, or the identities of an actor.

    ``kind`` is ``lane``, ``fair`` or ``serial``, ``name`` the lane or the actor.
    """

    __slots__ = ("after", "again", "freed", "gates", "kind", "name", "priority", "route", "try_at")

    def __init__(self, kind: str, route: str, name: str, gates: list[str], priority: int) -> None:
        self.kind = kind
        self.route = route
        self.name = name
        self.gates = gates
        self.priority = priority
        self.after: str | None = None
        """The lane where its last walk stopped."""
        self.freed: dict[str, None] = {}
        """Lanes of identities that came free here; they go first."""
        self.try_at = 0.0
        self.again = False
        """True once something was given back after the last claim began, which may not have seen it."""

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.kind, self.route, self.name)

    def request(self) -> dict[str, Any]:
        """The unit as ``claim_lanes`` takes it."""
        self.again = False
        if self.kind == "lane":
            return {"kind": "lane", "route": self.route, "lane": self.name, "gates": self.gates}
        first = list(self.freed)
        if self.kind == "fair" and self.name == "all" and self.after is None:
            first = [""]  # jobs without a key take turns as one more
        return {
            "kind": self.kind,
            "route": self.route,
            "actor": self.name,
            "gates": self.gates,
            "first": first,
            "after": self.after,
        }


class Lanes:
    """The units that had pending rows at the last look."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, str, str], Unit] = {}
        self.freed = 0
        """Attempts that ended since the last claim and gave back a limit or an identity."""

    def reset(self, heads: Iterable[tuple[str, str, int, str]], rules: Rules, known: Iterable[str], top: int) -> None:
        """Take the lanes that have pending rows now: (route, lane, priority, actor of the first row).

        ``top`` is the highest priority of any lane, the plain ones too.
        """
        known = set(known)
        units: dict[tuple[str, str, str], Unit] = {}
        for route, lane, priority, actor in heads:
            mixed = lane == "" or lane.startswith("f:")
            if not mixed and actor not in known:
                continue
            gates = rules.gates(route, None if mixed else actor)
            if mixed and route in rules.round_robin:
                unit = Unit("fair", route, "all", gates, priority)
            elif lane.startswith("f:"):
                unit = Unit("fair", route, "keyed", gates, priority)
            elif lane.startswith("i:"):
                unit = Unit("serial", route, actor, gates, priority)
            else:
                unit = Unit("lane", route, lane, gates, priority)
            before = self._units.get(unit.key)
            if before is not None:
                unit.after, unit.freed, unit.try_at = before.after, before.freed, before.try_at
                unit.again = before.again
            other = units.get(unit.key)
            if other is None or other.priority < unit.priority:
                units[unit.key] = unit
        # One look tells the priority of one identity of many: they take turns with whatever is most urgent.
        for unit in units.values():
            if unit.kind == "serial":
                unit.priority = top
        self._units = units

    def __bool__(self) -> bool:
        return bool(self._units)

    @property
    def limited(self) -> bool:
        """Whether any of them is limited, so that its jobs wait for each other."""
        return any(unit.gates or unit.kind == "serial" for unit in self._units.values())

    def open(self) -> list[Unit]:
        """The units to claim from now, those with the most urgent head first, taking turns among equals."""
        now = time.monotonic()
        units = [unit for unit in self._units.values() if unit.try_at <= now]
        first = int(jitter(0, len(units)))  # by chance: a count could keep step with who else takes turns
        return sorted(units[first:] + units[:first], key=lambda unit: -unit.priority)

    def next_open(self) -> float | None:
        """Seconds until another unit opens; None when there is none."""
        if not self._units:
            return None
        return max(0.001, min(unit.try_at for unit in self._units.values()) - time.monotonic())

    @staticmethod
    def requests(units: Sequence[Unit]) -> str:
        """The units as ``claim_lanes`` takes them."""
        return json.dumps([unit.request() for unit in units])

    def noted(self, unit: Unit, note: str, stopped_at: str | None, claimed: Sequence[Attempt]) -> bool:
        """Take what a claim says of a unit; True when it has more for us at once."""
        walked = [attempt.lane for attempt in claimed if attempt.lane not in unit.freed]
        unit.freed.clear()
        if note == "contended":
            unit.try_at = time.monotonic() + CONTENDED
            return False
        # A walk looks further than it claims: where it ran out of room it goes on after the last lane it took from.
        unit.after = stopped_at if note == "short" else max(walked, default=unit.after)
        if unit.again or note == "more" or (note == "short" and stopped_at is not None):
            return True
        unit.try_at = time.monotonic() + CLOSED
        return False

    def contended(self, units: Iterable[Unit]) -> None:
        """Two claimers met at an identity: try again soon."""
        for unit in units:
            unit.try_at = time.monotonic() + CONTENDED

    def free(self, attempt: Attempt) -> None:
        """An attempt of ours ended and gave back its limit, or its identity."""
        self.freed += 1
        for unit in self._units.values():
            if attempt.gated:
                unit.try_at, unit.again = 0.0, True
            serial = unit.kind == "serial" and unit.name == attempt.ref.name
            if serial and attempt.lane.startswith("i:") and len(unit.freed) < MAX_FREED:
                unit.freed[attempt.lane] = None
                unit.try_at, unit.again = 0.0, True
