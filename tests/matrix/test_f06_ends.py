"""F6: a process ends by itself, before it was ever ready or after: what it says decides whether and when it is started
again, whether the group goes on, and with which code it ends. Its siblings notice nothing.
"""

from __future__ import annotations

import os
import signal
from datetime import datetime
from typing import Any

import pytest

from tests.matrix.conftest import Trial
from tests.supervisor.asking import pids
from tests.supervisor.conftest import Group
from tests.support import wait_until

SOON = {"supervisor": "backoff_initial = 0.05"}


def exits(g: Group) -> list[dict[str, Any]]:
    return g.events("child-exit")


@pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])
def test_f6_what_crashes_at_its_import_ends_the_group_after_three_attempts(trial: Trial, preload: str) -> None:
    with trial({"io": "broken-import"}, SOON, ready=0, ends=70, preload=preload) as g:
        g.command.wait(60)
        assert len(g.events("spawn")) == 3
        assert "no module named 'gone'" in exits(g)[0]["left"]
        assert not g.events("ready")


@pytest.mark.parametrize(("code", "expected", "attempts"), [(78, 78, 1), (69, 69, 3), (75, 75, 3), (0, 70, 3)])
def test_f6_the_group_ends_with_what_its_process_said(trial: Trial, code: int, expected: int, attempts: int) -> None:
    with trial({"io": f"exit-{code}"}, SOON, ready=0, ends=expected) as g:
        g.command.wait(60)
        assert len(g.events("spawn")) == attempts


def test_f6_a_part_that_refuses_at_the_start_stops_the_others_cleanly(trial: Trial) -> None:
    with trial({"cpu": "exit-78"}, {"[workers]": '[[workers]]\nname = "cpu"'}, ready=0, ends=78) as g:
        g.command.wait(60)
        assert {event["child"]: event["code"] for event in exits(g)}["cpu.0"] == 78


def test_f6_ends_after_it_was_ready(trial: Trial) -> None:
    """A crash, a clean end, no database, a wish to be started afresh, a refusal; and somebody is well."""
    modes = {
        "crash": "crash-ready",
        "clean": "ready-exit-0",
        "away": "ready-exit-69",
        "afresh": "ready-exit-75,once",
        "refuses": "ready-exit-78",
        "killed": "idle",
        "lingers": "crash-ready,lingers,once",
    }
    tables = {
        "[workers]": "\n".join(
            f'[[workers]]\nname = "{name}"\npreload = "{"require" if number % 2 else "off"}"'
            for number, name in enumerate(modes)
        ),
        "supervisor": "backoff_initial = 0.1\nmax_booting = 8",
    }
    # 3: the stop may meet one of those that crash again and again while it dies, and end it by its signal.
    with trial(modes, tables, ready=8, preload="auto", ends=(0, 3)) as g:
        well = pids(g)["io.0"]
        os.kill(pids(g)["killed.0"], signal.SIGKILL)
        for name in ("crash.0", "clean.0", "away.0"):
            wait_until(lambda name=name: len(story(g, name, "restart-scheduled")) >= 5, 60, name)  # type: ignore[misc]
            check_delays(g, name)
        wait_until(lambda: story(g, "killed.0", "child-exit"), 60)
        classes = {event["child"]: event["class"] for event in exits(g)}
        assert classes == {
            "crash.0": "crash",
            "clean.0": "clean",
            "away.0": "environment",
            "afresh.0": "recycle",
            "refuses.0": "permanent",
            "killed.0": "crash",
            "lingers.0": "crash",
        }
        wait_until(lambda: {event["child"] for event in g.events("degraded")} == {"crash.0", "clean.0"}, 30)
        (afresh,) = story(g, "afresh.0", "restart-scheduled")
        assert (afresh["delay_s"], afresh["unstable_runs"]) == (0, 0), "at once, and it is no failure"
        (killed,) = story(g, "killed.0", "restart-scheduled")
        assert killed["unstable_runs"] == 1
        assert {event["child"] for event in g.events("given-up")} == {"refuses.0"}
        assert len(story(g, "refuses.0", "spawn")) == 1
        for name in ("crash.0", "lingers.0"):  # however long it takes to end
            assert "RuntimeError: crashed after it was ready" in story(g, name, "child-exit")[0]["left"]
        assert g.events("stacks") == []
        assert pids(g)["io.0"] == well, "the sibling is not touched"
        assert g.ask("/ready")[0] == 503
        assert g.ask("/live")[0] == 200


def story(g: Group, name: str, event: str) -> list[dict[str, Any]]:
    return [each for each in g.events(event) if each.get("child") == name]


def check_delays(g: Group, name: str) -> None:
    """Each unstable run waits twice as long as the one before, give or take a fifth, and no less than it says."""
    for number, told in enumerate(story(g, name, "restart-scheduled")[:5]):
        assert told["unstable_runs"] == number + 1
        assert 0.8 * 0.1 * 2**number - 0.01 <= told["delay_s"] <= 1.2 * 0.1 * 2**number + 0.01
    ends, starts = story(g, name, "child-exit"), story(g, name, "spawn")[1:]
    for end, start, told in zip(ends, starts, story(g, name, "restart-scheduled"), strict=False):
        waited = datetime.fromisoformat(start["timestamp"]) - datetime.fromisoformat(end["timestamp"])
        assert told["delay_s"] - 0.01 <= waited.total_seconds() < told["delay_s"] * 10 + 5


def test_f6_a_burst_of_restarts_is_given_up(trial: Trial) -> None:
    """Each run is stable enough not to count as failed: the limit by rate is for these."""
    tables = {"supervisor": "stable_after = 0\nburst_limit = 5", "[workers]": '[[workers]]\nname = "well"'}
    with trial({"io": "crash-ready"}, tables, ready=7, preload="require") as g:
        (given_up,) = g.wait_for("given-up")
        assert given_up["why"] == "5 restarts within 60 s"
        assert len(story(g, "io.0", "spawn")) == 6
