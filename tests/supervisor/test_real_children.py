"""A supervisor with the real worker and the real scheduler."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import asyncpg
import psutil
import pytest

from taskqd.health.probe import main as probe
from tests.supervisor.conftest import ACTORS
from tests.support import Command, wait_until

FILE = """\
actors = "group_actors:registry"
[supervisor]
runtime_dir = "run"
[[workers]]
name = "io"
"""


@pytest.fixture
def running(start: Callable[..., Command], short_dir: Path, child_env: dict[str, str]) -> Callable[..., Command]:
    def run(file: str = FILE) -> Command:
        (short_dir / "group.toml").write_text(file)
        (short_dir / "group_actors.py").write_text(ACTORS)
        command = start("run", "group.toml", env=child_env)
        wait_until(lambda: len(ready(command)) == 2, 60, command.stderr)
        return command

    return run


def ready(command: Command) -> list[dict[str, object]]:
    lines = [line for line in command.stderr.splitlines() if '"event": "ready"' in line]
    return [json.loads(line) for line in lines]


def test_it_comes_up_and_stops_clean(running: Callable[..., Command], short_dir: Path) -> None:
    command = running()
    for name in ("group.sock", "group/io.0.sock", "group/scheduler.0.sock"):
        for question in ("live", "ready"):
            assert probe([question, "--socket", str(short_dir / "run" / name)]) == 0
    assert probe(["startup", "--socket", str(short_dir / "run" / "group.sock")]) == 0
    command.process.terminate()
    assert command.wait() == 0, command.stderr
    assert list((short_dir / "run").rglob("*")) == []
    assert command.children() == []


@pytest.mark.parametrize("victim", ["scheduler", "io"])
def test_whoever_is_killed_comes_back(running: Callable[..., Command], victim: str) -> None:
    command = running()
    (first,) = [event for event in ready(command) if event["child"] == f"{victim}.0"]
    os.kill(int(str(first["pid"])), signal.SIGKILL)
    wait_until(lambda: len(ready(command)) == 3, 60)
    assert ready(command)[-1]["child"] == f"{victim}.0"
    command.process.terminate()
    assert command.wait() == 0, command.stderr


async def test_the_budget_holds_what_a_group_really_opens(
    running: Callable[..., Command], conn: asyncpg.Connection, schema: str, start: Callable[..., Command]
) -> None:
    command = running()
    budget = start("budget", "group.toml", "--json", env=psutil.Process(command.pid).environ())
    assert budget.wait() == 0, budget.stderr
    required = json.loads(budget.stdout)["required"]
    count = "select count(*) from pg_stat_activity where starts_with(application_name, $1)"
    held = await conn.fetchval(count, f"taskqd/{schema}/group/")
    assert 0 < held <= required
    assert json.loads(budget.stdout)["limits"]["others"] < held + 20
    command.process.terminate()
    assert command.wait() == 0
