"""Stopping a real group: inside its grace, whatever its processes do; and nothing survives a killed supervisor."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.supervisor.conftest import BOTH_WAYS, StartGroup
from tests.support import wait_until

GRACE = 10.0


def test_a_child_that_ignores_the_request_is_killed_inside_the_grace(group: StartGroup) -> None:
    g = group(modes={"io": "deaf"})
    g.wait_for("ready")
    began = time.monotonic()
    assert g.stop() == 3
    assert time.monotonic() - began < GRACE
    assert g.events("shutdown-complete")[0]["not_clean"] == ["io.0"]
    assert g.left_over() == []


@pytest.mark.parametrize("mode", ["blocked", "gil-held", "spinning"])
def test_a_child_that_cannot_hear_is_killed_inside_the_grace(group: StartGroup, mode: str) -> None:
    g = group(modes={"io": mode})
    g.wait_for("ready")
    began = time.monotonic()
    assert g.stop() == 3
    assert time.monotonic() - began < GRACE
    assert g.left_over() == []


def test_one_budget_for_all_not_one_after_the_other(group: StartGroup) -> None:
    g = group(modes={"io": "deaf"}, tables={"[workers]": "replicas = 4"})
    g.wait_for("ready", 4)
    began = time.monotonic()
    assert g.stop() == 3
    assert time.monotonic() - began < GRACE


@BOTH_WAYS
def test_a_child_is_told_its_deadlines_and_may_use_them(group: StartGroup) -> None:
    g = group(modes={"io": "slow"}, tables={"[workers]": "cancellation_grace_period = 1\ncleanup_grace_period = 1"})
    g.wait_for("ready")
    began = time.monotonic()
    assert g.stop() == 0
    assert 1 <= time.monotonic() - began < GRACE


def test_a_stop_while_booting_and_while_waiting_to_restart(group: StartGroup) -> None:
    g = group(modes={"io": "never-ready"})
    g.wait_for("spawn")
    assert g.stop() == 0
    g = group(modes={"io": "crash-ready"}, tables={"supervisor": "backoff_initial = 30"})
    g.wait_for("restart-scheduled")
    began = time.monotonic()
    assert g.stop() == 0
    assert time.monotonic() - began < 10
    assert g.left_over() == []


def test_a_stop_before_there_is_a_plan(group: StartGroup) -> None:
    g = group(TASKQ_PG_DSN="postgresql://nobody@127.0.0.1:9/none")
    g.wait_for("preflight-warning")
    began = time.monotonic()
    assert g.stop() == 0
    assert time.monotonic() - began < 10
    assert g.left_over() == []


@pytest.mark.parametrize("mode", ["idle", "blocked", "gil-held", "spinning", "never-ready", "grandchild"])
def test_nothing_outlives_a_killed_supervisor(group: StartGroup, mode: str) -> None:
    g = group(modes={"io": mode}, tables={"[workers]": "replicas = 2", "supervisor": "max_booting = 2"})
    g.wait_for("spawn" if mode == "never-ready" else "ready", 2)
    if mode == "never-ready":
        wait_until(lambda: len([p for p in g.processes() if "standin.py" in " ".join(p.cmdline())]) == 2)
        time.sleep(0.5)  # past its first lines, in which it arms the death signal
    workers = [process for process in g.processes() if "standin.py" in " ".join(process.cmdline())]
    assert len(workers) == 2
    g.command.signal(signal.SIGKILL)
    g.command.wait()
    wait_until(lambda: not any(_alive(worker) for worker in workers), 10)


def test_the_preflight_does_not_outlive_a_killed_supervisor(group: StartGroup) -> None:
    g = group(TASKQ_PG_DSN="postgresql://nobody@127.0.0.1:9/none")
    g.wait_for("preflight-warning")
    (preflight,) = g.processes()
    g.command.signal(signal.SIGKILL)
    g.command.wait()
    wait_until(lambda: not _alive(preflight))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
