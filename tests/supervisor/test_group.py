"""A real supervisor with real processes: coming up, healing, being watched."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time

import psutil
import pytest

from taskqd.health.probe import main as probe
from tests.supervisor.conftest import BOTH_WAYS, Group, StartGroup
from tests.support import wait_until

QUICK = {"supervisor": "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0"}


def pid_of(group: Group) -> int:
    """The process that became ready last."""
    return int(group.events("ready")[-1]["pid"])


@BOTH_WAYS
def test_a_group_comes_up_answers_and_stops_clean(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2"})
    g.wait_for("ready", 2)
    assert g.ask("/live")[0] == 200
    assert g.ask("/startup")[0] == 200
    code, ready = g.ask("/ready")
    assert (code, ready["reason"]) == (200, "2/2 ready")
    code, status = g.ask("/status")
    assert [child["name"] for child in status["children"]] == ["io.0", "io.1"]
    assert status["budget"]["verdict"] == "fits"
    metrics = g.ask("/metrics")[1]["text"]
    assert 'taskqd_child_up{name="io",index="0"} 1' in metrics
    assert "taskqd_group_ready 1" in metrics
    assert probe(["ready", "--socket", str(g.socket)]) == 0
    began = time.monotonic()
    assert g.stop() == 0, g.command.stderr
    assert time.monotonic() - began < 10, "an idle group stops at once"
    assert g.left_over() == []
    assert [event["exit_code"] for event in g.events("shutdown-complete")] == [0]


def test_the_scheduler_is_a_child_that_waits_for_nobody(group: StartGroup) -> None:
    g = group(modes={"io": "never-ready"}, tables={"scheduler": "enabled = true", "supervisor": "max_booting = 1"})
    (ready,) = g.wait_for("ready")
    assert ready["child"] == "scheduler.0"
    assert g.ask("/ready")[1]["reason"] == "1/2 ready: io.0 is booting"
    os.kill(ready["pid"], signal.SIGKILL)
    assert g.wait_for("ready", 2)[-1]["child"] == "scheduler.0"
    assert g.stop() == 0, g.command.stderr


def test_what_children_are_given(group: StartGroup) -> None:
    g = group(
        tables={"[workers]": "max_concurrency = 3"},
        TASKQ_METRICS_PORT="9464",
        TASKQ_HEALTH_SOCKET_PATH="/tmp/x.sock",
        NOTIFY_SOCKET="/run/notify",
        WATCHDOG_USEC="1000",
        LISTEN_FDS="1",
    )
    g.wait_for("ready")
    process = psutil.Process(pid_of(g))
    environ = process.environ()
    assert environ["TASKQD_NAME"] == "io"
    assert environ["TASKQD_INDEX"] == "0"
    assert '"max_concurrency": 3' in environ["TASKQD_SETTINGS"]
    assert '"worker_label": "io.0"' in environ["TASKQD_SETTINGS"]
    assert environ["TASKQD_HEALTH_SOCKET"] == f"{g.runtime}/group/io.0.sock"
    for name in ("TASKQ_METRICS_PORT", "TASKQ_HEALTH_SOCKET_PATH", "NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS"):
        assert name not in environ
    assert os.getsid(process.pid) == process.pid
    open_files = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
    assert not any(str(g.runtime) in name for name in open_files), "the lock is not inherited"
    assert stat.S_IMODE(g.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(g.runtime.stat().st_mode) == 0o700
    assert g.stop() == 0, g.command.stderr


@BOTH_WAYS
def test_a_killed_child_is_replaced_and_the_others_are_not_touched(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2", **QUICK})
    first = {event["child"]: event["pid"] for event in g.wait_for("ready", 2)}
    os.kill(first["io.0"], signal.SIGKILL)
    third = g.wait_for("ready", 3)[-1]
    assert third["child"] == "io.0"
    exits = g.events("child-exit")
    assert [(event["child"], event["code"], event["why"]) for event in exits] == [("io.0", -9, "ended by SIGKILL")]
    assert psutil.pid_exists(first["io.1"])
    assert g.ask("/status")[1]["children"][0]["restarts"] == 1
    assert g.stop() == 0, g.command.stderr


@BOTH_WAYS
def test_what_a_crash_said_is_in_the_log(group: StartGroup) -> None:
    g = group(modes={"io": "crash-ready,once"}, tables=QUICK)
    g.wait_for("ready", 2)
    (end,) = g.events("child-exit")
    assert end["code"] == 1
    assert "RuntimeError: crashed after it was ready" in end["left"]
    assert g.stop() == 0, g.command.stderr


def test_a_database_that_is_away_restarts_nobody_and_unreadies_the_group(group: StartGroup) -> None:
    g = group(modes={"io": "database-away"})
    g.wait_for("ready")
    wait_until(lambda: g.ask("/ready")[0] == 503)
    assert "the database has not answered io.0" in g.ask("/ready")[1]["reason"]
    assert g.ask("/live")[0] == 200
    assert not g.events("child-exit")
    assert g.stop() == 0, g.command.stderr


# -- the boot phase -------------------------------------------------------------------------------


@BOTH_WAYS
def test_what_never_comes_up_ends_the_group_after_three_attempts(group: StartGroup) -> None:
    g = group(modes={"io": "broken-import"}, tables={"supervisor": "backoff_initial = 0.05"})
    assert g.command.wait(60) == 70
    assert len(g.events("spawn")) == 3
    assert "no module named 'gone'" in g.events("child-exit")[0]["left"]
    assert not g.events("ready")
    assert g.left_over() == []


@pytest.mark.parametrize(("code", "expected", "attempts"), [(78, 78, 1), (69, 69, 3), (75, 75, 3), (0, 70, 3)])
def test_the_group_ends_with_what_its_child_said(group: StartGroup, code: int, expected: int, attempts: int) -> None:
    g = group(modes={"io": f"exit-{code}"}, tables={"supervisor": "backoff_initial = 0.05"})
    assert g.command.wait(60) == expected
    assert len(g.events("spawn")) == attempts
    assert g.left_over() == []


def test_a_failing_part_stops_the_others_cleanly(group: StartGroup) -> None:
    g = group(modes={"cpu": "exit-78"}, tables={"[workers]": '[[workers]]\nname = "cpu"'})
    assert g.command.wait(60) == 78
    exits = {event["child"]: event["code"] for event in g.events("child-exit")}
    assert exits["cpu.0"] == 78
    assert g.left_over() == []


def test_a_boot_that_takes_too_long_is_ended(group: StartGroup) -> None:
    g = group(
        modes={"io": "never-ready"},
        tables={"supervisor": "boot_timeout = 1\nbackoff_initial = 0.05"},
        TASKQ_DATABASE_BOOT_TIMEOUT="0.5",
    )
    assert g.command.wait(60) == 70
    assert "was not ready after" in g.events("kill")[0]["why"]


def test_a_refusal_after_the_boot_phase_gives_up_that_process_alone(group: StartGroup) -> None:
    g = group(modes={"io": "ready-exit-78@1"}, tables={"[workers]": "replicas = 2"})
    g.wait_for("given-up")
    code, ready = g.ask("/ready")
    assert code == 503
    assert "io.1 is fatal" in ready["reason"]
    time.sleep(0.5)
    assert len(g.events("spawn")) == 2, "no restart loop"
    assert g.stop() == 0, g.command.stderr


@BOTH_WAYS
def test_boots_are_bounded(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 4", "supervisor": "max_booting = 1"})
    g.wait_for("ready", 4, timeout=60)
    order = [event["event"] for event in g.events() if event["event"] in ("spawn", "ready")]
    assert order == ["spawn", "ready"] * 4
    assert g.stop() == 0, g.command.stderr


# -- the supervisor itself ------------------------------------------------------------------------


def test_the_supervisor_loads_only_what_it_may(group: StartGroup) -> None:
    g = group()
    g.wait_for("ready")
    assert g.stop() == 0, g.command.stderr
    (line,) = [line for line in g.command.stdout.splitlines() if line.startswith("modules:")]
    loaded = set(line.split()[1:])
    ours = {name for name in loaded if name.startswith("taskqd.")}
    allowed = ("taskqd.domain", "taskqd.health", "taskqd.supervisor", "taskqd.settings")
    assert all(name.startswith(allowed) for name in ours)
    assert {name for name in ours if name.startswith("taskqd.settings.")} == {"taskqd.settings.durations"}
    assert not {"taskqd.supervisor.preflight", "taskqd.supervisor.resolve"} & ours
    tops = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names)
    assert {name for name in tops if not name.startswith(("_", "sitecustomize", "distutils"))} <= {"taskqd"}
    assert "multiprocessing" not in loaded
