"""F9: SIGTERM ends the group within its budget, whatever a process does and in whatever state it is: nobody survives,
and the exit code says whether somebody had to be killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from taskqd.supervisor.slot import State
from taskqd.supervisor.stopping import LEAST_GRACE, SLACK
from tests.matrix.conftest import Trial
from tests.matrix.oracle import tagged
from tests.matrix.stuck import stuck_place
from tests.supervisor.asking import taskqd
from tests.supervisor.conftest import Group
from tests.support import wait_until

BUDGET = LEAST_GRACE - SLACK + 0.5
"""Seconds from SIGTERM to the end: what the group may take of its platform's grace, and half a second."""


def stop_in_time(g: Group) -> set[str]:
    """Stop a group and return whom it told as not stopped well."""
    began = time.monotonic()
    g.stop()
    assert time.monotonic() - began < BUDGET
    (end,) = g.events("shutdown-complete")
    return set(end.get("not_clean", ()))


def states(g: Group) -> dict[str, str]:
    return {child["name"]: child["state"] for child in g.ask("/status")[1]["children"]}


def jobs(g: Group, name: str) -> int | None:
    (found,) = [child for child in g.ask("/status")[1]["children"] if child["name"] == name]
    return found["beat"].get("inflight")  # type: ignore[no-any-return]


def workers(modes: dict[str, str], more: dict[str, str] | None = None) -> dict[str, str]:
    """The tables of one worker for each name, beside ``io``."""
    tables = [f'[[workers]]\nname = "{name}"\n{(more or {}).get(name, "")}' for name in modes if name != "io"]
    return {"[workers]": "\n".join(tables)}


def test_f9_whatever_its_processes_do(trial: Trial) -> None:
    """Drains, is deaf, ignores every signal, is stopped, forks for ever, blocks its loop, holds the lock, spins."""
    modes = {
        "io": "idle",
        "deaf": "deaf,loaded",
        "ignores": "ignores-all",
        "stopped": "idle",
        "bomb": "bomb,deaf",
        "bomb2": "bomb,deaf",
        "blocked": "blocked",
        "lock": "gil-held",
        "spins": "spinning",
    }
    execed = dict.fromkeys(("ignores", "stopped", "bomb2", "lock"), 'preload = "off"')
    with trial(modes, workers(modes, execed), ready=9, ends=3, preload="require") as g:
        pids = {event["child"]: event["pid"] for event in g.events("ready")}
        os.kill(pids["stopped.0"], signal.SIGSTOP)
        g.wait_for("stopped")
        wait_until(lambda: jobs(g, "deaf.0") == 3, 30)
        assert stop_in_time(g) == {f"{name}.0" for name in modes if name != "io"}
        assert g.events("shutdown-complete")[0]["jobs_killed"] == 3


def test_f9_in_every_state(trial: Trial) -> None:
    modes = {
        "io": "idle",
        "stalled": "blocked",
        "draining": "deaf",
        "backoff": "crash-ready",
        "fatal": "ready-exit-78",
        "retired": "idle",
        "booting": "never-ready",
        "spawning": "idle",  # its turn does not come: one boots at a time
    }
    quick = "stall_after = 1.5\nhang_kill_after = 30\nbackoff_initial = 30\nmax_booting = 1"
    with trial(modes, {**workers(modes), "supervisor": quick}, ready=6, ends=3, preload="require") as g:
        assert taskqd(g, "drain", "retired").returncode == 0
        taskqd(g, "drain", "draining", "--timeout", "0.1")
        wanted = {f"{name}.0": name for name in modes if name != "io"} | {"io.0": "ready"}
        wait_until(lambda: states(g) == wanted, 30, "everybody is in his state")
        assert stop_in_time(g) == {"stalled.0", "draining.0"}
    elsewhere = {"down", "killing", "lost"}  # below
    assert {str(state) for state in State} == {*wanted.values(), *elsewhere}


def test_f9_down_as_there_is_no_plan_yet(trial: Trial) -> None:
    with trial(ready=0, TASKQ_PG_DSN="postgresql://nobody@127.0.0.1:9/none") as g:
        g.wait_for("preflight-warning")
        began = time.monotonic()
        assert g.stop() == 0
        assert time.monotonic() - began < BUDGET


@pytest.mark.parametrize("found", ["killing", "lost"])
def test_f9_a_process_that_hangs_in_the_kernel(trial: Trial, found: str) -> None:
    """SIGKILL does not end it: the group ends in time all the same, and says whom it leaves behind."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(stuck_place())
        tables = {
            "supervisor": "stall_after = 1.5\nhang_kill_after = 0.5",
            "[workers]": '[[workers]]\nname = "well"\nreplicas = 2',
        }
        with trial({"io": "stuck"}, tables, ready=3, ends=3, STUCK_PLACE=str(place.path)) as g:
            wait_until(place.somebody_hangs)
            g.wait_for({"killing": "kill", "lost": "lost"}[found])
            if found == "lost":
                assert states(g) == {"io.0": "lost", "well.0": "ready", "well.1": "ready"}
            assert stop_in_time(g) == {"io.0"}
            assert tagged(g.tag) == [event["pid"] for event in g.events("ready") if event["child"] == "io.0"]
            stack.close()
