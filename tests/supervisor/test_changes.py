"""What differs between two plans, and an order of changes that the server's connections allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.domain.errors import BudgetExceededError
from taskqd.supervisor.budget import describe_fleet
from taskqd.supervisor.changes import Changes, Costs, diff, needs_restart, order, rescale
from taskqd.supervisor.fleet import Crew, Fleet
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.recycle import RecycleLimits
from taskqd.supervisor.room import Limits, judge_fleet

NAMES = ("io", "cpu", "gpu", "mail")


def plan(sizes: dict[str, tuple[int, int]], available: int = 10_000, **fields: Any) -> Plan:
    """A plan of workers with (replicas, max_concurrency), and its budget on a server with so many connections."""
    children = tuple(
        ChildSpec(name, "worker", ("worker", "--actors", "m:a"), replicas, settings={"max_concurrency": concurrency})
        for name, (replicas, concurrency) in sizes.items()
    )
    fleet = Fleet(tuple(Crew(name, *size) for name, size in sizes.items()))
    limits = Limits(available, 0)
    budget = {"enforce": "enforce", "schema": "s", **describe_fleet(fleet, limits, judge_fleet(fleet, limits))}
    scheduler = ChildSpec("scheduler", "scheduler", ("scheduler", "run"))
    return Plan("g", (scheduler, *children), budget=budget, **fields)


plans = st.dictionaries(st.sampled_from(NAMES), st.tuples(st.integers(1, 5), st.integers(1, 40)), min_size=1).map(plan)


@given(old=plans, new=plans)
def test_every_name_has_one_fate(old: Plan, new: Plan) -> None:
    before = {spec.name: spec for spec in old.children}
    after = {spec.name: spec for spec in new.children}
    changes = diff(old, new)
    assert set(changes.added) == after.keys() - before.keys()
    assert set(changes.removed) == before.keys() - after.keys()
    changed = {*changes.rolled, *changes.scaled}
    assert set(changes.unchanged) == (before.keys() & after.keys()) - changed
    for name in before.keys() & after.keys():
        one, other = before[name], after[name]
        assert (name in changes.scaled) == (one.replicas != other.replicas)
        assert (name in changes.rolled) == (one.settings != other.settings)
    assert changes.nothing == (before == after)


@given(only=plans)
def test_nothing_changes_by_itself_nor_by_the_way_over_json(only: Plan) -> None:
    assert diff(only, Plan.from_json(only.to_json())).nothing
    assert needs_restart(only, Plan.from_json(only.to_json())) == []


@given(old=plans, new=plans)
def test_the_way_back_is_the_way_there_reversed(old: Plan, new: Plan) -> None:
    there, back = diff(old, new), diff(new, old)
    assert set(there.added) == set(back.removed)
    assert set(there.rolled) == set(back.rolled)
    assert there.scaled == {name: (after, before) for name, (before, after) in back.scaled.items()}


@given(old=plans, new=plans, room=st.integers(0, 200))
def test_no_step_holds_more_than_the_server_grants(old: Plan, new: Plan, room: int) -> None:
    allowed = max(Costs(old).own, Costs(new).own) + room
    new = replace(new, budget={**new.budget, "available": allowed})
    changes = diff(old, new)
    pace = order(old, new, changes)
    assert sorted(pace.rolls) == sorted(changes.rolled)
    for held in _held(old, new, changes, grow_first=pace.grow_first, rolls=pace.rolls, surge=pace.surge):
        assert held <= allowed


def _held(
    old: Plan, new: Plan, changes: Changes, *, grow_first: bool, rolls: tuple[str, ...], surge: frozenset[str]
) -> list[int]:
    """The connections at every moment of the changes, each process counted with what it may hold."""
    before, after = Costs(old), Costs(new)
    counts = {spec.name: spec.replicas for spec in old.children}
    wanted = {spec.name: spec.replicas for spec in new.children}
    rows: dict[str, list[int]] = {name: [before.unit[name]] * count for name, count in counts.items()}
    held = []

    def note(extra: int = 0) -> None:
        held.append(after.fixed + extra + sum(sum(row) for row in rows.values()))

    def shrink() -> None:
        for name in list(rows):
            rows[name] = rows[name][: wanted.get(name, 0)]
        note()

    note()
    if not grow_first:
        shrink()
    for name in rolls:
        for index in range(min(len(rows[name]), wanted[name])):
            if name in surge:
                note(after.unit[name])
            rows[name][index] = after.unit[name]
            note()
    for name, count in wanted.items():
        row = rows.setdefault(name, [])
        row += [after.unit[name]] * (count - len(row))
        note()
    if grow_first:
        shrink()
    assert {name: row for name, row in rows.items() if row} == {
        name: [after.unit[name]] * count for name, count in wanted.items()
    }
    return held


def test_what_the_supervisor_alone_reads_rolls_nobody() -> None:
    old = plan({"io": (2, 8)})
    children = tuple(
        replace(spec, database_stale_after=99.0, recycle=RecycleLimits(max_jobs=5)) for spec in old.children
    )
    assert diff(old, replace(old, children=children)).nothing


def test_another_place_to_import_from_rolls_everybody() -> None:
    old = plan({"io": (2, 8)})
    assert diff(old, replace(old, app_dir="/srv/app")).rolled == ("scheduler", "io")


def test_what_an_aborted_reload_left_is_looked_at_again() -> None:
    old = plan({"io": (2, 8), "cpu": (1, 2)})
    assert diff(old, old, {"io"}).rolled == ("io",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"group": "h"}, "[supervisor] name changes from 'g' to 'h'"),
        ({"runtime_dir": "run"}, "[supervisor] runtime_dir changes from the default to 'run'"),
        ({"logs": "capture"}, "[supervisor] logs changes from 'auto' to 'capture'"),
        ({"budget": {"schema": "t"}}, "schema_name changes from 's' to 't'"),
        ({"budget": {"schema": "s", "database": "a@b:1/c"}}, "the database changes from the default to 'a@b:1/c'"),
    ],
)
def test_what_no_running_group_can_change(change: dict[str, Any], says: str) -> None:
    old = plan({"io": (1, 8)})
    assert needs_restart(old, replace(old, **change)) == [f"{says}, which needs a restart of the group"]


def test_a_scale_that_does_not_fit_says_what_would() -> None:
    old = plan({"io": (2, 8)}, available=100)
    assert Costs(old).own == 2 * 22 + 6
    assert [spec.replicas for spec in rescale(old, "io", 4).children] == [1, 4]
    with pytest.raises(BudgetExceededError, match=r"160 connections .* grants the group 100: 60 too many; 4 would fit"):
        rescale(old, "io", 7)


def test_limits_that_are_not_enforced_stop_no_scale() -> None:
    old = plan({"io": (2, 8)}, available=10)
    old.budget["enforce"] = "warn"
    new = rescale(old, "io", 7)
    assert new.budget["workers"][0]["total"] == 7 * 22
    assert new.budget["required"] == old.budget["required"] + 5 * 22
