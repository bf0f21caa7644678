"""Workers that are forked from a process that has imported their actors: real zygotes, with stand-ins for workers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

from tests.supervisor.asking import edit, pids, taskqd
from tests.supervisor.conftest import Group, StartGroup
from tests.support import wait_until

QUICK = {"supervisor": "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0"}
FORKED = pytest.mark.parametrize("group", ["require"], indirect=True, ids=["fork"])
AUTO = pytest.mark.parametrize("group", ["auto"], indirect=True, ids=["auto"])


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
def test_a_zygote_that_is_killed_touches_no_worker_and_is_replaced(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2", **QUICK})
    pids = [event["pid"] for event in g.wait_for("ready", 2)]
    zygote(g).kill()
    (died,) = g.wait_for("preload-died")
    assert died["why"] == "ended by SIGKILL"
    assert g.wait_for("preload-ready", 2)[1]["pid"] != died.get("pid")
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    g.wait_for("ready", 3)
    assert ways(g) == ["fork", "fork"]
    assert preload(g)["restarts"] == 1
    assert g.stop() == 0, g.command.stderr


@AUTO
def test_while_there_is_no_zygote_workers_are_execed(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2", **QUICK})
    pid = g.wait_for("ready", 2)[0]["pid"]
    zygote(g).send_signal(signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    g.wait_for("ready", 3)
    assert "exec" in ways(g)
    assert g.events("preload-died"), "it did not answer in time"
    g.wait_for("preload-ready", 2)
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


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


@AUTO
def test_a_zygote_that_must_not_be_forked_says_why_and_workers_are_execed(group: StartGroup) -> None:
    g = group(modes={"zygote": "thread"})
    g.wait_for("ready")
    (unfit,) = g.events("preload-unfit")
    assert unfit["why"] == "a fork is not safe after the import of group_actors:registry: thread 'exporter'"
    assert ways(g) == ["exec"]
    assert preload(g)["state"] == "unfit"
    assert preload(g)["why"] == unfit["why"]
    assert "taskqd_preload_ready 0" in g.ask("/metrics")[1]["text"]
    assert g.ask("/ready")[0] == 200
    assert g.stop() == 0, g.command.stderr


@AUTO
def test_a_zygote_whose_imports_fail_shows_the_traceback_once(group: StartGroup) -> None:
    g = group(modes={"zygote": "broken"})
    g.wait_for("ready")
    (unfit,) = g.events("preload-unfit")
    assert unfit["why"] == "no module named 'gone'"
    assert "standin_zygote.py" in unfit["traceback"]
    assert g.stop() == 0, g.command.stderr


@AUTO
def test_a_zygote_that_dies_of_its_imports_is_tried_again_and_again_at_growing_intervals(group: StartGroup) -> None:
    g = group(modes={"zygote": "dies"})
    g.wait_for("ready")
    assert [event["retry_in"] for event in g.wait_for("preload-died", 3)] == [0, 2, 4]
    assert ways(g) == ["exec"]
    assert g.stop() == 0, g.command.stderr


@FORKED
@pytest.mark.parametrize(("mode", "code"), [("thread", 78), ("broken", 78), ("dies", 70)])
def test_what_is_required_and_not_to_be_had_ends_the_group(group: StartGroup, mode: str, code: int) -> None:
    g = group(modes={"zygote": mode})
    assert g.command.wait(60) == code
    assert not g.events("spawn")
    assert 'preload = "require" (io): ' in g.events("shutdown-begin")[0]["reason"]
    assert g.left_over() == []


@FORKED
def test_a_stop_while_the_zygote_imports(group: StartGroup) -> None:
    g = group(modes={"zygote": "slow"})
    g.wait_for("workgroup.start")
    began = time.monotonic()
    assert g.stop() == 0, g.command.stderr
    assert time.monotonic() - began < 10
    assert g.left_over() == []
