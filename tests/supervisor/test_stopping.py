"""The stop budget."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from taskqd.supervisor.stopping import LEAST_GRACE, Graces, child_time, deadlines, hurry, last_moment, scale


def test_the_default_grace_holds_the_default_graces() -> None:
    graces = scale(85, Graces(30, 10), fixed_cancellation=False, fixed_cleanup=False)
    assert graces == Graces(30, 10)
    times = deadlines(1000, 85, graces)
    assert (times.cancel, times.force, times.gone) == (1030, 1040, 1080)
    assert last_moment(1000, 85) == 1081


@settings(deadline=None)
@given(grace=st.floats(LEAST_GRACE, 1000), cancellation=st.floats(0, 2000), cleanup=st.floats(0, 2000))
def test_graces_that_nobody_fixed_always_fit(grace: float, cancellation: float, cleanup: float) -> None:
    found = scale(grace, Graces(cancellation, cleanup), fixed_cancellation=False, fixed_cleanup=False)
    assert 0 <= found.cancellation <= cancellation
    assert 0 <= found.cleanup <= cleanup
    assert found.cancellation + found.cleanup < child_time(grace)


@settings(deadline=None)
@given(
    grace=st.floats(LEAST_GRACE, 1000),
    cancellation=st.floats(0, 2000),
    cleanup=st.floats(0, 2000),
    fixed=st.tuples(st.booleans(), st.booleans()),
)
def test_what_was_fixed_stays_or_is_refused(
    grace: float, cancellation: float, cleanup: float, fixed: tuple[bool, bool]
) -> None:
    wanted = Graces(cancellation, cleanup)
    try:
        found = scale(grace, wanted, fixed_cancellation=fixed[0], fixed_cleanup=fixed[1])
    except ValueError:
        assert any(fixed)
        return
    assert not fixed[0] or found.cancellation == cancellation
    assert not fixed[1] or found.cleanup == cleanup
    assert found.cancellation + found.cleanup < child_time(grace)


def test_a_fixed_grace_that_cannot_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"cancellation_grace_period 30 .* 22 s, .*termination_grace_period 30 s"):
        scale(30, Graces(30, 10), fixed_cancellation=True, fixed_cleanup=False)


@settings(deadline=None)
@given(
    now=st.floats(0, 1e6),
    grace=st.floats(LEAST_GRACE, 1000),
    cancellation=st.floats(0, 1000),
    cleanup=st.floats(0, 1000),
    later=st.floats(0, 1000),
)
def test_the_times_are_in_order_and_inside_the_grace(
    now: float, grace: float, cancellation: float, cleanup: float, later: float
) -> None:
    graces = Graces(cancellation, cleanup)
    times = deadlines(now, grace, graces)
    assert now <= times.cancel <= times.force <= times.gone < times.kill < last_moment(now, grace) <= now + grace
    sooner = hurry(now + later, times, graces)
    assert sooner.cancel <= times.cancel
    assert sooner.force <= times.force
    assert sooner.kill == times.kill
    assume(later == 0)
    assert sooner.cancel == now
