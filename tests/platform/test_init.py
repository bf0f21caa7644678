"""``taskqd init``: what it writes is valid, fits what it was written for, and overwrites nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.cli.init import Answers, render_workgroup
from taskqd.supervisor.workgroup import WorkgroupError
from tests.support import Command, child_environment, taskqd_argv

Start = Callable[..., Command]

ACTORS = """\
from pydantic import BaseModel
from taskqd import actor

class Nothing(BaseModel):
    pass

@actor(queue="mail")
async def nothing(payload: Nothing) -> None: ...

actors = [nothing]
"""


@pytest.fixture
def init(start: Start, short_dir: Path) -> Callable[..., Command]:
    (short_dir / "app.py").write_text(ACTORS)

    def run(*args: str, code: int = 0) -> Command:
        command = start(*args)
        assert command.wait(60) == code, command.stderr
        assert "Traceback" not in command.stderr
        return command

    return run


def test_a_workgroup_that_passes_the_check(init: Callable[..., Command], short_dir: Path) -> None:
    flags = ["--actors", "app:actors", "--name", "shop", "--worker", "io", "--replicas", "3", "--queue", "mail"]
    more = ["--queue", "web", "--max-concurrency", "4", "--grace", "60", "--health-address", "127.0.0.1:8081"]
    assert "next: taskqd check group.toml" in init("init", "workgroup", *flags, *more, "--output", "group.toml").stdout
    found = tomllib.loads((short_dir / "group.toml").read_text())
    assert found["supervisor"] == {
        "name": "shop",
        "health_address": "127.0.0.1:8081",
        "termination_grace_period": 60,
    }
    assert found["workers"] == [{"name": "io", "replicas": 3, "queues": ["mail", "web"], "max_concurrency": 4}]
    checked = init("check", "group.toml")
    assert "ok: workgroup 'shop', 4 processes" in checked.stdout
    assert "warning" not in checked.stderr


def test_units_and_manifests_take_their_times_from_the_workgroup(init: Callable[..., Command], short_dir: Path) -> None:
    flags = ["--actors", "app:actors", "--queue", "mail", "--queue", "web", "--grace", "30"]
    assert "wrote workgroup.toml" in init("init", "workgroup", *flags).stdout
    text = (short_dir / "workgroup.toml").read_text()

    init("init", "systemd", "workgroup.toml", "--user", "shop", "--bin", "/srv/bin/taskqd")
    unit = (short_dir / "systemd" / "taskqd.service").read_text()
    assert "\nTimeoutStopSec=30\n" in unit
    assert "\nExecStart=/srv/bin/taskqd run /etc/taskqd/workgroup.toml\n" in unit
    worker = (short_dir / "systemd" / "taskqd-worker@.service").read_text()
    for expected in ("PERIOD=30", "CANCELLATION_GRACE_PERIOD=17", "CLEANUP_GRACE_PERIOD=5", "--actors app:actors"):
        assert expected in worker
    checked = init("check", "workgroup.toml", "--platform", "systemd", "--unit", "systemd/taskqd.service")
    assert "warning" not in checked.stderr

    assert "add health_address" in init("init", "k8s", "workgroup.toml", code=78).stderr
    served = text.replace('# health_address = "0.0.0.0:8081"', 'health_address = "0.0.0.0:9000"')
    (short_dir / "workgroup.toml").write_text(served)
    init("init", "k8s", "workgroup.toml", "--name", "shop", "--image", "example.com:5000/shop:2", "--replicas", "3")
    assert (short_dir / "k8s" / "base" / "workgroup.toml").read_text() == served
    assert "route in ('mail', 'web')" in (short_dir / "k8s/overlays/production/scaledobject.yaml").read_text()
    assert (
        'newName: example.com:5000/shop\n    newTag: "2"'
        in (short_dir / "k8s" / "base" / "kustomization.yaml").read_text()
    )
    checked = init("check", "workgroup.toml", "--platform", "k8s", "--manifest", "k8s/base/deployment.yaml")
    assert "warning" not in checked.stderr


def test_nothing_is_overwritten_without_force(init: Callable[..., Command], short_dir: Path) -> None:
    (short_dir / "workgroup.toml").write_text("precious")
    assert "workgroup.toml: exists; --force overwrites" in init("init", "workgroup", code=78).stderr
    assert (short_dir / "workgroup.toml").read_text() == "precious"
    init("init", "workgroup", "--force")
    assert "precious" not in (short_dir / "workgroup.toml").read_text()
    (short_dir / "systemd").mkdir()
    (short_dir / "systemd" / "taskqd.service").write_text("precious")
    assert "systemd/taskqd.service: exists" in init("init", "systemd", code=78).stderr
    assert [path.name for path in (short_dir / "systemd").iterdir()] == ["taskqd.service"], "all or nothing"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["workgroup", "--name", "a/b"], 78, "supervisor.name: 'a/b' must be 1 to 32 letters"),
        (["workgroup", "--worker", "scheduler"], 78, "is the name of the group's scheduler"),
        (["workgroup", "--queue", "it's"], 78, 'queue "it\'s" must be 1 to 200 letters'),
        (["workgroup", "--schema", "pg_x"], 78, "schema 'pg_x' must be 1 to 63 letters"),
        (["workgroup", "--health-address", "8081"], 78, "'8081' must be \"host:port\""),
        (["workgroup", "--grace", "5"], 2, "--grace"),
        (["workgroup", "--output", "/proc/x/y.toml"], 78, "/proc/x/y.toml: cannot be written"),
        (["systemd", "--user", "a b"], 2, "'a b' must be a user's name"),
        (["systemd", "--bin", "bin/taskqd"], 2, "'bin/taskqd' must be an absolute path"),
        (["systemd", "--path", "/etc/%i.toml"], 2, "must be an absolute path without blanks"),
        (["systemd", "missing.toml"], 78, "missing.toml: no such file"),
        (["k8s", "--image", "taskqd"], 2, "must be an image with its tag"),
        (["k8s", "--name", "Shop"], 2, "must be a DNS label"),
    ],
)
def test_bad_answers_are_one_message(
    init: Callable[..., Command], short_dir: Path, args: list[str], code: int, message: str
) -> None:
    assert message in init("init", *args, code=code).stderr
    assert [path.name for path in short_dir.iterdir() if path.suffix not in (".stdout", ".stderr")] == ["app.py"]


def test_a_person_is_asked(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"app:actors\nshop\n4\n")
    done = subprocess.run(
        taskqd_argv("init", "workgroup", "--queue", "mail"),
        cwd=tmp_path,
        env=child_environment(),
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0, done.stderr
    assert "Name of the group [myapp]:" in done.stdout
    found = tomllib.loads((tmp_path / "workgroup.toml").read_text())
    assert (found["actors"], found["supervisor"]["name"]) == ("app:actors", "shop")
    assert found["workers"][0] == {"name": "main", "replicas": 4, "queues": ["mail"], "max_concurrency": 8}


@given(actors=st.text(max_size=12) | st.sampled_from(["a:b", 'a:"', "a:\\", "a:é"]), grace=st.floats(10, 86400))
def test_any_text_is_written_as_it_is_or_refused(actors: str, grace: float) -> None:
    answers = replace(Answers(), actors=actors, grace=grace)
    if all(actors.partition(":")) and actors.isprintable() and actors.strip():
        found = tomllib.loads(render_workgroup(answers))
        assert (found["actors"], found["supervisor"]["termination_grace_period"]) == (actors, grace)
    else:
        with pytest.raises(WorkgroupError, match="actors"):
            render_workgroup(answers)
