"""The process that a zygote lays in while nothing is asked of it: real zygotes, with stand-ins for workers."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from tests.supervisor.conftest import Group, StartGroup
from tests.support import wait_until

QUICK = {"supervisor": "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0"}
FORKED = pytest.mark.parametrize("group", ["require"], indirect=True, ids=["fork"])


def spares(group: Group) -> list[psutil.Process]:
    """The processes that are laid in for the next fork."""
    return [process for process in group.processes() if process.name() == "taskqd spare"]


@FORKED
def test_a_spare_is_laid_in_and_becomes_the_next_worker(group: StartGroup) -> None:
    g = group(tables=QUICK)
    pid = g.wait_for("ready")[0]["pid"]
    for deaths in range(1, 10):  # on a busy machine the supervisor may not know of it yet
        spare = wait_until(lambda: spares(g), 20)[0]
        os.kill(pid, signal.SIGKILL)
        pid = g.wait_for("ready", deaths + 1)[deaths]["pid"]
        if pid == spare.pid:
            break
        wait_until(lambda known=spare: spares(g) == [known], 20)
    assert pid == spare.pid
    assert os.getpgid(spare.pid) == os.getsid(spare.pid) == spare.pid
    assert wait_until(lambda: spares(g), 20) != [spare]
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


@FORKED
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_that_is_of_no_use_is_done_without(group: StartGroup, number: signal.Signals) -> None:
    g = group(tables=QUICK)
    pid = g.wait_for("ready")[0]["pid"]
    spare = wait_until(lambda: spares(g), 20)[0]
    spare.send_signal(number)
    wait_until(lambda: not spare.is_running() or spare.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    os.kill(pid, signal.SIGKILL)
    assert g.wait_for("ready", 2)[1]["pid"] != spare.pid
    wait_until(lambda: not spare.is_running(), 20)
    assert g.stop() == 0, g.command.stderr
    assert g.left_over() == []


@FORKED
def test_a_spare_ends_with_its_zygote_and_with_the_supervisor(group: StartGroup) -> None:
    g = group(tables=QUICK)
    g.wait_for("ready")
    spare = wait_until(lambda: spares(g), 20)[0]
    os.kill(g.wait_for("preload-ready")[0]["pid"], signal.SIGKILL)
    g.wait_for("preload-ready", 2)
    wait_until(lambda: not spare.is_running(), 20)
    spare = wait_until(lambda: spares(g), 20)[0]
    g.command.process.kill()
    wait_until(lambda: not spare.is_running() or spare.status() == psutil.STATUS_ZOMBIE, 20)
