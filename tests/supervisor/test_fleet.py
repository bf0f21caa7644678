"""The connection budget of a workgroup."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqd.supervisor.advice import advise
from taskqd.supervisor.budget import explain_misfit
from taskqd.supervisor.fleet import Crew, Fleet
from taskqd.supervisor.room import Fit, Limits, judge_fleet


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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), min_size=1, max_size=5), st.integers(0, 20))
def test_the_formula_for_any_fleet(workers: list[tuple[int, int]], pods: int) -> None:
    crews = tuple(Crew(f"w{i}", replicas, slots) for i, (replicas, slots) in enumerate(workers))
    found = Fleet(crews, web_pods=pods)
    assert found.direct == sum(replicas * (4 + 4 + 2) for replicas, _ in workers) + 2
    assert found.pooled == sum(replicas * int(1.5 * slots) for replicas, slots in workers)
    assert found.total.total == found.direct + found.pooled + 5 * pods
    assert found.required == found.total.total + 3 + 1


def test_without_a_scheduler_it_is_not_counted() -> None:
    assert Fleet((Crew("io", 1, 8),), scheduler=False).required == 24 + 1


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


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 64)), min_size=1, max_size=4), st.integers(1, 2000))
def test_every_advice_frees_enough(workers: list[tuple[int, int]], over: int) -> None:
    crews = tuple(Crew(f"w{i}", replicas, slots) for i, (replicas, slots) in enumerate(workers))
    for text in advise(Fleet(crews), over):
        assert int(text.split()[-1]) >= over


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
    assert message.endswith("a connection limit of at least 28 for role app")
