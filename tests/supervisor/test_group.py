"""A real supervisor with real processes: coming up, healing, being watched."""

from __future__ import annotations

import os
import stat
import sys
import time

import psutil

from taskqd.health.probe import main as probe
from tests.supervisor.conftest import BOTH_WAYS, Group, StartGroup

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
