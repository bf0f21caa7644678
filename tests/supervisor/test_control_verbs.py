"""Restarting, draining, silencing and scaling the processes of a running group, from its socket and by commands."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from taskqd.cli.main import main
from taskqd.supervisor.verbs import Verbs
from tests.supervisor.asking import SOON, TWO, edit, pids, taskqd
from tests.supervisor.conftest import Group, StartGroup
from tests.support import child_environment, taskqd_argv, wait_until


def states(g: Group) -> dict[str, str]:
    return {child["name"]: child["state"] for child in g.ask("/status")[1]["children"]}


def post(g: Group, verb: str, body: bytes = b"") -> tuple[int, list[dict[str, Any]]]:
    """POST to the group's socket; return the status and the lines of the answer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(g.socket))
        sock.sendall(f"POST /{verb} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, lines = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), [json.loads(line) for line in lines.splitlines()]


def quiet(g: Group) -> dict[str, bool]:
    """Which of the stand-ins say that they are quiet."""
    return {child["name"]: child["beat"].get("quiet") for child in g.ask("/status")[1]["children"]}


def test_a_restart_replaces_processes_by_equal_ones(group: StartGroup) -> None:
    g = group(tables={**TWO, "scheduler": "enabled = true"})
    g.wait_for("ready", 4)
    first = pids(g)
    done = taskqd(g, "restart", "io")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "restarted: io.0, io.1"
    second = pids(g)
    assert {name for name in first if first[name] == second[name]} == {"scheduler.0", "cpu.0"}
    assert taskqd(g, "restart", "io.1").returncode == 0
    third = pids(g)
    assert {name for name in first if second[name] != third[name]} == {"io.1"}
    supervisor = psutil.Process(g.command.pid)
    files = supervisor.num_fds()
    assert taskqd(g, "restart").returncode == 0
    wait_until(lambda: supervisor.num_fds() == files)
    assert supervisor.num_threads() == 1
    assert not set(third.values()) & set(pids(g).values())
    assert g.ask("/ready")[0] == 200
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


def test_drained_processes_stay_away_until_they_are_resumed(group: StartGroup) -> None:
    g = group(tables=TWO)
    g.wait_for("ready", 3)
    before = pids(g)
    done = taskqd(g, "drain", "io")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "drained: io.0, io.1")
    assert states(g) == {"io.0": "retired", "io.1": "retired", "cpu.0": "ready"}
    assert g.ask("/ready")[0] == 503
    edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
    assert taskqd(g, "reload").returncode == 0
    assert states(g)["io.0"] == "retired", "a reload does not bring it back"
    assert taskqd(g, "resume", "io.0").returncode == 0
    assert states(g) == {"io.0": "ready", "io.1": "retired", "cpu.0": "ready"}
    assert '"max_concurrency": 3' in psutil.Process(pids(g)["io.0"]).environ()["TASKQD_SETTINGS"]
    assert taskqd(g, "resume").returncode == 0
    assert set(states(g).values()) == {"ready"}
    assert pids(g)["cpu.0"] == before["cpu.0"]
    assert g.stop() == 0, g.command.stderr


def test_a_drained_process_is_told_as_one(group: StartGroup) -> None:
    g = group()
    g.wait_for("ready")
    assert taskqd(g, "drain", "io").returncode == 0
    told = next(line for line in taskqd(g, "status").stdout.splitlines() if line.startswith("io.0 "))
    assert "(drained)" in told
    assert "drained, as asked" in told
    assert g.stop() == 0, g.command.stderr


@pytest.mark.parametrize(
    "command",
    [["reload"], ["restart"], ["drain"], ["quiet"], ["resume"], ["scale", "io", "1"], ["dump", "io.0"], ["logs"],
     ["status"], ["health", "live"]],
    ids=lambda command: command[0],
)  # fmt: skip
def test_every_command_takes_the_name_of_the_group(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The name is looked for in the directories of groups, whatever TASKQD_SOCKET says."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TASKQD_SOCKET", str(tmp_path / "another.sock"))
    assert main([*command, "--group", "shop"]) in (1, 69)
    told = capfd.readouterr()
    assert "no group 'shop' in " in told.out + told.err


def test_a_drain_that_has_to_kill_says_so(group: StartGroup) -> None:
    g = group(modes={"io": "deaf"})
    g.wait_for("ready")
    done = taskqd(g, "drain", "io")
    assert done.returncode == 3
    assert "io.0" in done.stderr
    assert g.stop() == 0, "what was killed before is not the stop's"


def test_a_wait_that_is_too_long_ends_with_4_and_the_group_goes_on(group: StartGroup) -> None:
    g = group(modes={"io": "slow"}, tables={"[workers]": "cancellation_grace_period = 1.5"})
    g.wait_for("ready")
    done = taskqd(g, "drain", "--timeout", "200ms")
    assert (done.returncode, done.stderr) == (4, "error: the drain is not done yet; the group goes on with it\n")
    wait_until(lambda: states(g) == {"io.0": "retired"})
    assert g.stop() == 0


def test_resuming_what_still_drains_brings_it_back(group: StartGroup) -> None:
    g = group(modes={"io": "slow"}, tables={"[workers]": "cancellation_grace_period = 1"})
    g.wait_for("ready")
    assert taskqd(g, "drain", "--no-wait").returncode == 0
    assert states(g) == {"io.0": "draining"}
    assert taskqd(g, "resume").returncode == 0
    assert states(g) == {"io.0": "ready"}
    assert len(g.events("spawn")) == 2
    assert g.stop() == 0


def test_quiet_holds_over_a_crash_and_a_restart_until_resume(group: StartGroup) -> None:
    g = group(tables={**TWO, "supervisor": "settle_after = 0.2\nstable_after = 0"})
    g.wait_for("ready", 3)
    assert taskqd(g, "quiet", "io").returncode == 0
    wanted = {"io.0": True, "io.1": True, "cpu.0": False}
    wait_until(lambda: quiet(g) == wanted)
    os.kill(pids(g)["io.0"], signal.SIGKILL)
    g.wait_for("ready", 4)
    wait_until(lambda: quiet(g) == wanted)
    assert taskqd(g, "restart", "io").returncode == 0
    wait_until(lambda: quiet(g) == wanted)
    assert taskqd(g, "resume").returncode == 0
    wait_until(lambda: not any(quiet(g).values()))
    assert g.stop() == 0


def test_scale(group: StartGroup) -> None:
    g = group(tables={"budget": "app_connections = 200", **SOON})
    g.wait_for("ready")
    first = pids(g)
    assert taskqd(g, "scale", "io", "3").returncode == 0
    assert list(pids(g)) == ["io.0", "io.1", "io.2"]
    refused = taskqd(g, "scale", "io", "9")
    assert refused.returncode == 78
    assert "too many; 4 would fit" in refused.stderr
    assert list(pids(g)) == ["io.0", "io.1", "io.2"]
    assert taskqd(g, "scale", "io", "2").returncode == 0
    assert list(pids(g)) == ["io.0", "io.1"]
    assert taskqd(g, "reload").stdout.splitlines()[-1] == "reloaded: 0 unchanged, io 2→1"
    assert pids(g) == first
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


def test_a_scale_that_fails_leaves_the_number_as_it_was(group: StartGroup) -> None:
    g = group(modes={"io": "exit-78@2"}, tables=SOON)
    g.wait_for("ready")
    first = pids(g)
    done = taskqd(g, "scale", "io", "3")
    assert done.returncode == 1
    assert "io.2 did not come up: exit code 78" in done.stderr
    wait_until(lambda: g.ask("/status")[1]["coming_or_going"] == [])
    assert pids(g) == first
    assert g.stop() == 0, g.command.stderr


def test_what_was_given_up_is_started_again_by_resume(group: StartGroup) -> None:
    g = group(modes={"io": "ready-exit-78@1,once"}, tables={"[workers]": "replicas = 2"})
    g.wait_for("given-up")
    assert taskqd(g, "resume", "io.1").returncode == 0
    assert states(g) == {"io.0": "ready", "io.1": "ready"}
    assert g.stop() == 0


def test_changes_wait_for_each_other(group: StartGroup) -> None:
    g = group(tables={"[workers]": "replicas = 2", "supervisor": "settle_after = 0.5"})
    g.wait_for("ready", 2)
    assert taskqd(g, "restart", "--no-wait").returncode == 0
    done = taskqd(g, "scale", "io", "1")
    assert "waits for the restart that is being made" in done.stdout
    assert done.returncode == 0
    story = [event["event"] for event in g.events() if event["event"].startswith(("restart-", "scale-"))]
    assert story == ["restart-begin", "restart-done", "scale-begin", "scale-done"]
    assert g.stop() == 0


def test_what_is_asked_for_must_make_sense(shared: Group) -> None:
    for arguments, code, message in (
        (["restart", "schedular"], 1, "no 'schedular' (did you mean 'scheduler'?); there are: scheduler, io"),
        (["restart", "io.7"], 1, "no 'io.7'"),
        (["drain", "cpu"], 1, "no 'cpu'"),
        (["quiet", "scheduler"], 1, "the scheduler claims no jobs"),
        (["scale", "scheduler", "2"], 1, "no worker 'scheduler'; there are: io"),
        (["scale", "io", "0"], 2, "0 is not in the range x>=1"),
        (["scale", "io", "2000"], 1, "replicas = 2000 must be a whole number from 1 to 1024"),
        (["reload", "--timeout", "soon"], 2, "'soon' must be a duration above 0"),
    ):
        done = taskqd(shared, *arguments)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
        assert "Traceback" not in done.stderr
    assert not shared.events("child-exit")


@pytest.fixture
def shared(group: StartGroup) -> Group:
    g = group(tables={"scheduler": "enabled = true", **SOON})
    g.wait_for("ready", 2)
    return g


def test_bad_requests_are_refused(shared: Group) -> None:
    assert post(shared, "reload", b"[]") == (
        400,
        [{"ok": False, "reason": "the body must be one JSON object, its length in Content-Length"}],
    )
    assert post(shared, "reload", b"{" + b" " * 20_000 + b"}")[0] == 413
    assert post(shared, "nonsense")[0] == 404
    assert shared.ask("/reload") == (405, {"ok": False, "reason": "only POST"})
    (answer,) = post(shared, "quiet", b'{"name": "io", "hard": true}')[1]
    assert answer == {"op": "done", "exit_code": 1, "text": "unknown argument 'hard'"}
    (answer,) = post(shared, "scale", b'{"name": ["io"], "replicas": 2}')[1]
    assert (answer["exit_code"], "no worker ['io']" in answer["text"]) == (1, True)
    assert shared.stop() == 0, shared.command.stderr


def test_who_goes_away_or_never_reads_stops_nothing(shared: Group) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(shared.socket))
        sock.sendall(b"POST /restart HTTP/1.1\r\n\r\n")
    shared.wait_for("restart-done")
    assert shared.ask("/ready")[0] == 200
    assert shared.stop() == 0, shared.command.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_socket_is_open_to_all(shared: Group) -> None:
    for path, mode in ((shared.directory.parent, 0o711), (shared.directory, 0o711), (shared.runtime, 0o711)):
        path.chmod(mode)
    shared.socket.chmod(0o666)
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode()); print(s.recv(65536).decode())"
    )

    def ask(request: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", script, str(shared.socket), request],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout

    for verb in Verbs.NAMES:
        assert ask(f"POST /{verb} HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 403 only root and the group's own user")
    assert ask("GET /live HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 200 ok"), "it may look"
    assert not shared.events("restart-begin")
    assert shared.stop() == 0, shared.command.stderr


def test_without_a_group_the_answer_is_69(start: Callable[..., Any], tmp_path: Any) -> None:
    command = start("reload", "--socket", str(tmp_path / "none.sock"))
    assert command.wait() == 69
    assert "none.sock" in command.stderr


def test_a_group_that_is_killed_meanwhile_is_69(group: StartGroup) -> None:
    g = group(modes={"io": "slow"}, tables={"[workers]": "cancellation_grace_period = 1.5"})
    g.wait_for("ready")
    waiting = subprocess.Popen(
        [*taskqd_argv("drain"), "--socket", str(g.socket)],
        env=child_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: states(g) == {"io.0": "draining"})
    g.command.signal(signal.SIGKILL)
    _, told = waiting.communicate(timeout=30)
    assert (waiting.returncode, "went away" in told) == (69, True)


def test_before_there_is_a_plan_the_answer_is_75(group: StartGroup) -> None:
    g = group(TASKQ_PG_DSN="postgresql://nobody@127.0.0.1:9/none")
    g.wait_for("preflight-warning")
    done = taskqd(g, "reload")
    assert done.returncode == 75
    assert "try again" in done.stderr
    assert g.stop() == 0
