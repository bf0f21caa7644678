"""Defaults, bounds and secrecy of each setting."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from taskqd.settings import SETTING_NAMES, Resolved, Settings, SettingsError, describe, is_secret

Resolve = Callable[..., Resolved]

DEFAULTS = {
    "schema_name": "taskq",
    "statement_cache_size": 512,
    "max_cached_statement_lifetime": 3600,
    "idempotency_key_max_bytes": 1024,
    "dispatcher_pool_size": 4,
    "heartbeat_pool_size": 4,
    "pool_max_inactive_lifetime": 300,
    "dispatcher_command_timeout": 5,
    "max_concurrency": 8,
    "heartbeat_interval": 10,
    "heartbeat_command_timeout": 2,
    "lock_lease": 60,
    "max_heartbeat_failures": 3,
    "sweep_interval": 5,
    "termination_grace_period": 85,
    "cancellation_grace_period": 30,
    "cleanup_grace_period": 10,
    "max_retry_backoff": 86400,
    "default_start_to_close": None,
    "metrics_port": None,
    "health_enabled": True,
    "watchdog_enabled": True,
    "watchdog_loop_lag_budget": 30,
    "watchdog_loop_lag_warn_budget": 5,
    "watchdog_check_interval": 1,
    "poll_interval": 1,
    "notify_enabled": True,
    "notify_poll_interval": 5,
    "notify_health_check_interval": 5,
    "notify_reconnect_backoff_initial": 1,
    "notify_listener_setup_timeout": 10,
    "queues": ("default",),
    "worker_label": None,
    "workgroup_instance": None,
    "worker_group": "default",
    "log_format": "json",
    "log_level": "INFO",
    "result_max_bytes": 65536,
    "exception_message_max_chars": 2000,
    "database_boot_timeout": 30,
    "pg_is_pooled": False,
    "environment": None,
}


def test_defaults() -> None:
    settings = Settings()
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS
    assert settings.direct_dsn() == settings.pooled_dsn() == "postgresql://taskq:taskq@localhost:5432/taskq"


def test_every_setting_is_described() -> None:
    for name in SETTING_NAMES:
        about = describe(name)
        assert about.meaning.endswith("."), name
        assert about.allowed, name
        assert about.variable == f"TASKQ_{name.upper()}"


BOUNDED = [name for name in SETTING_NAMES if describe(name).bounded]


def _bounds(name: str) -> tuple[float, float]:
    words = describe(name).allowed.split()
    start = words.index("from")
    return float(words[start + 1]), float(words[start + 3].rstrip(","))


@pytest.mark.parametrize("name", BOUNDED)
def test_every_number_has_both_bounds(name: str, resolve: Resolve) -> None:
    low, high = _bounds(name)
    assert math.isfinite(high)
    below = low - 1 if describe(name).unit != "seconds" else low - 0.0005
    for wrong in (below, high + 1):
        value = str(wrong if describe(name).unit == "seconds" else int(wrong))
        with pytest.raises(SettingsError) as refused:
            resolve(environ={f"TASKQ_{name.upper()}": value})
        mine = [line for line in refused.value.problems if line.startswith(f"TASKQ_{name.upper()} = ")]
        assert mine == [f"TASKQ_{name.upper()} = '{value}' (environment): must be {describe(name).allowed}"]


def test_numbers_and_durations_are_the_bounded_ones() -> None:
    kinds = {name: type(getattr(Settings(), name)) for name in SETTING_NAMES}
    numeric = {name for name, kind in kinds.items() if kind in (int, float)}
    assert set(BOUNDED) == numeric | {"default_start_to_close", "metrics_port"}


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("max_concurrency", "eight", "must be a whole number from 1 to 10000"),
        ("max_concurrency", "8.5", "must be a whole number from 1 to 10000"),
        ("lock_lease", "a minute", "must be a duration from 1 to 86400 seconds, written in seconds or like '250ms'"),
        ("watchdog_enabled", "perhaps", "must be true or false"),
        ("log_level", "LOUD", "must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
        ("log_format", "xml", "must be one of json, console"),
        ("workgroup_instance", "nine", "must be a UUID"),
        ("queues", "mail,,render", "queue '' is invalid"),
        ("queues", "a:b", "queue 'a:b' is invalid"),
        ("queues", "", "queue '' is invalid"),
        ("schema_name", "my-schema", "must be 1 to 63 letters, digits or '_'"),
        ("schema_name", "pg_jobs", "not 'pg_*'"),
        ("worker_label", "a\0b", "must be 1 to 200 printable characters"),
        ("environment", "../etc", "must be 1 to 63 letters"),
        ("health_socket_path", "/run/" + "x" * 200, "must be a path of 1 to 107 bytes, it has 205"),
        ("metrics_port", "0", "must be a whole number from 1 to 65535"),
    ],
)
def test_bad_values_name_variable_value_and_bound(name: str, value: str, part: str, resolve: Resolve) -> None:
    with pytest.raises(SettingsError) as refused:
        resolve(environ={f"TASKQ_{name.upper()}": value})
    (problem,) = refused.value.problems
    assert problem.startswith(f"TASKQ_{name.upper()} = {value!r}"[:60])
    assert part in problem


def test_a_boolean_is_no_number(resolve: Resolve) -> None:
    with pytest.raises(SettingsError, match=r"\[defaults\] max_concurrency = True: must be a whole number"):
        resolve(default_keys={"max_concurrency": True})


@pytest.mark.parametrize("name", ["metrics_port", "default_start_to_close", "worker_label", "pg_dsn_direct"])
def test_empty_means_none_where_none_is_allowed(name: str, resolve: Resolve) -> None:
    assert getattr(resolve(environ={f"TASKQ_{name.upper()}": " "}).settings, name) is None


def test_values_are_normalised(resolve: Resolve) -> None:
    settings = resolve(
        environ={
            "TASKQ_QUEUES": "mail, render ,mail",
            "TASKQ_LOG_LEVEL": "debug",
            "TASKQ_LOG_FORMAT": "Console",
            "TASKQ_DEFAULT_START_TO_CLOSE": "5m",
        }
    ).settings
    assert settings.queues == ("mail", "render")
    assert (settings.log_level, settings.log_format) == ("DEBUG", "console")
    assert settings.default_start_to_close == 300


def test_settings_are_frozen_and_take_no_other_names() -> None:
    with pytest.raises(ValidationError):
        Settings().lock_lease = 5  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Settings(lock_lesae=90)  # type: ignore[call-arg]


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKQ_MAX_CONCURRENCY", "3")
    assert Settings().max_concurrency == 8


# -- DSNs -----------------------------------------------------------------------------------------

SECRET = "s3cr3t-hunter2"


def test_secrets_are_known() -> None:
    assert [name for name in SETTING_NAMES if is_secret(name)] == ["pg_dsn", "pg_dsn_direct", "pg_dsn_pooled"]


def test_no_secret_in_repr_or_dump(resolve: Resolve) -> None:
    settings = resolve(
        environ={f"TASKQ_PG_DSN{part}": f"postgresql://u:{SECRET}@h/d" for part in ("", "_DIRECT", "_POOLED")}
    ).settings
    assert SECRET in settings.direct_dsn()
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


@pytest.mark.parametrize(
    "dsn",
    [
        f"mysql://u:{SECRET}@h/d",
        f"postgresql+asyncpg://u:{SECRET}@h/d",
        f"postgresql://u:{SECRET}#1@h/d",
        f"postgresql://u:{SECRET}/1@h/d",
        f"postgresql://u:{SECRET} @h/d",
        f"postgresql://u:{SECRET}@[h/d",
        f"host=h password={SECRET}",
        "",
    ],
)
@pytest.mark.parametrize("name", ["pg_dsn", "pg_dsn_direct"])
def test_a_bad_dsn_is_refused_without_showing_it(name: str, dsn: str, resolve: Resolve) -> None:
    if not dsn and name == "pg_dsn_direct":
        return
    with pytest.raises(SettingsError) as refused:
        resolve(environ={f"TASKQ_{name.upper()}": dsn})
    (problem,) = refused.value.problems
    assert problem.startswith(f"TASKQ_{name.upper()} = *** (environment): ")
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(refused.value.__context__)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql:///taskq?host=/run/postgresql",
        "postgres://u@h1:5432,h2:5433/d?target_session_attrs=read-write",
        "postgresql://u:p%40ss@h/d",
    ],
)
def test_good_dsns(dsn: str, resolve: Resolve) -> None:
    assert resolve(environ={"TASKQ_PG_DSN": dsn}).settings.direct_dsn() == dsn


def test_the_two_dsns_fall_back_to_the_one(resolve: Resolve) -> None:
    settings = resolve(
        environ={"TASKQ_PG_DSN": "postgresql://one/d", "TASKQ_PG_DSN_POOLED": "postgresql://bouncer/d"}
    ).settings
    assert settings.direct_dsn() == "postgresql://one/d"
    assert settings.pooled_dsn() == "postgresql://bouncer/d"


def test_a_pooler_switches_the_statement_cache_off(resolve: Resolve) -> None:
    assert resolve().settings.statement_cache() == (512, 3600.0)
    pooled = resolve(environ={"TASKQ_PG_IS_POOLED": "true", "TASKQ_PG_DSN_POOLED": "postgresql://bouncer/d"})
    assert pooled.settings.statement_cache() == (0, 0.0)
