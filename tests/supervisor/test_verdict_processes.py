"""Verdicts on real processes: stopped, blocked, holding the interpreter lock, cut off, wedged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.supervisor.conftest import Group, StartGroup
from tests.support import Command, wait_until

QUICK = "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0\nstall_after = 1.5"


def with_kill_after(seconds: float) -> dict[str, str]:
    return {"supervisor": f"{QUICK}\nhang_kill_after = {seconds}"}


def child(group: Group, name: str = "io.0") -> dict[str, object]:
    return next(each for each in group.ask("/status")[1]["children"] if each["name"] == name)


def verdicts(group: Group) -> list[str]:
    return [event["verdict"].partition(":")[0] for event in group.events("verdict")]


def test_a_database_that_is_away_is_a_verdict_and_no_reason_to_restart(group: StartGroup) -> None:
    g = group(modes={"io": "database-away"}, tables=with_kill_after(1))
    g.wait_for("verdict")
    assert verdicts(g) == ["environment"]
    wait_until(lambda: child(g)["verdict"] == "environment", 20)
    assert g.ask("/live")[0] == 200
    assert g.ask("/ready")[0] == 503
    assert g.events("child-exit") == []
    assert g.stop() == 0, g.command.stderr


WEDGED_ACTORS = """\
import asyncio, os
from pydantic import BaseModel
from taskqd import actor
from taskqd.worker.producer import Producer

class Nothing(BaseModel):
    pass

@actor
async def nothing(payload: Nothing) -> None:
    pass

claim = Producer._claim

async def stuck(self, room):
    if not os.path.exists("wedged"):
        open("wedged", "w").close()
        await asyncio.sleep(1000)
    return await claim(self, room)

Producer._claim = stuck
registry = [nothing]
"""
WEDGED_FILE = """\
actors = "group_actors:registry"
[supervisor]
runtime_dir = "run"
settle_after = 0
[scheduler]
enabled = false
[defaults]
notify_enabled = false
poll_interval = 0.2
[[workers]]
name = "io"
"""
RUN = """\
import sys
import taskqd.supervisor.verdict as verdict
verdict.WEDGED_AFTER = 3.0
from taskqd.cli.main import main
sys.exit(main(["run", "group.toml"]))
"""


@pytest.fixture
def wedged_group(short_dir: Path, child_env: dict[str, str]) -> Iterator[Command]:
    (short_dir / "group.toml").write_text(WEDGED_FILE)
    (short_dir / "group_actors.py").write_text(WEDGED_ACTORS)
    command = Command([sys.executable, "-P", "-c", RUN], short_dir, child_env)
    yield command
    command.end()


def test_a_real_worker_that_beats_but_looks_for_no_work_is_drained_and_replaced(wedged_group: Command) -> None:
    def events(name: str) -> list[dict[str, object]]:
        lines = [line for line in wedged_group.stderr.splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    wait_until(lambda: events("recycle-done"), 60, "its successor is ready and it has gone")
    (recycle,) = events("recycle")
    assert str(recycle["why"]).startswith("wedged: ")
    (end,) = events("child-exit")
    assert (end["why"], end["code"]) == ("stopped", 75), "try again: recycle"
    assert events("kill") == []
    wedged_group.process.terminate()
    assert wedged_group.wait() == 0, wedged_group.stderr
