"""Where a value comes from, and which source wins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskqd.settings import SETTING_NAMES, Resolved, SettingsError, load_settings

Resolve = Callable[..., Resolved]


def _write(directory: Path, **files: str) -> None:
    for name, value in files.items():
        suffix = "" if name == "base" else "." + name.replace("_", ".")
        (directory / f".env{suffix}").write_text(value)


def test_the_more_specific_source_wins(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, base="TASKQ_MAX_CONCURRENCY=2")
    sources: list[tuple[str, dict[str, Any]]] = [
        (".env", {}),
        ("environment", {"environ": {"TASKQ_MAX_CONCURRENCY": "3"}}),
        ("[defaults]", {"default_keys": {"max_concurrency": 4}}),
        ("[[workers]]", {"worker_keys": {"max_concurrency": 5}}),
        ("flag", {"flags": {"max_concurrency": 6}}),
    ]
    given: dict[str, Any] = {}
    for value, (source, more) in enumerate(sources, start=2):
        given |= more
        resolved = resolve(**given)
        assert (resolved.settings.max_concurrency, resolved.sources["max_concurrency"]) == (value, source)


def test_what_a_worker_has_in_its_environment_for_itself_stands_between_its_keys_and_the_defaults(
    tmp_path: Path, resolve: Resolve
) -> None:
    _write(tmp_path, base="DOTENV_OVERRIDE=true\nTASKQ_MAX_CONCURRENCY=2\nTASKQ_QUEUES=dotenv")
    environ = {"TASKQ_MAX_CONCURRENCY": "5", "TASKQ_SWEEP_INTERVAL": "6", "TASKQ_QUEUES": "shared"}
    environ |= {"DOTENV_OVERRIDE": "true"}
    own = {"TASKQ_MAX_CONCURRENCY": "[workers.env]", "TASKQ_SWEEP_INTERVAL": "env_file"}
    defaults = {"max_concurrency": 3, "sweep_interval": 4}
    found = resolve(environ=environ, own_variables=own, default_keys=defaults)
    assert (found.settings.max_concurrency, found.sources["max_concurrency"]) == (5, "[workers.env]")
    assert (found.settings.sweep_interval, found.sources["sweep_interval"]) == (6, "env_file")
    assert (found.settings.queues, found.sources["queues"]) == (("dotenv",), ".env")
    found = resolve(environ=environ, own_variables=own, default_keys=defaults, worker_keys={"max_concurrency": 7})
    assert (found.settings.max_concurrency, found.sources["max_concurrency"]) == (7, "[[workers]]")
    child = {**environ, "TASKQD_SETTINGS": '{"queues": ["file"]}', "TASKQD_ENV_SETTINGS": " ".join(own)}
    found = resolve(environ=child)
    assert (found.settings.max_concurrency, found.settings.queues) == (5, ("file",)), "as a child of a supervisor"


def test_a_wrong_variable_of_a_worker_is_named_by_its_source(resolve: Resolve) -> None:
    environ = {"TASKQ_MAX_CONCURENCY": "5", "TASKQ_SWEEP_INTERVAL": "soon"}
    own = {"TASKQ_MAX_CONCURENCY": "[workers.env]", "TASKQ_SWEEP_INTERVAL": "env_file"}
    with pytest.raises(SettingsError) as raised:
        resolve(environ=environ, own_variables=own)
    first, second = raised.value.problems
    assert first == ("[workers.env] TASKQ_MAX_CONCURENCY: unknown setting (did you mean 'TASKQ_MAX_CONCURRENCY'?)")
    assert second.startswith("env_file TASKQ_SWEEP_INTERVAL = 'soon': must be a duration")


def test_every_setting_has_a_source(resolve: Resolve) -> None:
    assert resolve().sources == dict.fromkeys(SETTING_NAMES, "default")


def test_flags_that_were_not_given_do_not_count(resolve: Resolve) -> None:
    resolved = resolve({"queues": (), "max_concurrency": None}, environ={"TASKQ_QUEUES": "mail"})
    assert resolved.settings.queues == ("mail",)
    assert resolved.sources["max_concurrency"] == "default"


# -- the .env cascade -----------------------------------------------------------------------------


def test_the_cascade_from_least_to_most_specific(tmp_path: Path, resolve: Resolve) -> None:
    environ = {"TASKQ_ENVIRONMENT": "prod"}
    for value, (key, name) in enumerate(
        [("base", ".env"), ("local", ".env.local"), ("prod", ".env.prod"), ("prod_local", ".env.prod.local")], start=1
    ):
        _write(tmp_path, **{key: f"TASKQ_MAX_CONCURRENCY={value}\n"})
        resolved = resolve(environ=environ)
        assert (resolved.settings.max_concurrency, resolved.sources["max_concurrency"]) == (value, name)


def test_other_environments_files_are_not_read(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, stage="TASKQ_MAX_CONCURRENCY=2")
    assert resolve(environ={"TASKQ_ENVIRONMENT": "prod"}).settings.max_concurrency == 8
    assert resolve().settings.max_concurrency == 8


@pytest.mark.parametrize("chooser", ["base", "local"])
def test_the_first_files_may_choose_the_environment(chooser: str, tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, **{chooser: "TASKQ_ENVIRONMENT=prod\n"}, prod="TASKQ_MAX_CONCURRENCY=2")
    assert resolve().settings.max_concurrency == 2


def test_the_workgroup_file_may_choose_the_environment(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, base="TASKQ_ENVIRONMENT=stage", prod="TASKQ_MAX_CONCURRENCY=2")
    assert resolve(default_keys={"environment": "prod"}).settings.max_concurrency == 2


def test_the_process_environment_beats_the_files_unless_told_otherwise(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, base="TASKQ_MAX_CONCURRENCY=2")
    environ = {"TASKQ_MAX_CONCURRENCY": "3"}
    assert resolve(environ=environ).settings.max_concurrency == 3
    assert resolve(environ=environ | {"DOTENV_OVERRIDE": "false"}).settings.max_concurrency == 3
    assert resolve(environ=environ | {"DOTENV_OVERRIDE": "true"}).settings.max_concurrency == 2
    assert resolve({"max_concurrency": 4}, environ=environ | {"DOTENV_OVERRIDE": "true"}).settings.max_concurrency == 4
    with pytest.raises(SettingsError, match="DOTENV_OVERRIDE = 'maybe'"):
        resolve(environ={"DOTENV_OVERRIDE": "maybe"})


def test_env_files_are_read_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, base="# a comment\nexport TASKQ_MAX_CONCURRENCY='2'  # quoted\nOTHER=1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKQ_LOG_LEVEL", "ERROR")
    settings = load_settings()
    assert (settings.max_concurrency, settings.log_level) == (2, "ERROR")


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, base="TASKQ_MAX_CONCURRENCY=2\nTASKQ_LOG_LEVEL 'DEBUG\n")
    (tmp_path / ".env.local").write_bytes(b"TASKQ_WORKER_LABEL=\xff\n")
    with pytest.raises(SettingsError) as refused:
        resolve()
    assert any(".env, line 2: must be NAME=value" in line for line in refused.value.problems)
    assert any(".env.local: cannot be read" in line for line in refused.value.problems)


# -- unknown names --------------------------------------------------------------------------------


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, base="TASKQ_LOCK_LEESE=60\n")
    with pytest.raises(SettingsError) as refused:
        resolve(
            {"max_concurency": 3},
            worker_keys={"heartbeat_intervall": 3},
            default_keys={"softstop_timeout": 3},
            environ={"TASKQ_BANANA": "1", "TASKQ_PG_DNS": "postgresql://u:hidden@h/d", "taskq_queues": "x"},
        )
    assert refused.value.problems == (
        "--max-concurency: unknown setting (did you mean 'max_concurrency'?)",
        "[[workers]] heartbeat_intervall: unknown setting (did you mean 'heartbeat_interval'?)",
        "[defaults] softstop_timeout: unknown setting (did you mean 'soft_stop_timeout'?)",
        "TASKQ_BANANA (environment): unknown setting",
        "TASKQ_PG_DNS (environment): unknown setting (did you mean 'TASKQ_PG_DSN'?)",
        "taskq_queues (environment): unknown setting (did you mean 'TASKQ_QUEUES'?)",
        "TASKQ_LOCK_LEESE (.env): unknown setting (did you mean 'TASKQ_LOCK_LEASE'?)",
    )
    assert "hidden" not in str(refused.value)


LINKS = {
    "TASKQ_SERVICE_HOST": "10.0.0.1",
    "TASKQ_SERVICE_PORT": "5432",
    "TASKQ_SERVICE_PORT_POSTGRES": "5432",
    "TASKQ_PORT": "tcp://10.0.0.1:5432",
    "TASKQ_PORT_5432_TCP": "tcp://10.0.0.1:5432",
    "TASKQ_PORT_5432_TCP_PROTO": "tcp",
    "TASKQ_PORT_5432_TCP_PORT": "5432",
    "TASKQ_PORT_5432_TCP_ADDR": "10.0.0.1",
    "TASKQ_ADMIN_UI_SERVICE_HOST": "10.0.0.2",
    "TASKQ_ADMIN_UI_PORT": "udp://10.0.0.2:53",
    "TASKQ_METRICS_PORT": "tcp://10.0.0.3:9090",
}


def test_kubernetes_service_links_are_ignored_with_one_warning(
    tmp_path: Path, resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = resolve(environ=LINKS)
    assert resolved.settings.metrics_port is None
    (warning,) = resolved.warnings
    assert all(name in warning for name in LINKS)
    with caplog.at_level(logging.WARNING, "taskqd.settings"):
        load_settings(environ=LINKS, directory=tmp_path)
    assert [record.getMessage() for record in caplog.records] == [warning]


def test_a_real_metrics_port_is_no_link(resolve: Resolve) -> None:
    resolved = resolve(environ={"TASKQ_METRICS_PORT": "9090"})
    assert (resolved.settings.metrics_port, resolved.warnings) == (9090, ())


def test_the_daemons_own_variables_are_not_settings(resolve: Resolve) -> None:
    resolve(environ={"TASKQD_SOCKET": "/run/x.sock", "TASKQD_ANYTHING": "1", "PATH": "/bin"})


# -- second names ---------------------------------------------------------------------------------


def test_second_names(resolve: Resolve) -> None:
    resolved = resolve(environ={"TASKQ_SOFT_STOP_TIMEOUT": "20"}, default_keys={"listen": False})
    assert resolved.settings.cancellation_grace_period == 20
    assert not resolved.settings.notify_enabled
    assert resolved.sources["cancellation_grace_period"] == "environment"


def test_two_names_of_one_setting_must_agree(resolve: Resolve) -> None:
    with pytest.raises(SettingsError) as refused:
        resolve(environ={"TASKQ_SOFT_STOP_TIMEOUT": "20", "TASKQ_CANCELLATION_GRACE_PERIOD": "25"})
    assert refused.value.problems == (
        "TASKQ_CANCELLATION_GRACE_PERIOD and TASKQ_SOFT_STOP_TIMEOUT are one setting and disagree: "
        "'20' and '25'; set one of them",
    )
    resolve(environ={"TASKQ_SOFT_STOP_TIMEOUT": "20", "TASKQ_CANCELLATION_GRACE_PERIOD": "20"})
    more_specific = resolve({"soft_stop_timeout": 15}, environ={"TASKQ_CANCELLATION_GRACE_PERIOD": "20"})
    assert more_specific.settings.cancellation_grace_period == 15


# -- children of a supervisor ---------------------------------------------------------------------


def test_a_child_takes_the_workgroup_files_values(resolve: Resolve) -> None:
    handed = json.dumps({"max_concurrency": 5, "queues": ["mail"], "soft_stop_timeout": "20s"})
    resolved = resolve(environ={"TASKQD_SETTINGS": handed, "TASKQ_MAX_CONCURRENCY": "3"})
    assert resolved.settings.max_concurrency == 5
    assert resolved.settings.queues == ("mail",)
    assert resolved.settings.cancellation_grace_period == 20
    assert resolved.sources["queues"] == "workgroup file"
    assert resolve({"max_concurrency": 6}, environ={"TASKQD_SETTINGS": handed}).settings.max_concurrency == 6


@pytest.mark.parametrize("text", ["", "[1]", "{", "null"])
def test_settings_handed_down_must_be_an_object(text: str, resolve: Resolve) -> None:
    with pytest.raises(SettingsError, match="TASKQD_SETTINGS"):
        resolve(environ={"TASKQD_SETTINGS": text})


def test_children_do_not_inherit_listeners(resolve: Resolve) -> None:
    environ = {
        "TASKQD_CONTROL_FD": "3",
        "TASKQD_HEALTH_SOCKET": "/run/taskqd/io-0.sock",
        "TASKQ_HEALTH_SOCKET_PATH": "/run/mine.sock",
        "TASKQ_METRICS_PORT": "9090",
    }
    resolved = resolve(environ=environ)
    assert resolved.settings.metrics_port is None
    assert resolved.settings.health_socket_path == "/run/taskqd/io-0.sock"
    assert resolved.sources["health_socket_path"] == "supervisor"


def test_a_password_does_not_belong_into_the_workgroup_file(resolve: Resolve) -> None:
    for keys in (
        {"worker_keys": {"pg_dsn": "postgresql://u:hidden@h/d"}},
        {"default_keys": {"pg_dsn": "postgresql://u@h/d?password=hidden"}},
    ):
        with pytest.raises(SettingsError, match="holds a password") as refused:
            resolve(**keys)
        assert "set TASKQ_PG_DSN in the environment or a .env file" in str(refused.value)
        assert "hidden" not in str(refused.value)
    assert resolve(default_keys={"pg_dsn": "postgresql://u@h/d"}).settings.direct_dsn() == "postgresql://u@h/d"


# -- all problems at once -------------------------------------------------------------------------


def test_all_problems_in_one_message(tmp_path: Path, resolve: Resolve) -> None:
    _write(tmp_path, base="TASKQ_LOG_FORMAT=xml\n")
    with pytest.raises(SettingsError) as refused:
        resolve(
            {"max_concurrency": "0"},
            worker_keys={"lock_lease": "30s"},
            default_keys={"nonsense": 1},
            environ={"TASKQ_HEARTBEAT_INTERVAL": "99m"},
        )
    lines = str(refused.value).splitlines()
    assert lines[0] == "settings refused, 5 problems:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(
        [
            "--max-concurrency = '0'",
            "[[workers]] lock_lease = 30",
            "[defaults] nonsense",
            "TASKQ_HEARTBEAT_INTERVAL = '99m' (environment)",
            "TASKQ_LOG_FORMAT = 'xml' (.env)",
        ]
    )
    assert refused.value.exit_code == 78
