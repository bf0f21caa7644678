"""From a file to a plan: what holds for a worker that has an environment, credentials or a policy of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskqd.supervisor.effective import show_values
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.resolve import Resolution, resolve
from taskqd.supervisor.workgroup import WorkgroupError

Resolved = Callable[..., Resolution]
GROUP = """\
actors = "app:actors"
[supervisor]
boot_timeout = 90
[defaults]
max_concurrency = 3
sweep_interval = 4
[credentials]
provider = "file"
path = "/run/group"
refresh_interval = "1m"
[[workers]]
name = "plain"
[[workers]]
name = "io"
"""
DSN = "postgresql://group:hunter2@db/app"


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """Resolve a file of this text, beside an ``io.env`` of that, in an environment with these variables."""
    for name in [name for name in os.environ if name.startswith("TASKQ")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(own: str = "", *, file: str = "", **env: str) -> Resolution:
        for name, value in {"TASKQ_PG_DSN": DSN, **env}.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "io.env").write_text(file)
        (tmp_path / "group.toml").write_text(GROUP + own)
        return resolve("group.toml")

    return run


def child(found: Resolution, name: str) -> ChildSpec:
    return next(spec for spec in found.plan.children if spec.name == name)


def shown(found: Resolution) -> dict[tuple[str, str], tuple[Any, Any]]:
    values = show_values(found.workgroup, found.plan, found.resolved)
    return {(each["part"], each["name"]): (each["value"], each["source"]) for each in values}


def test_variables_of_a_worker_win_over_defaults_and_say_where_they_stand(resolved: Resolved, tmp_path: Path) -> None:
    found = resolved(
        'env_file = "io.env"\nqueues = ["own"]\n[workers.env]\nTASKQ_SWEEP_INTERVAL = "6"\nTASKQ_LISTEN = "false"\n'
        'REGION = "here"\n',
        file="TOKEN=hunter3\n\nTASKQ_MAX_CONCURRENCY=5\nTASKQ_SWEEP_INTERVAL=7\nTASKQ_QUEUES=file\n",
        TASKQ_MAX_CONCURRENCY="9",
    )
    values = shown(found)
    file = tmp_path / "io.env"
    assert values["io", "max_concurrency"] == (5, f"{file}:3")
    assert values["io", "sweep_interval"] == (6, "group.toml:18")
    assert values["io", "notify_enabled"] == (False, "group.toml:19")
    assert values["io", "queues"] == (("own",), "group.toml:16")
    assert values["plain", "max_concurrency"] == (3, "group.toml:5")
    assert values["io", "env.REGION"] == ("here", "group.toml:20")
    assert values["io", "env.TOKEN"] == ("***", f"{file}:1")
    assert values["io", "env_file"] == (str(file), "group.toml:15")
    spec = child(found, "io")
    assert "max_concurrency" not in spec.settings, "the process finds it in its environment"
    assert "sweep_interval" not in spec.settings
    assert child(found, "plain").settings["max_concurrency"] == 3
    assert spec.env_settings == (
        "TASKQ_LISTEN",
        "TASKQ_MAX_CONCURRENCY",
        "TASKQ_QUEUES",
        "TASKQ_SWEEP_INTERVAL",
    )
    assert spec.queues == ("own",)
    assert found.fleet.crews[1].max_concurrency == 5, "counted by the budget"
    text = str(found.plan.to_json())
    assert "hunter" not in text
    assert Plan.from_json(found.plan.to_json()) == found.plan


def test_what_is_wrong_with_variables_names_their_lines(resolved: Resolved, tmp_path: Path) -> None:
    with pytest.raises(WorkgroupError) as raised:
        resolved(
            'env_file = "io.env"\n[workers.env]\nTASKQ_MAX_CONCURENCY = "1"\nTASKQ_SOFT_STOP_TIMEOUT = "soon"\n',
            file="\nTASKQ_SWEEP_INTERVAL=never\n",
        )
    first, second, third = raised.value.problems
    assert first == (
        "group.toml:17:workers.io.env.TASKQ_MAX_CONCURENCY: unknown setting (did you mean 'TASKQ_MAX_CONCURRENCY'?)"
    )
    assert second.startswith(f"{tmp_path / 'io.env'}:2:TASKQ_SWEEP_INTERVAL = 'never': must be a duration")
    assert third.startswith("group.toml:18:workers.io.env.TASKQ_SOFT_STOP_TIMEOUT = 'soon': must be a duration")


def test_another_role_of_the_same_database_is_a_workers_own(resolved: Resolved) -> None:
    found = resolved('env_file = "io.env"\n', file="TASKQ_PG_DSN=postgresql://io:hunter4@db:5432/app\n")
    assert found.resolved["io"].settings.direct_dsn() == "postgresql://io:hunter4@db:5432/app"
    assert "hunter4" not in str(found.plan.to_json())
    assert shown(found)["io", "pg_dsn"][0] == "***"
    for other in ("postgresql://io:hunter4@elsewhere/app", "postgresql://io:hunter4@db/other"):
        with pytest.raises(WorkgroupError) as raised:
            resolved('env_file = "io.env"\n', file=f"TASKQ_PG_DSN={other}\n")
        assert str(raised.value) == (
            "group.toml:13:workers.io: TASKQ_PG_DSN must name the database of the group: it uses one, in one place"
        )


def test_credentials_of_a_worker_replace_or_change_those_of_the_group(resolved: Resolved) -> None:
    found = resolved('[workers.credentials]\nprovider = "exec"\ncommand = ["/bin/token"]\n')
    settings = found.resolved["io"].settings
    assert (settings.pg_credential_provider, settings.pg_credential_path) == ("exec", None)
    assert settings.pg_credential_refresh_interval == 30, "nothing of the group's"
    assert "pg_credential_path" not in child(found, "io").settings
    assert shown(found)["io", "pg_credential_command"] == (("/bin/token",), "group.toml:17")
    assert found.resolved["plain"].settings.pg_credential_path == "/run/group"
    found = resolved('[workers.credentials]\npath = "/run/io"\n')
    settings = found.resolved["io"].settings
    assert (settings.pg_credential_path, settings.pg_credential_refresh_interval) == ("/run/io", 60)
    with pytest.raises(WorkgroupError) as raised:
        resolved('[workers.credentials]\nprovider = "file"\n')
    assert str(raised.value).startswith(
        "group.toml:16:workers.io.credentials.provider = 'file': must be accompanied by"
    )
    with pytest.raises(
        WorkgroupError, match=r"group.toml:17:workers.io.credentials.path: is set as pg_credential_path"
    ):
        resolved('pg_credential_path = "/x"\n[workers.credentials]\npath = "/y"\n')


def test_a_policy_of_a_worker_has_the_groups_for_default(resolved: Resolved) -> None:
    found = resolved('stall_after = 5\ndatabase_boot_timeout = 40\nboot_timeout = "50s"\nsettle_after = 0\n')
    io, plain = child(found, "io"), child(found, "plain")
    assert (io.timing.stall_after, plain.timing.stall_after) == (5, 3)
    assert (io.timing.boot_timeout, plain.timing.boot_timeout) == (50, 90)
    assert (io.settle_after, plain.settle_after) == (0, 2)
    assert shown(found)["io", "boot_timeout"] == (50, "group.toml:17")
    assert shown(found)["plain", "boot_timeout"] == (90, "group.toml:3")
    with pytest.raises(WorkgroupError) as raised:
        resolved('database_boot_timeout = "2m"\n')
    assert str(raised.value).startswith("group.toml:3:supervisor.boot_timeout: 90 must be above database_boot_timeout")
    with pytest.raises(WorkgroupError) as raised:
        resolved("boot_timeout = 20\n")
    assert str(raised.value).startswith("group.toml:15:workers.io.boot_timeout: 20 must be above")


def test_auto_replicas_say_what_decided(resolved: Resolved) -> None:
    found = resolved('replicas = "auto"\n')
    value, source = shown(found)["io", "replicas"]
    assert value == child(found, "io").replicas >= 1
    assert source.startswith("group.toml:15, auto: ")
    assert found.fleet.crews[1].replicas == value


def test_a_group_that_nobody_maintains_is_warned_of(resolved: Resolved) -> None:
    off = "[scheduler]\nenabled = false\n"
    assert resolved(off).warnings == ()
    found = resolved(f'maintenance = "on"\n{off}')
    assert [crew.maintenance for crew in found.fleet.crews] == ["auto", "on"]
    assert found.warnings == ()
    assert resolved(TASKQ_MAINTENANCE="off").warnings == ()
    (warning,) = resolved(off).warnings
    assert "no process of this group fires schedules" in warning


def test_whether_a_worker_maintains_is_a_word(resolved: Resolved) -> None:
    with pytest.raises(WorkgroupError) as raised:
        resolved("maintenance = true\n")
    (problem,) = raised.value.problems
    assert problem.startswith("group.toml:15:workers.io.maintenance = True: must be one of auto, off, on")
