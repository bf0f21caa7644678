"""Workers that are forked from a process that has imported their actors: real zygotes, with stand-ins for workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from tests.supervisor.asking import edit, pids, taskqd
from tests.supervisor.conftest import Group, StartGroup
from tests.support import wait_until

FORKED = pytest.mark.parametrize("group", ["require"], indirect=True, ids=["fork"])


def preload(group: Group) -> dict[str, Any]:
    found: dict[str, Any] = group.ask("/status")[1]["preload"]
    return found


def ways(group: Group) -> list[str]:
    return [child["made_by"] for child in group.ask("/status")[1]["children"] if child["role"] == "worker"]


def zygote(group: Group) -> psutil.Process:
    return psutil.Process(group.wait_for("preload-ready")[-1]["pid"])


@FORKED
def test_a_forked_worker_is_a_child_of_the_supervisor_with_a_session_and_a_name_of_its_own(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2"}, OMP_NUM_THREADS="3")
    pids = [event["pid"] for event in g.wait_for("ready", 2)]
    parent = zygote(g)
    for number, pid in enumerate(pids):
        worker = psutil.Process(pid)
        assert worker.ppid() == g.command.pid
        assert os.getsid(pid) == os.getpgid(pid) == pid
        assert worker.cmdline() == parent.cmdline(), "it is a copy of the zygote"
        with open(f"/proc/{pid}/comm") as file:
            assert file.read() == f"taskqd io.{number}\n"
    status = preload(g)
    (only,) = status.pop("zygotes")
    counts = {"state": "ready", "why": None, "restarts": 0, "forked": 2, "execed": 0}
    assert status == counts
    assert only | {"import_s": 0} == {**counts, "workers": ["io"], "pid": parent.pid, "import_s": 0}
    assert ways(g) == ["fork", "fork"]
    metrics = g.ask("/metrics")[1]["text"]
    assert "taskqd_preload_ready 1" in metrics
    assert 'taskqd_workers_started_total{way="fork"} 2' in metrics
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


@FORKED
def test_the_scheduler_is_execed(group: StartGroup) -> None:
    g = group(tables={"scheduler": "enabled = true"})
    ready = {event["child"]: event["pid"] for event in g.wait_for("ready", 2)}
    assert psutil.Process(ready["scheduler.0"]).cmdline() != zygote(g).cmdline()
    assert g.stop() == 0, g.command.stderr


@FORKED
def test_a_change_of_one_worker_replaces_its_zygote_alone_and_one_that_is_given_up_leaves_the_old_one(
    group: StartGroup,
) -> None:
    own = '[workers.env]\nREGION = "here"\n[[workers]]\nname = "cpu"'
    g = group(modes={"io": "picky"}, tables={"[workers]": own, "supervisor": "settle_after = 0.2\nstable_after = 0"})
    g.wait_for("ready", 2)

    def zygotes() -> dict[str, int]:
        return {",".join(each["workers"]): each["pid"] for each in preload(g)["zygotes"]}

    first = zygotes()
    assert set(first) == {"io", "cpu"}
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 15'), ('"here"', '"there"'))
    assert taskqd(g, "reload").returncode == 1, "what comes up there does not work"
    assert zygotes() == first
    os.kill(pids(g)["io.0"], signal.SIGKILL)
    g.wait_for("ready", 3)
    assert ways(g) == ["fork", "fork"]
    edit(g, ("max_concurrency = 15", "max_concurrency = 3"))
    assert taskqd(g, "reload").returncode == 0
    second = zygotes()
    assert (second["cpu"] == first["cpu"], second["io"] == first["io"]) == (True, False)
    wait_until(lambda: not psutil.pid_exists(first["io"]), 30)
    assert ways(g) == ["fork", "fork"]
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []
