"""The time of a stop: the worst case that is printed is never exceeded."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd import TaskQ
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.stop_time import describe_stop
from taskqd.supervisor.stopping import LEAST_GRACE, Graces
from tests.apps.basic import Work, blocks, leaves_a_thread, stubborn
from tests.support import Command, eventually, wait_until

GROUP = """\
actors = "tests.apps.basic:actors"
[supervisor]
runtime_dir = "run"
termination_grace_period = 10
[[workers]]
name = "io"
replicas = 2
"""


@given(
    st.floats(LEAST_GRACE, 86400),
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000)), min_size=1, max_size=4),
)
def test_every_step_lies_in_the_one_before_and_all_of_them_in_the_grace(
    grace: float, graces: list[tuple[float, float]]
) -> None:
    children = [ChildSpec(f"w{n}", "worker", (), graces=Graces(*each)) for n, each in enumerate(graces)]
    found = describe_stop(grace, children)
    for process in found["processes"]:
        assert min(process["drain"], process["cancel"], process["force"]) >= 0
        steps = process["drain"] + process["cancel"] + process["force"]
        assert process["ends_by"] <= steps + 1e-6
        assert steps < process["killed_at"] < found["worst_case"] < grace
    assert found["worst_case"] + found["left_of_grace"] == pytest.approx(grace)


def test_the_default_model(start: Callable[..., Command], short_dir: Path) -> None:
    (short_dir / "group.toml").write_text(GROUP.replace("termination_grace_period = 10\n", ""))
    command = start("budget", "group.toml", "--time", "--json")
    assert command.wait(60) == 0
    found = json.loads(command.stdout)
    stop = found["stop"]
    assert (stop["platform_grace"], stop["worst_case"]) == (85, 83)
    assert stop["processes"][1] == {
        "name": "io",
        "replicas": 2,
        "drain": 30,
        "cancel": 10,
        "force": 40,
        "ends_by": 43,
        "killed_at": 80.25,
    }
    assert "stubborn" in {each["actor"] for each in found["interrupted"]}
    table = start("budget", "group.toml", "--time")
    assert table.wait(60) == 0
    assert "stop: 83 s at worst, of the 85 s that the platform grants" in table.stdout
    assert "io                2     30      10     40       43      80.25" in table.stdout


@pytest.mark.parametrize("actor", [stubborn, blocks, leaves_a_thread], ids=lambda ref: ref.name)
async def test_a_group_of_stubborn_actors_is_gone_by_then(
    start: Callable[..., Command], short_dir: Path, child_env: dict[str, str], dsn: str, schema: str, actor: object
) -> None:
    log = short_dir / "log"
    env = {**child_env, "EXECUTION_LOG": str(log), "TASKQ_WATCHDOG_ENABLED": "false"}
    (short_dir / "group.toml").write_text(GROUP)
    budget = start("budget", "group.toml", "--time", "--json", env=env)
    assert budget.wait(60) == 0
    worst = json.loads(budget.stdout)["stop"]["worst_case"]
    command = start("run", "group.toml", env=env)
    wait_until(lambda: command.stderr.count('"event": "ready"') == 3, 60)
    async with TaskQ(dsn=dsn, schema=schema) as queue:
        for _ in range(6):
            await queue.enqueue(actor, Work(seconds=1000))  # type: ignore[arg-type]
    await eventually(lambda: log.exists() and log.read_text(), 30)
    began = time.monotonic()
    command.signal(signal.SIGTERM)
    assert command.wait(60) in (0, 3), command.stderr
    assert time.monotonic() - began < worst
    assert not command.children()
