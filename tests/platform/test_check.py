"""``taskqd check``: what it shows, what it warns of, and how it compares a group with its platform."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from taskqd.cli.findings import Finding
from taskqd.cli.manifest import compare_manifest
from taskqd.cli.systemd_unit import compare_unit, parse_span
from taskqd.supervisor.plan import Plan
from tests.support import Command, child_environment

Start = Callable[..., Command]

ACTORS = """\
from datetime import timedelta
from pydantic import BaseModel
from taskqd import actor

class Nothing(BaseModel):
    pass

@actor(queue="mail", start_to_close=timedelta(seconds=10))
async def quick(payload: Nothing) -> None: ...

@actor(queue="mail", start_to_close=timedelta(hours=2))
async def long(payload: Nothing) -> None: ...

@actor(queue="mail")
async def endless(payload: Nothing) -> None: ...

@actor(queue="forgotten")
async def lonely(payload: Nothing) -> None: ...

few, all = [quick], [quick, long, endless, lonely]
"""
GROUP = """\
actors = "check_actors:all"
[supervisor]
health_address = "0.0.0.0:8081"
[defaults]
soft_stop_timeout = 20
[[workers]]
name = "io"
queues = ["mail", "other"]
[[workers]]
name = "few"
actors = "check_actors:few"
queues = ["forgotten"]
default_start_to_close = "1h"
replicas = 2
[workers.recycle]
max_age = "1h"
[credentials]
provider = "file"
path = "/etc/taskqd/pg.json"
"""


@pytest.fixture
def check(start: Start, short_dir: Path) -> Callable[..., Command]:
    (short_dir / "check_actors.py").write_text(ACTORS)
    (short_dir / "group.toml").write_text(GROUP)

    def run(*args: str, code: int = 0, **env: str) -> Command:
        command = start("check", "group.toml", *args, env=child_environment(**env))
        assert command.wait(60) == code, command.stderr
        assert "Traceback" not in command.stderr
        return command

    return run


def test_queues_that_nobody_serves_and_actors_that_a_stop_interrupts(check: Callable[..., Command]) -> None:
    command = check("--json")
    found = json.loads(command.stdout)
    assert found["unserved"] == [{"queue": "forgotten", "actors": ["lonely"]}], "served, but not for this actor"
    assert found["interrupted"] == [
        {"actor": "long", "worker": "io", "start_to_close": 7200.0, "drain": 20.0},
        {"actor": "endless", "worker": "io", "start_to_close": None, "drain": 20.0},
    ]
    assert "warning: queue 'forgotten': no worker that knows its actors serves it" in command.stderr
    text = check().stdout
    assert "interrupted by a stop: long on io may run 7200 s, a stop waits 20 s" in text
    assert "no start_to_close, interrupted if still running: endless (io)" in text
    assert "stops within 85 s (83 at worst)" in text


def test_every_effective_value_with_its_unit_and_source(check: Callable[..., Command], short_dir: Path) -> None:
    (short_dir / ".env").write_text("TASKQ_SWEEP_INTERVAL=7s\n")
    env = {"TASKQ_PG_DSN": "postgresql://app:hunter2@db/app", "TASKQ_MAX_CONCURRENCY": "3"}
    command = check("--show", "--json", TASKQ_TERMINATION_GRACE_PERIOD="60", **env)
    values = {(each["part"], each["name"]): each for each in json.loads(command.stdout)["values"]}

    def shown(part: str, name: str) -> tuple[object, object, object]:
        found = values[part, name]
        return found["value"], found["unit"], found["source"]

    assert shown("io", "queues") == (["mail", "other"], None, "group.toml:8")
    assert shown("io", "cancellation_grace_period") == (20, "seconds", "group.toml:5"), "written as its alias"
    assert shown("io", "max_concurrency") == (3, None, "environment")
    assert shown("io", "sweep_interval") == (7, "seconds", ".env")
    assert shown("io", "lock_lease") == (60, "seconds", "default")
    assert shown("io", "termination_grace_period") == (60, "seconds", "environment")
    assert shown("io", "pg_dsn") == ("***", None, "environment")
    assert shown("few", "default_start_to_close") == (3600, "seconds", "group.toml:13")
    assert shown("few", "replicas") == (2, None, "group.toml:14")
    assert shown("few", "recycle.max_age") == (3600, "seconds", "group.toml:16")
    assert shown("io", "actors") == ("check_actors:all", None, "group.toml:1")
    assert shown("io", "pg_credential_path") == ("/etc/taskqd/pg.json", None, "group.toml:19")
    assert shown("few", "worker_label") == ("few.<index>", None, "the supervisor")
    assert shown("supervisor", "health_address") == (["0.0.0.0", 8081], None, "group.toml:3")
    assert shown("supervisor", "termination_grace_period")[0] == 60
    assert shown("budget", "enforce") == (True, None, "default")
    assert {part for part, _ in values} == {"supervisor", "budget", "scheduler", "io", "few"}
    text = check("--show", **env).stdout
    assert "hunter2" not in text + command.stdout + command.stderr
    assert [line.split() for line in text.splitlines() if line.startswith("io ") and " queues " in line] == [
        ["io", "queues", "mail,other", "group.toml:8"]
    ]


def test_graces_that_were_scaled_say_so(check: Callable[..., Command], short_dir: Path) -> None:
    (short_dir / "group.toml").write_text(GROUP.replace("[defaults]\nsoft_stop_timeout = 20\n", ""))
    found = json.loads(check("--show", "--json", TASKQ_TERMINATION_GRACE_PERIOD="30").stdout)
    (grace,) = [v for v in found["values"] if (v["part"], v["name"]) == ("io", "cancellation_grace_period")]
    assert (grace["value"], grace["source"]) == (17, "the supervisor: scaled to termination_grace_period")


# -- systemd --------------------------------------------------------------------------------------

UNIT = """\
[Unit]
Description=a group
[Service]
Type=notify
# TimeoutStopSec=1
ExecStart=/opt/app/bin/taskqd \\
    run /etc/group.toml
KillMode=mixed
TimeoutStopSec=1min 25s
WatchdogSec=20
Restart=on-failure
RestartPreventExitStatus=78
SuccessExitStatus=3
OOMPolicy=continue
"""


PLAN = Plan(group="group", children=(), grace=85, health_address="0.0.0.0:8081")


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Compare a unit and its drop-ins; the fatal findings begin with ``error``."""
    monkeypatch.chdir(tmp_path)

    def run(*texts: str) -> list[str]:
        names = [f"{number}.service" for number in range(len(texts))]
        for name, text in zip(names, texts, strict=True):
            Path(name).write_text(text)
        return shown(compare_unit(PLAN, names))

    return run


def shown(findings: list[Finding]) -> list[str]:
    return [f"{'error' if each.fatal else 'warning'}: {each}" for each in findings]


def only(found: list[str], expected: str) -> None:
    assert [line for line in found if expected in line] == found, found
    assert len(found) == 1


def test_a_unit_on_the_command_line(check: Callable[..., Command], short_dir: Path) -> None:
    (short_dir / "x.service").write_text(UNIT.replace("1min 25s", "84").replace("=mixed", "=process"))
    stderr = check("--platform", "systemd", "--unit", "x.service", code=78).stderr
    assert "error: 2 problems:\n  x.service:9:TimeoutStopSec: 84 s must be" in stderr
    assert "\n  warning: x.service:8:KillMode: 'process' leaves" in stderr
    (short_dir / "x.service").write_text(UNIT.replace("OOMPolicy=continue", ""))
    assert "warning: x.service:3:OOMPolicy" in check("--platform", "systemd", "--unit", "x.service").stderr
    assert "nowhere: cannot be read: No such" in check("--platform", "systemd", "--unit", "nowhere", code=78).stderr


def test_a_unit_that_fits(unit: Callable[..., list[str]]) -> None:
    assert unit(UNIT) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("1min 25s", "84", "0.service:9:TimeoutStopSec: 84 s must be at least the group's"),
        ("TimeoutStopSec=1min 25s", "TimeoutSec=30", "0.service:9:TimeoutSec: 30 s must be at least"),
        ("1min 25s", "soon", "0.service:9:TimeoutStopSec: 'soon' is no time span"),
        ("Type=notify", "Type=forking", "0.service:4:Type: 'forking' does not fit"),
        ("run /etc", "worker /etc", "0.service:6:ExecStart: does not run `taskqd run FILE`"),
        ("KillMode=mixed", "KillMode=none", "0.service:8:KillMode: leaves processes behind"),
        ("KillMode=mixed", "KillMode=mixed\nSendSIGKILL=no", "0.service:9:SendSIGKILL: leaves processes"),
        ("Type=notify", "Type=notify\nNotifyAccess=none", "0.service:5:NotifyAccess: 'none' drops"),
    ],
)
def test_a_unit_that_would_break_the_group_is_refused(
    unit: Callable[..., list[str]], old: str, new: str, expected: str
) -> None:
    only(unit(UNIT.replace(old, new)), f"error: {expected}")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("Type=notify", "Type=exec", "0.service:4:Type: 'exec' counts the group as up"),
        ("KillMode=mixed", "", "0.service:3:KillMode: 'control-group' signals the workers"),
        ("OOMPolicy=continue", "OOMPolicy=", "0.service:14:OOMPolicy: the whole group stops"),
        ("=78", "=1", "0.service:12:RestartPreventExitStatus: what is refused"),
        ("Restart=on-failure", "", "0.service:3:Restart: a group that ended"),
        ("SuccessExitStatus=3", "", "0.service:3:SuccessExitStatus: a stop that had to kill"),
        ("WatchdogSec=20", "WatchdogSec=2", "0.service:10:WatchdogSec: 2 s is short"),
    ],
)
def test_a_unit_that_could_fit_better_is_warned_of(
    unit: Callable[..., list[str]], old: str, new: str, expected: str
) -> None:
    only(unit(UNIT.replace(old, new)), f"warning: {expected}")


def test_a_drop_in_wins_and_is_named(unit: Callable[..., list[str]]) -> None:
    only(unit(UNIT, "[Service]\nTimeoutStopSec=20"), "error: 1.service:2:TimeoutStopSec: 20 s")
    assert unit(UNIT.replace("1min 25s", "20"), "[Service]\nTimeoutStopSec=infinity") == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1min 30s", 90), ("1min30s", 90), ("500ms", 0.5), ("2h", 7200), ("infinity", float("inf"))],
)
def test_time_spans(text: str, seconds: float) -> None:
    assert parse_span(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "s", "1min x"])
def test_what_is_no_time_span(text: str) -> None:
    assert parse_span(text) is None


# -- Kubernetes -----------------------------------------------------------------------------------

MANIFEST = """\
kind: ConfigMap
---
kind: Deployment
spec:
  template:
    spec:
      enableServiceLinks: false
      terminationGracePeriodSeconds: 85
      containers:
        - name: sidecar
          image: x
        - name: taskqd
          command: ["taskqd", "run", "/etc/group.toml"]
          ports: [{name: health, containerPort: 8081}]
          startupProbe:
            httpGet: {path: /startup, port: health}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            httpGet: {path: /live, port: 8081}
          readinessProbe:
            exec: {command: ["taskqd", "health", "ready"]}
            timeoutSeconds: 5
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Compare a manifest; the fatal findings begin with ``error``."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, plan: Plan = PLAN) -> list[str]:
        Path("pod.yaml").write_text(text)
        return shown(compare_manifest(plan, "pod.yaml"))

    return run


def test_a_manifest_on_the_command_line(check: Callable[..., Command], short_dir: Path) -> None:
    (short_dir / "pod.yaml").write_text(MANIFEST.replace("enableServiceLinks: false", "hostname: x"))
    stderr = check("--platform", "k8s", "--manifest", "pod.yaml").stderr
    assert "warning: pod.yaml:6:spec.template.spec.enableServiceLinks: a service named taskq" in stderr
    (short_dir / "pod.yaml").write_text("a: 1\nb: [")
    assert "error: pod.yaml:2: invalid YAML: " in check("--platform", "k8s", "--manifest", "pod.yaml", code=78).stderr
    assert "error: <stdin>:1:containers: none runs" in check("--platform", "k8s", "--manifest", "-", code=78).stderr


def test_a_manifest_that_fits(manifest: Callable[..., list[str]]) -> None:
    assert manifest(MANIFEST) == []
    listed = "kind: List\nitems:\n- " + MANIFEST.partition("---\n")[2].replace("\n", "\n  ")
    assert manifest(listed) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (": 85", ": 60", "pod.yaml:8:spec.template.spec.terminationGracePeriodSeconds: 60 s must be at least"),
        ("      terminationGracePeriodSeconds: 85\n", "", "pod.yaml:6:spec.template.spec.terminationGrace"),
        (
            "          ports:",
            "          lifecycle: {preStop: {sleep: {seconds: 5}}}\n          ports:",
            "85 s less the 5 s of the preStop hook must be at least",
        ),
        ("/live", "/ready", "pod.yaml:19:spec.template.spec.containers[1].livenessProbe: asks for 'ready'"),
        ("port: 8081", "port: 80", "containers[1].livenessProbe.httpGet.port: 80 is not the port of"),
        ("path: /startup", "path: /status", "startupProbe.httpGet.path: '/status' must be /startup, /live or"),
        ('["taskqd", "run", "/etc', '["sh", "-c", "taskqd run /etc', "command: a shell does not pass SIGTERM on"),
        ('"taskqd", "run"', '"taskqd", "worker"', "pod.yaml:1:containers: none runs `taskqd run FILE`"),
    ],
)
def test_a_manifest_that_would_break_the_group_is_refused(
    manifest: Callable[..., list[str]], old: str, new: str, expected: str
) -> None:
    found = manifest(MANIFEST.replace(old, new, 1))
    assert any(line.startswith("error: ") and expected in line for line in found), found


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("enableServiceLinks: false", "hostname: x", "pod.yaml:6:spec.template.spec.enableServiceLinks: a service"),
        (
            "timeoutSeconds: 5",
            "periodSeconds: 5",
            "pod.yaml:21:spec.template.spec.containers[1].readinessProbe.timeout",
        ),
        ("failureThreshold: 60", "failureThreshold: 5", "2 s × 5 end a start after 10 s, which may take 120 s"),
        (
            "          ports:",
            "          lifecycle: {preStop: {exec: {command: [x]}}}\n          ports:",
            "preStop: takes",
        ),
    ],
)
def test_a_manifest_that_could_fit_better_is_warned_of(
    manifest: Callable[..., list[str]], old: str, new: str, expected: str
) -> None:
    found = manifest(MANIFEST.replace(old, new, 1))
    only(found, expected)
    assert found[0].startswith("warning: ")


def test_a_probe_over_tcp_without_an_address(manifest: Callable[..., list[str]]) -> None:
    found = manifest(MANIFEST, replace(PLAN, health_address=None))
    assert "startupProbe.httpGet: nothing answers over TCP" in found[0]


def test_options_that_go_together(check: Callable[..., Command]) -> None:
    assert "--platform systemd and --unit FILE go together" in check("--platform", "systemd", code=2).stderr
    assert "--platform k8s and --manifest FILE go together" in check("--manifest", "x", code=2).stderr
