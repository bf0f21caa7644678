"""The connection budget of a workgroup."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqd.supervisor.advice import advise
from taskqd.supervisor.budget import describe_fleet, explain_misfit, explain_peak
from taskqd.supervisor.fleet import Crew, Fleet
from taskqd.supervisor.room import Fit, Limits, Neighbour, grant, judge_fleet, tightest


def fleet(replicas: int = 1, concurrency: int = 8, **options: int) -> Fleet:
    return Fleet((Crew("io", replicas, concurrency),), **options)  # type: ignore[arg-type]


def test_the_worked_examples() -> None:
    default = fleet()
    assert (default.direct, default.pooled, default.total.total) == (12, 12, 24)
    ten = fleet(10, 16)
    assert (ten.direct, ten.pooled, ten.total.total) == (102, 240, 342)
    per_slot = Fleet((Crew("io", 10, 16, per_slot=True),))
    assert (per_slot.direct, per_slot.pooled, per_slot.total.total) == (272, 240, 512)
    one_per_slot = Fleet((Crew("io", 1, 8, per_slot=True),))
    assert one_per_slot.total.total == 33


HOSTING = {"auto": 1, "off": 0, "on": 2}
WORKERS = st.tuples(st.integers(1, 50), st.integers(1, 200), st.sampled_from(sorted(HOSTING)))


@settings(deadline=None)
@given(st.lists(WORKERS, min_size=1, max_size=5), st.integers(0, 20))
def test_the_formula_for_any_fleet(workers: list[tuple[int, int, Any]], pods: int) -> None:
    crews = tuple(Crew(f"w{i}", replicas, slots, maintenance=on) for i, (replicas, slots, on) in enumerate(workers))
    found = Fleet(crews, web_pods=pods)
    extra = 2 if any(on == "auto" for *_, on in workers) else 0
    assert found.direct == sum(replicas * (4 + 4 + 1 + HOSTING[on]) for replicas, _, on in workers) + extra
    assert found.direct == sum(crew.replicas * _direct(crew) for crew in crews) + extra
    assert found.pooled == sum(replicas * int(1.5 * slots) for replicas, slots, _ in workers)
    assert found.total.total == found.direct + found.pooled + 5 * pods
    assert found.required == found.total.total + 3 + 1


def _direct(crew: Crew) -> int:
    return sum(part.most for part in crew.sessions if not part.pooled)


def test_without_a_scheduler_it_is_not_counted() -> None:
    alone = Fleet((Crew("io", 1, 8),), scheduler=False)
    assert alone.required == 24 + 1
    # What one of its workers holds in place of a scheduler is in that.
    assert alone.idle == fleet().idle


@pytest.mark.parametrize(
    ("maintenance", "scheduler", "required", "idle"),
    [("auto", True, 28, 6), ("off", True, 25, 6), ("on", True, 27, 8), ("auto", False, 25, 6), ("off", False, 22, 4)],
)
def test_who_maintains_the_schema_is_counted(maintenance: Any, scheduler: bool, required: int, idle: int) -> None:
    found = Fleet((Crew("io", 1, 8, maintenance=maintenance),), scheduler=scheduler)
    assert (found.required, found.idle) == (required, idle)
    assert found.is_attended == (scheduler or maintenance != "off")


def test_behind_a_pooler_only_direct_connections_reach_the_server() -> None:
    assert Fleet((Crew("io", 10, 16),), pooler=True).required == 102 + 4


def test_it_fits_up_to_the_last_connection() -> None:
    needed = fleet().required
    assert judge_fleet(fleet(), Limits(needed + 3)).fit is Fit.FITS
    assert judge_fleet(fleet(), Limits(needed + 2)).fit is Fit.NEVER
    assert judge_fleet(fleet(), Limits(needed + 3, others=1)).fit is Fit.CROWDED
    assert judge_fleet(fleet(), Limits(needed + 3, reserved=1)).fit is Fit.NEVER


def test_declared_connections_may_be_the_ones_that_others_hold_now() -> None:
    declared = fleet(app_connections=20)
    limits = Limits(declared.required + 3, others=20)
    assert judge_fleet(declared, limits).fit is Fit.FITS


def test_the_cheapest_change_comes_first_and_fits() -> None:
    ten = fleet(4, 16)
    assert advise(ten, 24) == (
        "io.max_concurrency 16→12 frees 24",
        "io.replicas 4→3 frees 34",
    )
    assert advise(Fleet((Crew("io", 1, 16),)), 6) == ("io.max_concurrency 16→12 frees 6",)


def test_when_no_single_change_is_enough_all_shrink_together() -> None:
    two = Fleet((Crew("io", 1, 16), Crew("cpu", 1, 8)))
    assert advise(two, 30) == ("io.max_concurrency 16→2, cpu.max_concurrency 8→2 together free 30",)
    assert advise(two, 1000) == ()


# -- properties of any fleet ----------------------------------------------------------------------

crews = st.builds(
    Crew,
    name=st.sampled_from(["io", "cpu", "gpu", "mail"]),
    replicas=st.integers(1, 20),
    max_concurrency=st.integers(1, 64),
    dispatcher_pool_size=st.integers(1, 8),
    heartbeat_pool_size=st.integers(1, 8),
    per_slot=st.booleans(),
    listens=st.booleans(),
)
fleets = st.builds(
    Fleet,
    crews=st.lists(crews, min_size=1, max_size=4, unique_by=lambda crew: crew.name).map(tuple),
    scheduler=st.booleans(),
    web_pods=st.integers(0, 5),
    app_connections=st.integers(0, 50),
    pooler=st.booleans(),
    pooler_sessions=st.integers(0, 100),
    supervisors=st.integers(1, 4),
    renews_itself=st.booleans(),
)
all_limits = st.builds(
    Limits,
    max_connections=st.integers(1, 3000),
    superuser_reserved=st.integers(0, 5),
    reserved=st.integers(0, 5),
    others=st.integers(0, 200),
    groups=st.lists(st.builds(Neighbour, st.just("g"), st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple),
)


@given(fleets)
def test_the_parts_make_the_sums(found: Fleet) -> None:
    for crew in found.crews:
        one = replace(crew, replicas=1).budget
        assert sum(part.most for part in crew.sessions if not part.pooled) == one.direct
        assert sum(part.most for part in crew.sessions if part.pooled) == one.pooled
        assert all(0 <= part.idle <= part.most for part in crew.sessions)
    described = describe_fleet(found, None, judge_fleet(found, None))
    assert sum(row["direct"] for row in described["workers"]) + described["leader"] == found.direct
    assert sum(row["pooled"] for row in described["workers"]) == found.pooled
    assert found.required == found.own + found.web_pods * 5 + found.app_connections
    assert found.peak == found.required + found.rotation + found.surge
    assert found.idle <= found.own + (found.pooled if found.pooler else 0)
    one_by_one = sum(Fleet((crew,), scheduler=False).total.total - 2 for crew in found.crews)
    assert found.direct + found.pooled == found.supervisors * one_by_one + 2


@given(fleets, st.data())
def test_more_of_anything_never_needs_less(found: Fleet, data: st.DataObject) -> None:
    crew = data.draw(st.sampled_from(found.crews))
    knob = data.draw(st.sampled_from(["replicas", "max_concurrency", "dispatcher_pool_size", "heartbeat_pool_size"]))
    larger = found.with_crews(replace(crew, **{knob: getattr(crew, knob) + 1}))
    for other in (larger, replace(found, supervisors=found.supervisors + 1), replace(found, app_connections=99)):
        for name in ("direct", "pooled", "own", "required", "rotation", "surge", "peak", "pooled_peak"):
            assert getattr(other, name) >= getattr(found, name)


@given(fleets, all_limits)
def test_what_is_advised_fits(found: Fleet, limits: Limits) -> None:
    verdict = judge_fleet(found, limits)
    assert (verdict.over > 0) == (verdict.fit is not Fit.FITS)
    assert verdict.peak_over >= 0
    if verdict.fit is Fit.FITS:
        assert found.own <= limits.room(found.outside)
        return
    least = judge_fleet(replace(found, crews=tuple(replace(c, max_concurrency=1) for c in found.crews)), limits)
    assert verdict.advice or least.fit is not Fit.FITS
    for text in verdict.advice:
        changed = found
        for name, knob, before, after in re.findall(r"(\w+)\.(\w+) (\d+)→(\d+)", text):
            (crew,) = [crew for crew in changed.crews if crew.name == name]
            assert getattr(crew, knob) == int(before) > int(after) >= 1
            changed = changed.with_crews(replace(crew, **{knob: int(after)}))
        assert found.own - changed.own == int(text.split()[-1])
        assert judge_fleet(changed, limits).fit is Fit.FITS


@given(fleets, all_limits)
def test_the_cheapest_change_is_as_small_as_can_be(found: Fleet, limits: Limits) -> None:
    for text in judge_fleet(found, limits).advice:
        for name, knob, before, after in re.findall(r"(\w+)\.(\w+) (\d+)→(\d+)", text):
            if "together" in text or int(after) + 1 == int(before):
                continue
            (crew,) = [crew for crew in found.crews if crew.name == name]
            less = found.with_crews(replace(crew, **{knob: int(after) + 1}))
            assert found.own - less.own < judge_fleet(found, limits).missing


@given(fleets, st.lists(all_limits, min_size=1, max_size=3))
def test_the_limit_that_decides_is_the_worst(found: Fleet, limits: list[Limits]) -> None:
    decides = tightest(found, limits)
    assert decides is not None
    fits = [judge_fleet(found, each).fit for each in limits]
    worst = next((fit for fit in (Fit.NEVER, Fit.CROWDED) if fit in fits), Fit.FITS)
    assert judge_fleet(found, decides).fit is worst
    if worst is Fit.FITS:
        assert decides.room(found.outside) == min(each.room(found.outside) for each in limits)


@given(all_limits, st.integers(0, 50), st.integers(0, 500), st.integers(0, 100))
def test_what_is_granted_is_what_there_is(limits: Limits, outside: int, wanted: int, extra: int) -> None:
    granted = grant(limits, outside, wanted, extra)
    assert wanted <= granted <= wanted + extra
    assert granted <= max(wanted, limits.room(outside))
    assert granted in (wanted + extra, max(wanted, limits.room(outside)))
    assert grant(None, outside, wanted, extra) == wanted + extra


def test_the_message_names_the_numbers_and_the_way_out() -> None:
    limits = Limits(100)
    text = explain_misfit(fleet(4, 16), limits, judge_fleet(fleet(4, 16), limits))
    assert "needs 142 connections and can have 97 of the server's 100" in text
    assert "io.replicas 4→2 frees 68" in text
    assert "max_connections at least 145" in text
    crowded = Limits(200, others=80)
    text = explain_misfit(fleet(4, 16), crowded, judge_fleet(fleet(4, 16), crowded))
    assert "beside the 80 of others" in text


@pytest.mark.parametrize("limits", [None])
def test_an_unknown_server_is_no_verdict(limits: None) -> None:
    assert judge_fleet(fleet(), limits).fit is Fit.UNKNOWN


def test_the_limit_of_a_role_is_named_in_place_of_the_servers() -> None:
    limits = Limits(10, 0, 0, 4, limited_by="role app")
    verdict = judge_fleet(fleet(), limits)
    assert (verdict.fit, verdict.over) == (Fit.NEVER, 18)
    message = explain_misfit(fleet(), limits, verdict)
    assert "needs 28 connections and can have 10, the connection limit of role app: 18 too many" in message
    assert message.endswith("a connection limit of at least 32 for role app"), "others hold four"


def test_a_neighbour_is_named_with_what_it_counts_for() -> None:
    groups = (Neighbour("big", 20, 3), Neighbour("small", 2, 4))
    assert judge_fleet(fleet(), Limits(60, others=5, groups=groups)).fit is Fit.FITS
    crowded = Limits(59, others=5, groups=groups)
    assert judge_fleet(fleet(), crowded).fit is Fit.CROWDED
    message = explain_misfit(fleet(), crowded, judge_fleet(fleet(), crowded))
    assert "28 connections beside the 5 of others, 20 of group 'big', 4 of group 'small'" in message


def test_a_peak_that_does_not_fit_is_a_warning_with_its_numbers() -> None:
    limits = Limits(75)
    verdict = judge_fleet(fleet(), limits)
    assert (verdict.fit, verdict.peak_over) == (Fit.FITS, 0)
    limits = Limits(60)
    verdict = judge_fleet(fleet(), limits)
    assert (verdict.fit, verdict.peak_over) == (Fit.FITS, 15)
    message = explain_peak(fleet(), limits, verdict)
    assert "its peak of 72 connections does not: 57 are free, 15 too few" in message
