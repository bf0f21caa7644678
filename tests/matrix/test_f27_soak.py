"""F27: Crash after crash after crash: memory, descriptors and threads of the supervisor stay where they were, and a
guard against bursts, where there is one, gives up what crashes too often.
"""

from __future__ import annotations

import time

import psutil
import pytest

from tests.matrix.conftest import Trial
from tests.matrix.oracle import check_flat, vitals
from tests.supervisor.conftest import Group
from tests.supervisor.test_preload import zygote as zygote_of
from tests.support import wait_until

NEVER_ENOUGH = {"supervisor": "stable_after = 0\nburst_limit = 0", "[workers]": "replicas = 4"}
GROWTH = 2 * 1024**2
"""Bytes that an allocator may keep."""
LONG = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("restarts", [pytest.param(200), pytest.param(10_000, marks=LONG)])
def test_f27_nothing_grows_over_crashes(trial: Trial, restarts: int) -> None:
    with trial(modes={"io": "crash-until-calm"}, tables=NEVER_ENOUGH, preload="require") as g:
        after(g, restarts // 4)  # by then it has seen everything once
        supervisor = psutil.Process(g.command.pid)
        before, memory = vitals(g.command.pid), supervisor.memory_full_info().uss
        zygote = zygote_of(g)
        held = zygote.num_fds()
        after(g, restarts)
        (g.directory / "calm").touch()
        wait_until(lambda: g.ask("/ready")[0] == 200, 60)
        check_flat(g.command.pid, before)
        grown = supervisor.memory_full_info().uss - memory
        assert grown < GROWTH, f"{grown} bytes more"
        assert before.threads == zygote.num_threads() == 1
        assert zygote.num_fds() <= held + 1, "the link to what it lays in when it has time"
        assert not zygote.children(), "what it makes is not its own"
        assert not any(child["degraded"] for child in g.ask("/status")[1]["children"])


def after(g: Group, restarts: int) -> None:
    """Wait until the processes were started anew so often."""
    deadline = time.monotonic() + 60 + restarts
    while time.monotonic() < deadline:
        if sum(child["restarts"] for child in g.ask("/status")[1]["children"]) >= restarts:
            return
        time.sleep(0.05)
    raise AssertionError(f"not {restarts} restarts in time")


def test_f27_the_guard_against_bursts_gives_up_what_crashes_too_often(trial: Trial) -> None:
    tables = {
        "supervisor": "stable_after = 0\nburst_limit = 5\nburst_window = 60",
        "[workers]": '[[workers]]\nname = "well"',
    }
    with trial(modes={"io": "crash-ready"}, tables=tables, preload="require") as g:
        (given_up,) = g.wait_for("given-up")
        assert (given_up["child"], given_up["why"]) == ("io.0", "5 restarts within 60 s")
        assert len([event for event in g.events("spawn") if event["child"] == "io.0"]) == 6
        code, ready = g.ask("/ready")
        assert (code, "io.0 is fatal" in ready["reason"]) == (503, True)
        wait_until(lambda: g.ask("/status")[1]["children"][1]["state"] == "ready")
        assert g.ask("/live")[0] == 200
