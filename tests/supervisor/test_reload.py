"""Changing what a group runs by its file: real supervisors, real processes, stand-ins for the workers."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil

from taskqd.health.probe import main as probe
from tests.supervisor.asking import SOON, TWO, edit, pids, taskqd
from tests.supervisor.conftest import StartGroup
from tests.support import wait_until


def test_what_was_replaced_before_an_abort_is_put_right_by_the_next_reload(group: StartGroup) -> None:
    g = group(modes={"io": "picky@1"}, tables={"[workers]": "replicas = 2", **SOON})
    g.wait_for("ready", 2)
    first = pids(g)
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 15'))
    assert taskqd(g, "reload").returncode == 1
    half = pids(g)
    assert (half["io.0"] == first["io.0"], half["io.1"] == first["io.1"]) == (False, True)
    edit(g, ("\nmax_concurrency = 15", ""))
    assert taskqd(g, "reload").returncode == 0
    last = pids(g)
    assert (last["io.0"] == half["io.0"], last["io.1"] == first["io.1"]) == (False, True)
    assert taskqd(g, "reload").stdout.splitlines()[-1] == "reloaded: nothing to change"
    counted = g.ask("/metrics")[1]["text"].splitlines()
    assert {'taskqd_reload_total{result="done"} 2', 'taskqd_reload_total{result="aborted"} 1'} <= set(counted)
    assert "taskqd_generation 3" in counted, "the last one began nothing"
    assert g.stop() == 0, g.command.stderr


def test_a_setting_of_a_dot_env_file_that_changed_is_a_change(group: StartGroup) -> None:
    g = group(tables=TWO)
    g.wait_for("ready", 3)
    before = pids(g)
    (g.directory / ".env").write_text("TASKQ_MAX_CONCURRENCY=7\n")
    done = taskqd(g, "reload")
    assert done.stdout.splitlines()[-1] == "reloaded: 1 unchanged, io replaced", "cpu has its own"
    assert pids(g)["cpu.0"] == before["cpu.0"]
    assert g.stop() == 0, g.command.stderr


def test_the_scheduler_is_stopped_before_the_next_one_starts(group: StartGroup) -> None:
    g = group(tables={"scheduler": "enabled = true", **SOON})
    g.wait_for("ready", 2)
    edit(g, ("enabled = true", "enabled = true\nsweep_interval = 2"))
    assert taskqd(g, "reload").returncode == 0
    story = [e["event"] for e in g.events() if e.get("child") == "scheduler.0"]
    assert story == ["spawn", "ready", "child-exit", "spawn", "ready"]
    assert g.stop() == 0, g.command.stderr


def test_limits_of_the_supervisor_change_without_a_restart(group: StartGroup) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    before = pids(g)
    edit(g, ("settle_after", "stall_after = 1.5\nhang_kill_after = 0.5\nsettle_after"))
    assert taskqd(g, "reload").returncode == 0
    assert pids(g) == before
    psutil.Process(before["io.0"]).suspend()
    g.wait_for("ready", 2)  # with the old limits it would have taken 33 s
    assert g.stop() == 0, g.command.stderr


def test_deaths_while_a_process_is_replaced(group: StartGroup) -> None:
    g = group(modes={"io": "picky"}, tables={"[workers]": "replicas = 2", "supervisor": "settle_after = 1.5"})
    g.wait_for("ready", 2)
    before = pids(g)
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
    g.command.signal(signal.SIGHUP)
    successor = g.wait_for("ready", 3)[-1]["pid"]
    os.kill(before["io.0"], signal.SIGKILL)  # the old one returns, and its successor takes its place all the same
    wait_until(lambda: pids(g)["io.0"] == successor, 30)
    second = wait_until(lambda: [e for e in g.events("ready") if e["child"] == "io.1"][1:], 30)[0]["pid"]
    os.kill(second, signal.SIGKILL)  # within its settling: it is given up
    assert "io.1: the new process did not come up: ended by SIGKILL" in g.wait_for("reload-failed")[0]["why"]
    assert pids(g) == {"io.0": successor, "io.1": before["io.1"]}
    wait_until(lambda: g.ask("/status")[1]["coming_or_going"] == [], 30)
    assert g.ask("/ready")[0] == 200
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


def test_the_socket_of_a_replaced_process_is_where_the_old_one_was(group: StartGroup) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
    assert taskqd(g, "reload").returncode == 0
    status: dict[str, Any] = psutil.Process(pids(g)["io.0"]).environ()
    assert status["TASKQD_HEALTH_SOCKET"].endswith("/io.0.next.sock"), "both lived for a moment"
    assert probe(["live", "--socket", str(g.socket)]) == 0
    assert g.stop() == 0, g.command.stderr
