"""What is shipped: the built wheel, in an environment of its own, migrates a schema and runs a job."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.package.released import ACTORS, ENQUEUE, Built, build, install, run
from tests.postgres import Server
from tests.support import REPOSITORY, Command, child_environment, wait_until

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel from it."""
    return build(REPOSITORY, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def python(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel and what it depends on, nothing else."""
    return install(built.wheel, tmp_path_factory.mktemp("venv"))


def _sources(pattern: str) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob(pattern)}


def test_the_wheel_carries_code_migrations_and_statements(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    migrations = {f"taskqd/{name}" for name in _sources("migrations/*.sql")}
    assert migrations
    templates = {name for name in _sources("taskqd/cli/templates/**/*") if (REPOSITORY / name).is_file()}
    assert len(templates) > 15
    code = _sources("taskqd/**/*.py") | _sources("taskqd/**/*.sql") | {"taskqd/py.typed"}
    assert names >= migrations | templates | code
    packages = {name.split("/")[0] for name in names}
    assert packages == {"taskqd", built.wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


def test_the_sdist_carries_everything_needed_to_build_and_test(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = _sources("migrations/*.sql") | _sources("taskqd/**/*.sql") | _sources("tests/**/*.py")
    assert names >= wanted | {"LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml", "config/workgroup.toml"}
    assert not {name for name in names if name.startswith((".venv", ".git/")) or "__pycache__" in name}


def test_the_wheel_migrates_a_schema_and_runs_a_job(
    python: Path, server: Server, tmp_path: Path, short_dir: Path
) -> None:
    taskqd = str(python.with_name("taskqd"))
    environment = {"TASKQ_PG_DSN": server.dsn(), "TASKQ_SCHEMA_NAME": "from_the_wheel"}
    for name, text in (("jobs.py", ACTORS), ("enqueue.py", ENQUEUE)):
        (tmp_path / name).write_text(text)

    run([taskqd, "migrate", "up"], tmp_path, **environment)
    assert "from_the_wheel" in run([taskqd, "migrate", "status"], tmp_path, **environment)

    env = child_environment(**environment, TASKQ_HEALTH_SOCKET_PATH=str(short_dir / "health.sock"))
    env.pop("PYTHONPATH")
    worker = Command([taskqd, "worker", "--actors", "jobs:actors"], tmp_path, env)
    try:
        assert run([str(python), "enqueue.py"], tmp_path, **environment) == "42\n"
        worker.process.terminate()
        assert worker.wait(60) == 0
    finally:
        worker.end()
    wait_until(lambda: worker.process.poll() is not None)


def test_the_module_is_the_command(python: Path, tmp_path: Path) -> None:
    assert run([str(python), "-m", "taskqd", "--help"], tmp_path).startswith("Usage: taskqd ")
    installed = run([str(python), "-c", "import taskqd; print(taskqd.__file__)"], tmp_path)
    assert installed.startswith(str(python.parent.parent))


def test_the_wheel_writes_and_compares_units_and_manifests(python: Path, tmp_path: Path) -> None:
    taskqd = str(python.with_name("taskqd"))
    (tmp_path / "jobs.py").write_text(ACTORS)
    workgroup = ["--actors", "jobs:actors", "--health-address", "127.0.0.1:8081"]
    run([taskqd, "init", "workgroup", *workgroup], tmp_path)
    for platform, option, file in (
        ("systemd", "--unit", "systemd/taskqd.service"),
        ("k8s", "--manifest", "k8s/base/deployment.yaml"),
    ):
        run([taskqd, "init", platform, "workgroup.toml"], tmp_path)
        checked = run([taskqd, "check", "workgroup.toml", "--platform", platform, option, file], tmp_path)
        assert "ok: workgroup 'myapp', 3 processes" in checked


def test_the_types_of_the_wheel_are_seen(python: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(ACTORS + "\nreveal_type(add)\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "jobs.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Success" in done.stdout, done.stdout
    assert "ActorRef[jobs.Numbers, jobs.Sum]" in done.stdout
