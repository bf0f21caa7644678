"""What differs between the plan that runs and a new one, and in which order to get there. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from taskqd.domain.errors import BudgetExceededError
from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.recycle import RecycleLimits
from taskqd.supervisor.slot import Timing

_OF_NO_PROCESS: dict[str, Any] = {
    "replicas": 1,
    "database_stale_after": 0.0,
    "recycle": RecycleLimits(),
    "timing": Timing(),
    "settle_after": 0.0,
    "env": {},
    "env_file": None,
    "source": None,
}
"""What the supervisor alone reads of a spec, and what processes take in place: a change of it restarts nothing.

Of an environment the mark counts.
"""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a new plan asks for, by the names of workers and scheduler, each in the order of its plan.

    A name is in exactly one of ``unchanged``, ``removed``, ``added`` and the union of ``rolled`` and ``scaled``.
    """

    unchanged: tuple[str, ...]
    rolled: tuple[str, ...]
    """Their processes have to be replaced."""
    scaled: dict[str, tuple[int, int]]
    """Their replicas, before and after."""
    removed: tuple[str, ...]
    added: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        """True when every process may stay as it is."""
        return not (self.rolled or self.scaled or self.removed or self.added)

    def describe(self) -> dict[str, Any]:
        """Return the changes as JSON values."""
        return {
            "unchanged": list(self.unchanged),
            "rolled": list(self.rolled),
            "scaled": {name: {"from": before, "to": after} for name, (before, after) in self.scaled.items()},
            "removed": list(self.removed),
            "added": list(self.added),
        }


def diff(old: Plan, new: Plan, unsettled: Collection[str] = ()) -> Changes:
    """Compare two plans by what each process is given: its arguments, its settings, its environment.

    ``unsettled`` names were left half changed by an earlier attempt: their processes are looked at again.
    """
    before, after = _by_name(old), _by_name(new)
    common = [name for name in after if name in before]
    moved = old.app_dir != new.app_dir  # every process imports from there
    rolled = [name for name in common if moved or name in unsettled or not same_process(before[name], after[name])]
    scaled = {
        name: (before[name].replicas, after[name].replicas)
        for name in common
        if before[name].replicas != after[name].replicas
    }
    return Changes(
        unchanged=tuple(name for name in common if name not in rolled and name not in scaled),
        rolled=tuple(rolled),
        scaled=scaled,
        removed=tuple(name for name in before if name not in after),
        added=tuple(name for name in after if name not in before),
    )


def same_process(one: ChildSpec, other: ChildSpec) -> bool:
    """True when a process of one spec is as good as a process of the other."""
    same = replace(one, **_OF_NO_PROCESS) == replace(other, **_OF_NO_PROCESS)
    return same and (one.source is None) == (other.source is None)


def needs_restart(old: Plan, new: Plan) -> list[str]:
    """Return what no running group can change, one line each with the old and the new value."""
    pairs = [
        ("[supervisor] name", old.group, new.group),
        ("[supervisor] runtime_dir", old.runtime_dir, new.runtime_dir),
        ("[supervisor] health_address", old.health_address, new.health_address),
        ("[supervisor] logs", old.logs, new.logs),
        ("schema_name", old.budget.get("schema"), new.budget.get("schema")),
        ("the database", old.budget.get("database"), new.budget.get("database")),
    ]
    return [
        f"{what} changes from {_shown(before)} to {_shown(after)}, which needs a restart of the group"
        for what, before, after in pairs
        if before != after
    ]


# -- connections ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """How to make changes inside the connection budget."""

    grow_first: bool
    """Start what is new before what is no longer wanted is drained."""
    surge: frozenset[str]
    """Names whose replacements may start while what they replace still runs."""
    rolls: tuple[str, ...]
    """The names to roll, those that get smaller first."""


def order(old: Plan, new: Plan, changes: Changes) -> Order:
    """Return the order in which ``changes`` never hold more connections than the server grants.

    Where what is new comes first, each name holds at some time the most that it ever does. Where that is too much
    and what shrinks goes first, no step holds more than the larger of both plans. A surge adds one process.
    """
    before, after, allowed = Costs(old), Costs(new), Costs(new).allowed
    names = before.unit.keys() | after.unit.keys()
    highest = after.fixed + sum(_most(before, after, name) for name in names)
    grow_first = allowed is None or highest <= allowed
    peak = highest if grow_first else max(before.own, after.own)
    return Order(
        grow_first=grow_first,
        surge=frozenset(
            name for name in changes.rolled if allowed is None or peak + after.unit.get(name, 0) <= allowed
        ),
        rolls=tuple(sorted(changes.rolled, key=lambda name: _kept(before, after, name) * _dearer(before, after, name))),
    )


def _kept(before: Costs, after: Costs, name: str) -> int:
    return min(before.replicas.get(name, 0), after.replicas.get(name, 0))


def _dearer(before: Costs, after: Costs, name: str) -> int:
    return after.unit.get(name, 0) - before.unit.get(name, 0)


def _most(before: Costs, after: Costs, name: str) -> int:
    """Return the most that a name holds when it is rolled, then grows, then shrinks."""
    held = before.total.get(name, 0)
    return max(held, held + _kept(before, after, name) * _dearer(before, after, name), after.total.get(name, 0))


class Costs:
    """The connections of a plan on the server, by name; from the budget that came with it."""

    def __init__(self, plan: Plan) -> None:
        budget = plan.budget
        pooler = bool(budget.get("pooler"))
        self.replicas = {spec.name: spec.replicas for spec in plan.children}
        self.unit: dict[str, int] = {
            row["name"]: (row["direct"] + (0 if pooler else row["pooled"])) // max(row["replicas"], 1)
            for row in budget.get("workers", ())
        }
        """Of one process."""
        if budget.get("scheduler"):
            self.unit["scheduler"] = int(budget["scheduler"])
        self.total = {name: cost * self.replicas.get(name, 0) for name, cost in self.unit.items()}
        """Of all processes of a name."""
        self.fixed = int(budget.get("leader", 0)) + int(budget.get("preflight", 0))
        if pooler:
            self.fixed += min(int(budget.get("pooler_sessions", 0)), int(budget.get("pooled", 0)))
        self.own = self.fixed + sum(self.total.values())
        self.allowed = _allowed(budget)
        """What the group may hold, or None where the server's limits are not known or not enforced."""


def rescale(plan: Plan, name: str, replicas: int) -> Plan:
    """Return ``plan`` with another number of processes of ``name``.

    Raises ``BudgetExceededError`` when they need more connections than the server grants.
    """
    children = tuple(replace(spec, replicas=replicas) if spec.name == name else spec for spec in plan.children)
    before = next(spec.replicas for spec in plan.children if spec.name == name)
    rows = [_scaled_row(row, replicas) if row["name"] == name else row for row in plan.budget.get("workers", ())]
    decided = {each: why for each, why in plan.budget.get("auto_replicas", {}).items() if each != name}
    new = replace(plan, children=children, budget={**plan.budget, "workers": rows, "auto_replicas": decided})
    costs = Costs(new)
    more = (replicas - before) * costs.unit.get(name, 0)
    for key in ("required", "total", "peak"):
        if key in new.budget:
            new.budget[key] += more
    if more > 0 and costs.allowed is not None and costs.own > costs.allowed:
        over = costs.own - costs.allowed
        fits = replicas - -(-over // costs.unit[name])
        raise BudgetExceededError(
            f"{replicas} of {name} make {costs.own} connections and the server grants the group {costs.allowed}: "
            f"{over} too many; {max(fits, before)} would fit",
            ExitCode.REFUSED,
        )
    return new


def _scaled_row(row: dict[str, Any], replicas: int) -> dict[str, Any]:
    before = max(row["replicas"], 1)
    counts = {key: row[key] // before * replicas for key in ("direct", "pooled", "total")}
    return {**row, **counts, "replicas": replicas}


def _allowed(budget: dict[str, Any]) -> int | None:
    if budget.get("limits") is None or budget.get("enforce") == "warn":
        return None
    return int(budget["available"]) - int(budget["taken"]) + int(budget.get("elsewhere", 0))


def _by_name(plan: Plan) -> dict[str, ChildSpec]:
    return {spec.name: spec for spec in plan.children}


def _shown(value: str | None) -> str:
    return "the default" if value is None else repr(value)
