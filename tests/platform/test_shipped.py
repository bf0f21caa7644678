"""The files beside the code: units, manifests, image, compose. They are valid, and their times are the model's."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import kubernetes_validate
import pytest
import yaml

from taskqd.cli.app import COMMANDS
from taskqd.cli.init import default_model, render_k8s, render_systemd
from taskqd.cli.manifest import compare_manifest
from taskqd.cli.systemd_unit import compare_unit, parse_span, read_unit
from taskqd.settings import Settings, describe
from taskqd.supervisor.workgroup import parse_workgroup
from tests.support import REPOSITORY

SYSTEMD, K8S = REPOSITORY / "systemd", REPOSITORY / "k8s"
UNITS = sorted(SYSTEMD.glob("*.service"))
MANIFESTS = sorted(path for path in K8S.rglob("*.yaml") if path.name not in ("kustomization.yaml", "probes.yaml"))
GRACE = describe("termination_grace_period").default
PLAN = default_model().plan


def tree(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def documents(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(path.read_text())


def test_they_are_what_init_writes_by_default() -> None:
    model = default_model()
    user, binary, path = "taskqd", "/opt/app/bin/taskqd", "/etc/taskqd/workgroup.toml"
    assert tree(SYSTEMD) == render_systemd(model, user=user, binary=binary, path=path), "run scripts/docs"
    image = "registry.example.com/myapp:1.0.0"
    assert tree(K8S) == render_k8s(model, name="taskqd", image=image, replicas=2), "run scripts/docs"


def test_every_grace_is_the_model() -> None:
    assert (PLAN.grace, Settings().termination_grace_period) == (GRACE, GRACE)
    stops = {path.name: read_unit([str(path)]).value("TimeoutStopSec") for path in UNITS}
    assert {parse_span(value) for value in stops.values()} == {GRACE}
    graces = [doc["spec"]["template"]["spec"].get("terminationGracePeriodSeconds") for doc in _pods()]
    assert [grace for grace in graces if grace is not None] == [GRACE], "a migration needs none of its own"
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    assert compose["services"]["taskqd"]["stop_grace_period"] == f"{GRACE:g}s"
    assert f"--stop-timeout {GRACE:g} " in (REPOSITORY / "Dockerfile").read_text()
    for text in (*tree(SYSTEMD).values(), *tree(K8S).values(), compose["configs"]["workgroup"]["content"]):
        for written in re.findall(r"termination_grace_period ?= ?(\S+)", text, re.IGNORECASE):
            assert float(written) == GRACE


def _pods() -> list[dict[str, Any]]:
    return [doc for path in MANIFESTS for doc in documents(path) if doc["kind"] in ("Deployment", "Job")]


# -- systemd --------------------------------------------------------------------------------------


def test_the_unit_fits_its_workgroup() -> None:
    main, drop_in = SYSTEMD / "taskqd.service", SYSTEMD / "taskqd.service.d" / "254.conf"
    assert compare_unit(PLAN, [str(main)]) == []
    assert compare_unit(PLAN, [str(main), str(drop_in)]) == []
    unit = read_unit([str(main)])
    reload = unit.value("ExecReload").split()
    assert reload[1] in COMMANDS
    assert read_unit([str(main), str(drop_in)]).value("ExecReload") == ""


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened_and_knows_the_exit_codes(path: Path) -> None:
    unit = read_unit([str(path)])
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "RestrictSUIDSGID", "LockPersonality"):
        assert unit.value(key) == "yes"
    assert (unit.value("ProtectSystem"), unit.value("KillMode")) == ("strict", "mixed")
    assert (unit.value("User"), unit.value("RestartPreventExitStatus")) == ("taskqd", "78")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_every_line(path: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze, from Debian's package systemd")
    copy = tmp_path / path.name
    copy.write_text(path.read_text().replace("/opt/app/bin/taskqd", "/usr/bin/env"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if path.name.partition("@")[0] in line]
    assert not complaints, done.stderr


def test_the_environment_of_single_processes_is_made_of_settings() -> None:
    for path in UNITS:
        for name in re.findall(r"^Environment=(TASKQ_\w+)=", path.read_text(), re.MULTILINE):
            assert describe(name.removeprefix("TASKQ_").lower())


# -- Kubernetes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in MANIFESTS if path.parent.name == "base"], ids=lambda path: path.name)
def test_a_manifest_is_what_kubernetes_expects(path: Path) -> None:
    for document in documents(path):
        for version in ("1.30", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


def test_the_manifest_fits_its_workgroup() -> None:
    assert compare_manifest(PLAN, str(K8S / "base" / "deployment.yaml")) == []


def test_the_alerts_of_the_operator_are_those_of_the_plain_file() -> None:
    plain = yaml.safe_load((REPOSITORY / "config" / "alerts.yml").read_text())
    (rule,) = documents(K8S / "overlays/production/prometheusrule.yaml")
    assert rule["spec"] == plain


@pytest.mark.parametrize("variant", ["base", "overlays/production", "overlays/exec-probes"])
def test_the_whole_is_built_and_fits(variant: str, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        [kubectl, "kustomize", str(K8S / variant)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    whole = tmp_path / "whole.yaml"
    whole.write_text(done.stdout)
    found = list(yaml.safe_load_all(done.stdout))
    kinds = [document["kind"] for document in found]
    assert {"ServiceAccount", "ConfigMap", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "Job"} <= {*kinds}
    assert compare_manifest(PLAN, str(whole)) == []
    for document in found:
        if document["kind"] not in ("PodMonitor", "PrometheusRule", "ScaledObject", "TriggerAuthentication"):
            kubernetes_validate.validate(document, "1.30", strict=True)
    (deployment,) = [document for document in found if document["kind"] == "Deployment"]
    assert ("replicas" in deployment["spec"]) is (variant != "overlays/production")
    probes = deployment["spec"]["template"]["spec"]["containers"][0]
    kind = "exec" if variant.endswith("exec-probes") else "httpGet"
    assert [kind in probes[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")] == [True] * 3


@pytest.mark.parametrize("pod", _pods(), ids=lambda pod: str(pod["kind"]))
def test_pods_have_no_rights_and_a_read_only_root(pod: dict[str, Any]) -> None:
    spec = pod["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["enableServiceLinks"] is spec["automountServiceAccountToken"] is False
    assert container["command"][0] == "taskqd"
    assert container["command"][1] in COMMANDS
    assert container["resources"]["limits"]["memory"]


def test_what_selects_the_pods_selects_no_migration() -> None:
    found = {doc["kind"]: doc for path in MANIFESTS for doc in documents(path)}
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    migration = found["Job"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        wanted = found[kind]["spec"]["selector"]["matchLabels"]
        assert wanted.items() <= labels.items()
        assert not wanted.items() <= migration.items()
    ports = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert found["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] in [port["name"] for port in ports]


async def test_the_query_that_scales_is_the_work_that_waits(conn: asyncpg.Connection, schema: str) -> None:
    scaled = next(doc for doc in documents(K8S / "overlays/production/scaledobject.yaml") if "triggers" in doc["spec"])
    (trigger,) = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"].replace('"taskq".jobs', f"{schema}.jobs")
    assert trigger["metadata"]["targetQueryValue"] == str(default_model().slots * 60)
    assert await conn.fetchval(query) == 0

    insert = (
        f"insert into {schema}.jobs (id, actor, queue, route, payload, status, scheduled_at, started_at, finished_at) "
        f"select gen_random_uuid(), 'a', $1, $1, '{{}}', $2::text::{schema}.job_status, now() + $3::interval, "
        "now() - $4::interval, case when $2 = 'succeeded' then now() end from generate_series(1, $5)"
    )
    await conn.execute(insert, "default", "pending", _seconds(0), None, 10)
    assert float(await conn.fetchval(query)) == pytest.approx(10), "a second each, while nobody knows better"
    await conn.execute(insert, "default", "pending", _seconds(3600), None, 5)
    await conn.execute(insert, "elsewhere", "pending", _seconds(0), None, 7)
    await conn.execute(insert, "default", "succeeded", _seconds(0), _seconds(30), 3)
    assert float(await conn.fetchval(query)) == pytest.approx(300, rel=0.01)


def _seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


# -- image and compose ----------------------------------------------------------------------------


def test_the_image_runs_without_rights_and_as_process_1() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    lines = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    final = lines[lines.index(stages[-1]) :]
    order = [line.split()[0] for line in final]
    assert order.index("USER") > order.index("RUN"), "nothing is installed as the user"
    assert [line for line in final if line.startswith("USER ")] == ["USER 10001:10001"]
    for line in final:
        if line.startswith(("ENTRYPOINT", "CMD")):
            assert line.split(None, 1)[1].startswith("["), "in exec form"
    assert not re.search(r"\bADD\b|:latest|PASSWORD|apt-get", text)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((REPOSITORY / name).exists() for name in source.split() if not name.startswith("--"))


def test_what_the_image_is_built_from_is_let_in() -> None:
    let_in = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == let_in


def test_compose_turns_jit_off_and_waits_for_the_migrations() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    assert compose["configs"]["role"]["content"] == "alter role taskq set jit = off;"
    group = compose["services"]["taskqd"]
    assert group["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
    assert group["read_only"]
    assert group["healthcheck"]["test"][1:] == ["taskqd", "health", "ready"]
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_workgroups_they_carry_are_valid() -> None:
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    for text in (compose["configs"]["workgroup"]["content"], (K8S / "base" / "workgroup.toml").read_text()):
        group, wrong = parse_workgroup(
            tomllib.loads(text), "workgroup.toml", ["queues", "max_concurrency", "schema_name"]
        )
        assert not wrong
        assert group.supervisor.health_address == ("0.0.0.0", 8081)
