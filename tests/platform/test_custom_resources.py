"""The manifests of other operators' resources, against the schemas that their models ship."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support import REPOSITORY

PRODUCTION = REPOSITORY / "k8s" / "overlays" / "production"
PACKAGES = {
    "@kubernetes-models/keda": ("0.4", "keda.sh/v1alpha1"),
    "@kubernetes-models/prometheus-operator": ("6", "monitoring.coreos.com/v1"),
}
VALIDATE = """
const models = Object.assign({}, ...await Promise.all(process.argv.slice(2).map((name) => import(name))));
const answers = [];
for (const resource of JSON.parse(await new Promise((resolve) => {
  let text = ''; process.stdin.on('data', (part) => text += part).on('end', () => resolve(text));
}))) {
  try { new (models[resource.kind] ?? models.default[resource.kind])(resource).validate(); answers.push('valid'); }
  catch (error) { answers.push(String(error.message)); }
}
console.log(JSON.stringify(answers));
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the models installed."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    directory = tmp_path_factory.mktemp("models")
    wanted = [f"{name}@{version}" for name, (version, _) in PACKAGES.items()]
    options = ["--no-audit", "--no-fund", "--silent", "--ignore-scripts", "--prefix", str(directory)]
    try:
        done = subprocess.run(
            [npm, "install", *options, *wanted], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip("needs the npm registry: no answer within 60 s")
    if done.returncode:
        pytest.skip(f"needs the npm registry: {done.stderr.strip()[:200]}")
    return directory


def validate(models: Path, resources: list[object]) -> list[str]:
    script = models / "validate.mjs"
    script.write_text(VALIDATE.replace("slice(2)", "slice(2)"))
    modules = [f"{name}/{path}" for name, (_, path) in PACKAGES.items()]
    done = subprocess.run(
        ["node", str(script), *modules],
        input=json.dumps(resources, default=str),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout)
    return answers


def test_what_keda_and_the_prometheus_operator_read(models: Path) -> None:
    names = ("podmonitor.yaml", "prometheusrule.yaml", "scaledobject.yaml")
    resources = [each for name in names for each in yaml.safe_load_all((PRODUCTION / name).read_text())]
    kinds = {"PodMonitor", "PrometheusRule", "ScaledObject", "TriggerAuthentication"}
    assert {each["kind"] for each in resources} == kinds
    assert validate(models, resources) == ["valid"] * 4
    for each in resources:
        each["spec"] = {"triggers": [{"type": 1}], "podMetricsEndpoints": 1, "groups": 1, "secretTargetRef": 1}
    assert "valid" not in validate(models, resources)
