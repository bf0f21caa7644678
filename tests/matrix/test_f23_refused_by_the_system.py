"""F23: The system makes no process, for want of processes, descriptors, memory or the program: that is told and tried
again, and the supervisor goes on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

import pytest

from tests.matrix.conftest import Trial
from tests.matrix.oracle import needs, works
from tests.support import Command, child_environment

QUICK = {"supervisor": "stable_after = 0\nburst_limit = 0\nbackoff_initial = 0.2\nbackoff_max = 1"}
OTHER_USER = "61234"
"""Nobody else's: the system counts the processes of a user, and not at all those of root."""
AS_OTHER_USER = [
    *("setpriv", "--reuid", OTHER_USER, "--regid", OTHER_USER, "--clear-groups"),
    # The interpreter may be where only root may look.
    *("--inh-caps", "-all,+dac_override,+dac_read_search", "--ambient-caps", "-all,+dac_override,+dac_read_search"),
]


def test_f23_no_more_processes(trial: Trial) -> None:
    needs(
        works(*AS_OTHER_USER, "prlimit", "--nproc=1:", sys.executable, "-c", ""),
        "setpriv, prlimit, or the right to them",
    )
    with trial(tables=QUICK) as g:
        assert g.stop() == 0
        g.directory.parent.chmod(0o711)
        os.chown(g.runtime, int(OTHER_USER), int(OTHER_USER))
        g.command = Command([*AS_OTHER_USER, *g.command.argv], g.directory, g._env)
        pid = g.wait_for("ready")[0]["pid"]
        limit = [*AS_OTHER_USER, "prlimit", f"--pid={g.command.pid}"]
        subprocess.run([*limit, "--nproc=1:"], check=True, timeout=30)
        os.kill(pid, signal.SIGKILL)
        assert {event["why"] for event in g.wait_for("spawn-failed", 2)} == {"Resource temporarily unavailable"}
        assert g.ask("/live")[0] == 200
        g.command.signal(signal.SIGHUP)
        (failed,) = g.wait_for("reload-failed")
        assert failed["exit_code"] == 75
        assert "the system refuses to start the check" in failed["why"]
        subprocess.run([*limit, "--nproc=64:"], check=True, timeout=30)
        g.wait_for("ready", 2)
        assert g.ask("/ready")[0] == 200


@pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])
def test_f23_no_more_descriptors(trial: Trial, preload: str) -> None:
    with trial(tables=QUICK, preload=preload) as g:
        before = resource.prlimit(g.command.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(g.command.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        os.kill(g.events("ready")[0]["pid"], signal.SIGKILL)
        assert {event["why"] for event in g.wait_for("spawn-failed", 2)} == {"Too many open files"}
        resource.prlimit(g.command.pid, resource.RLIMIT_NOFILE, before)
        g.wait_for("ready", 2)
        assert g.ask("/ready")[0] == 200


SPAWN = """\
import os, resource
from taskqd.supervisor.spawn import spawn

free = [int(number) for number in os.listdir("/proc/self/fd")]
top, made, open_before = max(free) + 1, 0, sorted(os.listdir("/proc/self/fd"))
while not made:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
    try:
        new = spawn(["true"], dict(os.environ))
    except OSError as error:
        failed = os.strerror(error.errno)
    else:
        made = new.process.wait()  == 0
        new.drop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert sorted(os.listdir("/proc/self/fd")) == open_before, "something was left open"
    top += 1
print(top - max(free), failed)
"""


def test_f23_a_start_that_fails_half_way_leaves_nothing_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPAWN], env=child_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    steps, why = done.stdout.split(maxsplit=1)
    assert int(steps) > 4, done.stderr
    assert why == "Too many open files\n"


@pytest.mark.parametrize(
    ("fault", "why"), [("missing-program", "No such file or directory"), ("no-memory", "Cannot allocate memory")]
)
def test_f23_no_such_program_and_no_memory(trial: Trial, fault: str, why: str) -> None:
    tables = {**QUICK, "[workers]": '[[workers]]\nname = "well"'}
    with trial(modes={"io": fault}, tables=tables) as g:
        assert {event["why"] for event in g.wait_for("spawn-failed", 3)} == {why}
        assert g.ask("/live")[0] == 200
        assert g.ask("/ready")[1]["reason"].startswith("1/2 ready: io.0 is ")
        assert not g.events("child-exit")


@pytest.mark.parametrize(("preload", "made"), [("auto", 1), ("require", 0)])
def test_f23_a_fork_without_memory_is_told_and_an_exec_tried_instead(trial: Trial, preload: str, made: int) -> None:
    with trial(modes={"zygote": "cannot-fork"}, tables=QUICK, ready=made, preload=preload) as g:
        assert "Cannot allocate memory" in g.wait_for("spawn-failed")[0]["why"]
        if made:
            assert g.ask("/status")[1]["children"][0]["made_by"] == "exec"
        assert g.stop() == 0
        assert len(g.events("spawn")) == made
