"""Workers with an environment, a policy and a number of their own: real supervisors, stand-ins for the workers."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.supervisor.asking import SOON, edit, pids, taskqd
from tests.supervisor.conftest import Group, StartGroup
from tests.support import Command, child_environment, wait_until

OWN = """\
env_file = "../io.env"
[workers.env]
REGION = "here"
TASKQ_SWEEP_INTERVAL = "7s"
[[workers]]
name = "cpu"
"""
FILE = "TOKEN='hunter2'\nREGION=elsewhere\nTASKQ_MAX_CONCURRENCY=3\n"
NAMES = ("TOKEN", "REGION", "TASKQ_SWEEP_INTERVAL", "TASKQ_MAX_CONCURRENCY", "INHERITED", "TASKQD_ENV_SETTINGS")


def environment(g: Group, name: str) -> dict[str, str]:
    found = psutil.Process(pids(g)[name]).environ()
    return {name: found[name] for name in NAMES if name in found}


def reload(g: Group) -> str:
    done = taskqd(g, "reload")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_an_environment_of_its_own_is_given_to_every_process_and_a_change_replaces_them(
    group: StartGroup, short_dir: Path
) -> None:
    file = short_dir / "io.env"
    file.write_text(FILE)
    quick = "stable_after = 0\nbackoff_initial = 0.05\nsettle_after = 0.2"
    g = group(tables={"[workers]": OWN, "supervisor": quick}, INHERITED="yes", REGION="nowhere")
    g.wait_for("ready", 2)
    first = pids(g)
    own = {
        "TOKEN": "hunter2",
        "REGION": "here",
        "TASKQ_SWEEP_INTERVAL": "7s",
        "TASKQ_MAX_CONCURRENCY": "3",
        "INHERITED": "yes",
        "TASKQD_ENV_SETTINGS": "TASKQ_MAX_CONCURRENCY TASKQ_SWEEP_INTERVAL",
    }
    assert environment(g, "io.0") == own
    assert environment(g, "cpu.0") == {"INHERITED": "yes", "REGION": "nowhere"}

    file.write_text(FILE.replace("hunter2", "hunter3"))
    os.kill(first["io.0"], signal.SIGKILL)
    g.wait_for("ready", 3)
    assert environment(g, "io.0") == own, "what its siblings have, until a reload"
    assert reload(g) == "reloaded: 1 unchanged, io replaced"
    assert environment(g, "io.0") == own | {"TOKEN": "hunter3"}

    edit(g, ('REGION = "here"', 'REGION = "there"'))
    assert reload(g) == "reloaded: 1 unchanged, io replaced"
    assert environment(g, "io.0")["REGION"] == "there"

    second = pids(g)
    other = short_dir / "other.env"
    other.write_text("# the same, elsewhere\n" + file.read_text())
    edit(g, ("../io.env", "../other.env"))
    assert reload(g) == "reloaded: nothing to change"
    other.write_text("TOKEN='hunter4\n")
    done = taskqd(g, "reload")
    assert done.returncode == 78
    assert "/other.env:1: TOKEN: must end where its quote does" in done.stderr
    assert pids(g) == second
    assert second["cpu.0"] == first["cpu.0"]
    assert "hunter" not in g.command.stderr + done.stderr
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


def test_a_policy_of_its_own_holds_for_one_worker_and_changes_without_a_restart(group: StartGroup) -> None:
    g = group(tables={"[workers]": '[[workers]]\nname = "cpu"', "supervisor": "settle_after = 0.2"})
    g.wait_for("ready", 2)
    before = pids(g)
    edit(g, ('name = "io"', 'name = "io"\nstall_after = 4\nhang_kill_after = 2\nbackoff_initial = 0.01'))
    assert reload(g) == "reloaded: nothing to change"
    assert pids(g) == before
    psutil.Process(before["io.0"]).suspend()
    g.wait_for("ready", 3, timeout=30)  # by the group's rule it would have taken 33 s
    after = pids(g)
    edit(g, ("hang_kill_after = 2", "hang_kill_after = 2\nreplicas = 2\nburst_limit = 7"))
    assert reload(g) == "reloaded: 1 unchanged, io 1→2", "a policy that changes beside the number"
    assert reload(g) == "reloaded: nothing to change"
    assert pids(g)["io.0"] == after["io.0"]
    assert g.stop() == 0, g.command.stderr


GROUPS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup")


@pytest.fixture
def half_a_processor() -> Iterator[Path]:
    """A control group of half a CPU, of version 1 or 2, for processes that join it."""
    path = next((Path(root) / f"taskqd-{os.getpid()}" for root in GROUPS if os.access(root, os.W_OK)), None)
    quota = {"cpu.cfs_quota_us": "50000", "cpu.max": "50000 100000"}
    try:
        assert path is not None
        path.mkdir()
        name = next(name for name in quota if (path / name).exists())
        (path / name).write_text(quota[name])
    except (AssertionError, OSError, StopIteration):
        if path is not None and path.exists():
            path.rmdir()
        pytest.skip("needs a control group for CPU quotas that may be written")
    yield path
    wait_until(lambda: not (path / "cgroup.procs").read_text(), 30)
    path.rmdir()


def test_a_quota_of_the_control_group_decides_on_the_number(half_a_processor: Path, short_dir: Path) -> None:
    (short_dir / "group.toml").write_text('actors = "a:b"\n[[workers]]\nname = "io"\nreplicas = "auto"\n')
    code = (
        f"import os, sys; open({str(half_a_processor / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'taskqd', 'budget', 'group.toml', '--offline'])"
    )
    budget = Command([sys.executable, "-c", code], short_dir, child_environment())
    try:
        assert budget.wait(60) == 0, budget.stderr
        assert re.search(r'^io: replicas = "auto": /sys/fs/cgroup/\S+ grants 0\.5 CPUs$', budget.stdout, re.MULTILINE)
    finally:
        budget.end()


def test_a_number_that_follows_the_processors_is_shown_with_its_reason_and_read_anew_by_a_reload(
    group: StartGroup,
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    g = group(tables={"[workers]": 'replicas = "auto"', **SOON})
    g.wait_for("ready", len(cpus))
    why = g.ask("/status")[1]["budget"]["auto_replicas"]
    assert list(why) == ["io"]
    assert f'io: replicas = "auto": {why["io"]}' in taskqd(g, "status").stdout
    psutil.Process(g.command.pid).cpu_affinity(cpus[:1])
    assert reload(g) == (
        "reloaded: nothing to change" if len(cpus) == 1 else f"reloaded: 0 unchanged, io {len(cpus)}→1"
    )
    assert list(pids(g)) == ["io.0"]
    assert g.ask("/status")[1]["budget"]["auto_replicas"] == {"io": "1 usable CPU"}
    assert taskqd(g, "scale", "io", "2").returncode == 0
    assert g.ask("/status")[1]["budget"]["auto_replicas"] == {}, "until the next reload"
    assert reload(g) == "reloaded: 0 unchanged, io 2→1"
    wait_until(lambda: g.ask("/ready")[0] == 200, 30)
    assert g.stop() == 0, g.command.stderr
