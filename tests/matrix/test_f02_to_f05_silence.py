"""Processes that are silent.

F2: a process is stopped by a signal: that is seen at once, and it is killed and replaced like a hung one, in its time.

F3: a process blocks its event loop, or holds the interpreter lock in C: its stack with the guilty line is told, then it
is killed and replaced; nobody else is.

F4: most processes are silent at once, or get next to no processor: the machine is blamed and nobody killed.

F5: the supervisor itself stands still, alone or with its processes, as on a host that was suspended: that is told, and
nobody is blamed for the silence.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime

from tests.jobs import JobTable
from tests.matrix.actors import ACTORS
from tests.matrix.cgroups import frozen, throttled
from tests.matrix.conftest import Trial
from tests.supervisor.conftest import Group
from tests.support import eventually, wait_until

STALL = 1.5
LAG = 0.1
"""Seconds by which a log line may be later than what it tells of, and the next one less so."""
QUICK = f"stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0\nstall_after = {STALL}"


def with_kill_after(seconds: float) -> dict[str, str]:
    return {"supervisor": f"{QUICK}\nhang_kill_after = {seconds}"}


def child(group: Group, name: str = "io.0") -> dict[str, object]:
    return next(each for each in group.ask("/status")[1]["children"] if each["name"] == name)


def test_f2_a_stopped_process_is_shown_at_once_and_killed_in_its_time(trial: Trial) -> None:
    with trial(tables=with_kill_after(2)) as g:
        pid = int(g.events("ready")[0]["pid"])
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        g.wait_for("stopped")
        assert time.monotonic() - began < 0.5, "ten times 50 ms"
        assert child(g)["stopped"] is True
        exit_event = g.wait_for("child-exit")[0]
        assert time.monotonic() - began > 3, "not before it was silent for stall_after and hang_kill_after"
        assert exit_event["class"] == "hung"
        assert "stopped: it is stopped by a signal" in exit_event["why"]
        assert "most recent call first" in exit_event["left"], "it goes on just long enough to show where it was"
        g.wait_for("ready", 2)
        assert child(g)["stopped"] is False


def test_f2_a_process_that_goes_on_in_time_is_left_alone(trial: Trial) -> None:
    with trial(tables=with_kill_after(30)) as g:
        pid = int(g.events("ready")[0]["pid"])
        os.kill(pid, signal.SIGSTOP)
        g.wait_for("stalled")
        os.kill(pid, signal.SIGCONT)
        g.wait_for("continued")
        g.wait_for("recovered")
        assert child(g)["pid"] == pid


def test_f3_who_blocks_is_told_with_the_stack_and_killed_in_time(trial: Trial) -> None:
    expected = {"io": "blocked", "spins": "blocked", "lock": "gil-held", "regex": "gil-held", "call": "gil-held"}
    modes = {
        "io": "blocked,once",
        "spins": "spinning,once",
        "lock": "gil-held,once",
        "regex": "catastrophe,once",
        "call": "long-call,once",
    }
    ways = {"spins": "off", "lock": "require", "regex": "off", "call": "require"}
    parts = [f'[[workers]]\nname = "{name}"\npreload = "{way}"' for name, way in ways.items()]
    healthy = '[[workers]]\nname = "well"\nreplicas = 6'  # most of the group is, so that the machine is not blamed
    tables = {**with_kill_after(2), "[workers]": "\n".join([*parts, healthy])}
    with trial(modes, tables, ready=11, preload="auto") as g:
        ready = {event["child"]: event["timestamp"] for event in g.events("ready")}
        ends = {event["child"].partition(".")[0]: event for event in g.wait_for("child-exit", 5, timeout=60)}
        told = {event["child"].partition(".")[0]: event["verdict"].partition(":")[0] for event in g.events("verdict")}
        assert told == expected
        for name, verdict in expected.items():
            assert f": {verdict}: " in ends[name]["why"]
            assert ends[name]["class"] == "hung"
            steps = [event for event in g.events() if event.get("child") == f"{name}.0"]
            names = [event["event"] for event in steps]
            assert names.index("stalled") < names.index("stacks") < names.index("kill"), "a dump precedes every kill"
            stacks = steps[names.index("stacks")]["stacks"]
            assert "after_ready" in stacks
            assert "other threads run" not in stacks
            silent = seconds_between(ready[f"{name}.0"], steps[names.index("stalled")]["timestamp"])
            assert STALL - LAG < silent < 10 * STALL
            killed = seconds_between(
                steps[names.index("stalled")]["timestamp"], steps[names.index("kill")]["timestamp"]
            )
            assert 2 - LAG < killed < 20
        g.wait_for("ready", 16)
        assert {event["child"] for event in g.events("child-exit")} == {f"{name}.0" for name in expected}


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


async def test_f3_the_line_of_a_real_handler_is_named(trial: Trial, jobs: JobTable) -> None:
    with trial(tables={**with_kill_after(1), "[workers]": "notify_poll_interval = 0.5"}, actors=ACTORS) as g:
        await jobs.plant(1, actor="'sleeps'")
        await eventually(lambda: len(g.events("ready")) == 2, 60, g.command.stderr)
        (end,) = g.events("child-exit")
        assert end["class"] == "hung"
        line = ACTORS.splitlines().index("        time.sleep(1000)") + 1
        shown = "".join(event["stacks"] for event in g.events("stacks"))
        assert f'group_actors.py", line {line} in sleeps' in shown

        async def done() -> bool:
            return await jobs.counts() == {"succeeded": 1}

        await eventually(done, 30, g.command.stderr)


def test_f4_a_stall_of_most_processes_at_once_kills_nobody(trial: Trial) -> None:
    tables = {"[workers]": "replicas = 3", **with_kill_after(4)}
    with trial({"io": "blocked-a-while"}, tables, ready=3) as g:
        assert g.wait_for("correlated-stall")[0]["of"] == 3
        g.wait_for("recovered", 3)
        assert g.events("child-exit") == []
        assert len(g.events("stacks")) >= 3, "each one's stack is told"


def test_f4_hardly_any_processor_kills_nobody(trial: Trial) -> None:
    with trial(tables={"[workers]": "replicas = 4", **with_kill_after(0.5)}, ready=4) as g:
        everybody = [g.command.pid, *(process.pid for process in g.processes())]
        with throttled(everybody, percent=5):
            time.sleep(4)  # the length is what is tested: twice what kills a silent process
        wait_until(lambda: g.ask("/ready")[0] == 200, 30)
        assert g.events("kill") == g.events("child-exit") == []


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Stop processes by a signal."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def stand_still(g: Group, still: Callable[[list[int]], AbstractContextManager[None]], *, all_of_it: bool) -> None:
    """Hold the supervisor, or the whole group, for twice as long as kills a silent process."""
    pids = [event["pid"] for event in g.events("ready")]
    before, told = beats(g), len(g.events("standstill"))
    with still([g.command.pid, *(pids if all_of_it else [])]):
        time.sleep(4)  # the length is what is tested
    g.wait_for("standstill", told + 1)
    wait_until(lambda: all(now > before[pid] + 2 for pid, now in beats(g).items()), 30, "all beat again")
    assert set(beats(g)) == set(pids)
    assert g.events("kill") == g.events("child-exit") == []


def beats(g: Group) -> dict[int, int]:
    """How many beats each process has sent."""
    return {each["pid"]: each["beat"].get("seq", 0) for each in g.ask("/status")[1]["children"]}


def test_f5_a_supervisor_that_stood_still_kills_nobody(trial: Trial) -> None:
    with trial(tables={"[workers]": "replicas = 2", **with_kill_after(0.5)}, ready=2) as g:
        stand_still(g, stopped, all_of_it=False)
        stand_still(g, stopped, all_of_it=True)


def test_f5_a_group_that_was_frozen_kills_nobody(trial: Trial) -> None:
    with trial(tables={"[workers]": "replicas = 2", **with_kill_after(0.5)}, ready=2) as g:
        stand_still(g, frozen, all_of_it=True)
