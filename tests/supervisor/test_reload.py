"""Changing what a group runs by its file: real supervisors, real processes, stand-ins for the workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any

import psutil
import pytest

from taskqd.health.probe import main as probe
from tests.supervisor.asking import SOON, TWO, edit, pids, taskqd
from tests.supervisor.conftest import StartGroup
from tests.support import child_environment, taskqd_argv, wait_until


def test_a_changed_worker_is_replaced_one_by_one_and_the_others_are_not_touched(group: StartGroup) -> None:
    g = group(tables={**TWO, "scheduler": "enabled = true"})
    g.wait_for("ready", 4)
    before = pids(g)
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
    done = taskqd(g, "reload")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "reloaded: 2 unchanged, io replaced"
    after = pids(g)
    assert {name: after[name] == before[name] for name in before} == {
        "scheduler.0": True,
        "io.0": False,
        "io.1": False,
        "cpu.0": True,
    }
    story = [(e["event"], e["child"]) for e in g.events() if e["event"] in ("ready", "child-exit")][4:]
    assert story == [("ready", "io.0"), ("child-exit", "io.0"), ("ready", "io.1"), ("child-exit", "io.1")]
    assert '"max_concurrency": 3' in psutil.Process(after["io.1"]).environ()["TASKQD_SETTINGS"]
    assert {child["name"]: child["generation"] for child in g.ask("/status")[1]["children"]} == {
        "scheduler.0": 1,
        "io.0": 2,
        "io.1": 2,
        "cpu.0": 1,
    }
    assert g.ask("/ready")[1]["reason"] == "4/4 ready"
    assert g.ask("/status")[1]["coming_or_going"] == []
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


def test_a_file_that_is_refused_changes_nothing_and_the_caller_is_told(group: StartGroup) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    before = pids(g)
    file = g.directory / "group.toml"
    good = file.read_text()
    for count, (old, new, message) in enumerate(
        (
            ('name = "io"', 'name = "io', "invalid TOML"),
            ('name = "io"', 'name = "io"\nmax_concurency = 3', "(did you mean 'max_concurrency'?)"),
            ('"group_actors:registry"', '"group_actors:gone"', "group_actors:gone"),
            ('name = "io"', 'name = "io"\nmax_concurrency = 1000', "connections"),
            ('runtime_dir = "run"', 'runtime_dir = "run"\nname = "other"', "needs a restart of the group"),
            ('runtime_dir = "run"', 'runtime_dir = "away"', "[supervisor] runtime_dir changes from 'run' to 'away'"),
        ),
        start=1,
    ):
        file.write_text(good)
        edit(g, (old, new))
        done = taskqd(g, "reload")
        assert (done.returncode, message in done.stderr) == (78, True), done.stderr
        assert message in g.wait_for("reload-failed", count)[-1]["why"]
        assert pids(g) == before
    assert not g.events("child-exit")
    assert g.ask("/ready")[0] == 200
    assert g.stop() == 0, g.command.stderr


@pytest.mark.parametrize(("unlucky", "why"), [(13, "was not ready after"), (14, "exit code 1"), (15, "refuses")])
def test_a_replacement_that_fails_is_given_up_and_the_old_ones_are_kept(
    group: StartGroup, unlucky: int, why: str
) -> None:
    g = group(
        modes={"io": "picky"},
        tables={"[workers]": "replicas = 2", "supervisor": "settle_after = 1\nboot_timeout = 1"},
        TASKQ_DATABASE_BOOT_TIMEOUT="0.5",
    )
    g.wait_for("ready", 2)
    before = pids(g)
    edit(g, ('name = "io"', f'name = "io"\nmax_concurrency = {unlucky}'))
    done = taskqd(g, "reload")
    assert done.returncode == 1
    assert "reload aborted: io.0: the new process did not come up" in done.stderr
    assert why in done.stderr
    assert "not made: io" in done.stderr
    assert pids(g) == before
    assert g.ask("/ready")[0] == 200
    edit(g, (f"max_concurrency = {unlucky}", "max_concurrency = 12"))
    assert taskqd(g, "reload").returncode == 0
    assert not set(pids(g).values()) & set(before.values())
    assert g.stop() == 0, g.command.stderr


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
    assert g.stop() == 0, g.command.stderr


def test_workers_are_added_removed_and_scaled(group: StartGroup) -> None:
    g = group(tables=TWO)
    g.wait_for("ready", 3)
    before = pids(g)
    edit(g, ("replicas = 2", "replicas = 3"), ('name = "cpu"', 'name = "gpu"'))
    done = taskqd(g, "reload", "--json")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["removed"], last["added"], last["scaled"]) == (["cpu"], ["gpu"], {"io": {"from": 2, "to": 3}})
    after = pids(g)
    assert list(after) == ["io.0", "io.1", "io.2", "gpu.0"]
    assert (after["io.0"], after["io.1"]) == (before["io.0"], before["io.1"])
    edit(g, ("replicas = 3", "replicas = 1"))
    assert taskqd(g, "reload").returncode == 0
    assert list(pids(g)) == ["io.0", "gpu.0"]
    assert pids(g)["io.0"] == before["io.0"]
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


def test_a_new_worker_that_does_not_come_up_ends_nobody(group: StartGroup) -> None:
    g = group(modes={"gpu": "exit-78"}, tables=SOON)
    g.wait_for("ready")
    before = pids(g)
    edit(g, ('name = "io"', 'name = "io"\n[[workers]]\nname = "gpu"'))
    done = taskqd(g, "reload")
    assert done.returncode == 1
    assert "gpu.0 did not come up: exit code 78" in done.stderr
    assert pids(g) == before
    assert g.ask("/ready")[0] == 200
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


def test_without_room_for_both_the_old_process_goes_first(group: StartGroup) -> None:
    # The server grants 297; the group needs 25, and a second worker beside the first 22 more.
    g = group(modes={"io": "picky"}, tables={"budget": "app_connections = 260", **SOON})
    g.wait_for("ready")
    edit(g, ('name = "io"', 'name = "io"\npoll_interval = 2'))
    assert taskqd(g, "reload").returncode == 0
    assert [e["event"] for e in g.events() if e.get("child") == "io.0"] == [
        "spawn",
        "ready",
        "child-exit",
        "spawn",
        "ready",
    ]
    edit(g, ("poll_interval = 2", "max_concurrency = 15\ndispatcher_pool_size = 1"))
    done = taskqd(g, "reload")
    assert (done.returncode, "the old one is back" in done.stderr) == (1, True)
    wait_until(lambda: g.ask("/ready")[0] == 200)
    assert '"poll_interval": 2' in psutil.Process(pids(g)["io.0"]).environ()["TASKQD_SETTINGS"]
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


def test_a_stop_breaks_a_reload_off(group: StartGroup) -> None:
    g = group(modes={"io": "picky"}, tables={"[workers]": "replicas = 2", **SOON})
    g.wait_for("ready", 2)
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 13'))
    waiting = subprocess.Popen(
        [*taskqd_argv("reload"), "--socket", str(g.socket)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    g.wait_for("spawn", 3)
    began = time.monotonic()
    assert g.stop() == 0, g.command.stderr
    assert time.monotonic() - began < 10
    _, told = waiting.communicate(timeout=30)
    assert (waiting.returncode, "broken off: the group is stopping" in told) == (1, True)
    assert g.events("reload-broken-off")
    assert g.left_over() == []


def test_a_stop_breaks_the_check_of_a_reload_off(group: StartGroup) -> None:
    g = group(tables=SOON)
    g.wait_for("ready")
    g.command.signal(signal.SIGHUP)
    g.wait_for("reload-begin")
    g.command.signal(signal.SIGTERM)
    assert g.command.wait() == 0, g.command.stderr
    assert g.left_over() == []


def test_reloads_at_the_same_time_are_few_and_all_are_answered(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2", **SOON})
    g.wait_for("ready", 2)
    before = pids(g)
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
    for _ in range(50):
        g.command.signal(signal.SIGHUP)
    asking = [
        subprocess.Popen(
            [*taskqd_argv("reload"), "--socket", str(g.socket)],
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(3)
    ]
    assert [process.wait(60) for process in asking] == [0, 0, 0]
    wait_until(lambda: g.ask("/status")[1]["change"] is None, 30)
    assert len(g.events("reload-begin")) <= 4
    assert len(g.events("spawn")) == 4, "the change was made once"
    assert not set(pids(g).values()) & set(before.values())
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
