"""The rules between settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pydantic import ValidationError

from taskqd.domain.leases import lease_floor
from taskqd.settings import Resolved, Settings, SettingsError

Resolve = Callable[..., Resolved]

QUICK = {
    "heartbeat_interval": 1,
    "heartbeat_command_timeout": 0.5,
    "max_heartbeat_failures": 2,
    "lock_lease": 8,
    "cancellation_grace_period": 3,
    "cleanup_grace_period": 1,
    "watchdog_loop_lag_budget": 4,
    "watchdog_loop_lag_warn_budget": 2,
}
"""A group that notices everything fast, as the examples use it."""


def test_the_lease_floor_is_58_at_the_defaults() -> None:
    assert lease_floor(10, 2, 3) == 58
    assert lease_floor(1, 0.5, 2) == 5.5
    assert lease_floor(0.7, 0.1, 3) == 3.9


def test_a_lease_below_the_floor_shows_the_arithmetic(resolve: Resolve) -> None:
    assert resolve(environ={"TASKQ_LOCK_LEASE": "58"}).settings.lock_lease == 58
    with pytest.raises(SettingsError) as refused:
        resolve(environ={"TASKQ_LOCK_LEASE": "57.9"})
    assert str(refused.value) == (
        "settings refused: TASKQ_LOCK_LEASE = 57.9 (environment): must be at least 58 = "
        "max(10, 2) + (3 + 1) × (10 + 2), with TASKQ_HEARTBEAT_INTERVAL = 10 (default), "
        "TASKQ_HEARTBEAT_COMMAND_TIMEOUT = 2 (default), TASKQ_MAX_HEARTBEAT_FAILURES = 3 (default)"
    )


def test_the_culprit_is_named_even_when_the_lease_is_the_default(resolve: Resolve) -> None:
    with pytest.raises(SettingsError) as refused:
        resolve(worker_keys={"heartbeat_interval": "12s"})
    assert "TASKQ_LOCK_LEASE = 60 (default): must be at least 68" in str(refused.value)
    assert "[[workers]] heartbeat_interval = 12," in str(refused.value)


def test_the_quick_group_is_valid(resolve: Resolve) -> None:
    settings = resolve(worker_keys=QUICK).settings
    assert (settings.lock_lease, settings.termination_grace_period) == (8, 85)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"cancellation_grace_period": 70, "lock_lease": 100},
            "TASKQ_TERMINATION_GRACE_PERIOD = 85 (default): must be above 85 = 70 + 10 + 5 to close and exit",
        ),
        (
            {"cancellation_grace_period": 50},
            "TASKQ_LOCK_LEASE = 60 (default): must be above 60 = 50 + 10",
        ),
        (
            {"watchdog_loop_lag_budget": 50},
            "TASKQ_LOCK_LEASE = 60 (default): must be above 60 = 50 + 10",
        ),
        (
            {"watchdog_loop_lag_budget": 10, "watchdog_check_interval": 10},
            "[defaults] watchdog_loop_lag_budget = 10: must be above 10",
        ),
        (
            {"watchdog_loop_lag_warn_budget": 30},
            "[defaults] watchdog_loop_lag_warn_budget = 30: must be below 30",
        ),
    ],
)
def test_each_rule_names_its_sum(changed: dict[str, Any], problem: str, resolve: Resolve) -> None:
    with pytest.raises(SettingsError) as refused:
        resolve(default_keys=changed)
    (line,) = refused.value.problems
    assert line.startswith(problem + ", with ")


def test_one_step_inside_each_rule_is_valid(resolve: Resolve) -> None:
    resolve(default_keys={"cancellation_grace_period": 69.9, "lock_lease": 100})
    resolve(default_keys={"cancellation_grace_period": 49.9})
    resolve(default_keys={"watchdog_loop_lag_budget": 49.9})
    resolve(default_keys={"watchdog_loop_lag_budget": 10, "watchdog_check_interval": 9.9})
    resolve(default_keys={"watchdog_loop_lag_warn_budget": 29.9})


def test_without_the_watchdog_its_rules_do_not_count(resolve: Resolve) -> None:
    wild = {"watchdog_loop_lag_budget": 3000, "watchdog_loop_lag_warn_budget": 3600}
    assert not resolve(default_keys={"watchdog_enabled": False, **wild}).settings.watchdog_enabled
    with pytest.raises(SettingsError):
        resolve(default_keys=wild)


def test_flags_do_not_bypass_the_rules(resolve: Resolve) -> None:
    with pytest.raises(SettingsError, match=r"--lock-lease = 20: must be at least 58"):
        resolve({"lock_lease": 20})


def test_the_constructor_keeps_the_rules_too() -> None:
    with pytest.raises(ValidationError, match="lock_lease must be at least 58"):
        Settings(lock_lease=41)


def test_a_pooler_needs_a_direct_dsn_beside_it(resolve: Resolve) -> None:
    with pytest.raises(SettingsError, match="set TASKQ_PG_DSN_DIRECT to the server itself"):
        resolve(environ={"TASKQ_PG_IS_POOLED": "true", "TASKQ_PG_DSN": "postgresql://bouncer/d"})
    resolve(
        environ={
            "TASKQ_PG_IS_POOLED": "true",
            "TASKQ_PG_DSN": "postgresql://bouncer/d",
            "TASKQ_PG_DSN_DIRECT": "postgresql://server/d",
        }
    )


@given(
    lease=st.floats(1, 500),
    interval=st.floats(0.5, 60),
    timeout=st.floats(0.001, 60),
    failures=st.integers(1, 20),
    cancel=st.floats(0, 100),
    cleanup=st.floats(0, 100),
    grace=st.floats(5, 300),
    budget=st.floats(0.001, 100),
)
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_accepted_exactly_when_every_rule_holds(
    resolve: Resolve,
    lease: float,
    interval: float,
    timeout: float,
    failures: int,
    cancel: float,
    cleanup: float,
    grace: float,
    budget: float,
) -> None:
    holds = (
        lease >= max(interval, timeout) + (failures + 1) * (interval + timeout)
        and cancel + cleanup < grace - 5
        and cancel + cleanup < lease
        and budget + interval < lease
        and budget > 1
        and budget > 5
    )
    keys = {
        "lock_lease": lease,
        "heartbeat_interval": interval,
        "heartbeat_command_timeout": timeout,
        "max_heartbeat_failures": failures,
        "cancellation_grace_period": cancel,
        "cleanup_grace_period": cleanup,
        "termination_grace_period": grace,
        "watchdog_loop_lag_budget": budget,
    }
    try:
        resolve(default_keys=keys)
    except SettingsError:
        assert not holds
    else:
        assert holds
