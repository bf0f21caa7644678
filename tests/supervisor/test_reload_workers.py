"""Changing a group of real workers while it works: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd.health.probe import main as probe
from tests.fleet import QUICK
from tests.jobs import JobTable
from tests.support import REPOSITORY, Command, child_environment, eventually, taskqd_argv

FILE = """\
actors = "tests.apps.basic:actors"
[supervisor]
runtime_dir = "run"
settle_after = 0.2
[[workers]]
name = "io"
replicas = 2
max_concurrency = 4
[[workers]]
name = "idle"
queues = ["other"]
"""


CODE = """\
from pydantic import BaseModel
from taskqd import actor

class Nothing(BaseModel):
    pass

@actor(name="which")
async def which(payload: Nothing) -> None:
    with open("ran", "a") as file:
        file.write("old")

actors = [which]
"""


class Running:
    """A group of real processes, its file and the execution log of its actors."""

    def __init__(self, command: Command, directory: Path) -> None:
        self.command = command
        self.directory = directory
        self.socket = directory / "run" / "group.sock"

    def taskqd(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*taskqd_argv(*args), "--socket", str(self.socket)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*taskqd_argv(*args), "--socket", str(self.socket)],
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self) -> dict[str, dict[str, Any]]:
        done = self.taskqd("status", "--json")
        return {child["name"]: child for child in json.loads(done.stdout)["children"]}

    def executions(self) -> list[str]:
        """The job of every start of an actor."""
        try:
            text = (self.directory / "executions").read_text()
        except FileNotFoundError:
            return []
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        return [entry["job"] for line in lines if (entry := json.loads(line))["event"] == "start"]


@pytest.fixture
async def running(start: Callable[..., Command], short_dir: Path, child_env: dict[str, str]) -> AsyncIterator[Running]:
    (short_dir / "group.toml").write_text(FILE)
    log = str(short_dir / "executions")
    command = start("run", "group.toml", env=child_env | QUICK | {"EXECUTION_LOG": log})
    running = Running(command, short_dir)
    await eventually(lambda: command.stderr.count('"event": "ready"') == 4, 60, command.stderr)
    yield running
    command.process.terminate()
    assert command.wait() == 0, command.stderr
    assert [path for path in (short_dir / "run").rglob("*") if path.suffix == ".sock"] == []
    assert command.children() == []


@pytest.fixture
def jobs(conn: asyncpg.Connection, schema: str) -> JobTable:
    return JobTable(conn, schema)


async def outcomes(jobs: JobTable) -> dict[tuple[str, int], int]:
    rows = await jobs.conn.fetch(f'select status, attempt, count(*) from "{jobs.schema}".jobs group by 1, 2')
    return {(row["status"], row["attempt"]): row["count"] for row in rows}


async def test_under_load_every_job_runs_once_while_all_workers_are_replaced(running: Running, jobs: JobTable) -> None:
    before = running.status()
    ids = [str(job) for job in await jobs.plant(600, payload="""'{"seconds": 0.02}'""")]
    await eventually(lambda: len(running.executions()) > 20, 30)
    (running.directory / "group.toml").write_text(FILE.replace("max_concurrency = 4", "max_concurrency = 3"))
    reload = running.start("reload")
    while reload.poll() is None:  # until it is over there is always work
        await jobs.plant(20, payload="""'{"seconds": 0.02}'""")
        await asyncio.sleep(0.1)
    told, _ = reload.communicate()
    assert reload.returncode == 0, told
    after = running.status()
    assert {name for name in before if before[name]["pid"] != after[name]["pid"]} == {"io.0", "io.1"}
    assert [after[name]["beat"]["slots"] for name in ("io.0", "io.1")] == [3, 3]

    async def all_done() -> bool:
        return {status for status, _ in await outcomes(jobs)} == {"succeeded"}

    await eventually(all_done, 60)
    assert {attempt for _, attempt in await outcomes(jobs)} == {1}
    executions = running.executions()
    assert len(executions) == len(set(executions)) == sum((await outcomes(jobs)).values())
    assert set(ids) <= set(executions)
    for name in ("io.0", "io.1", "idle.0", "scheduler.0"):
        usual = running.directory / "run" / "group" / f"{name}.sock"
        assert probe(["ready", "--socket", str(usual)]) == 0, "where its predecessor answered"


async def test_a_restart_runs_new_code(
    start: Callable[..., Command], short_dir: Path, child_env: dict[str, str], jobs: JobTable
) -> None:
    file = 'actors = "which_code:actors"\n[supervisor]\nruntime_dir = "run"\nsettle_after = 0\npreload = "off"'
    (short_dir / "which_code.py").write_text(CODE)
    (short_dir / "group.toml").write_text(f'{file}\n[scheduler]\nenabled = false\n[[workers]]\nname = "io"\n')
    command = start("run", "group.toml", env=child_env | QUICK | {"PYTHONPATH": f"{short_dir}:{REPOSITORY}"})
    running = Running(command, short_dir)
    await eventually(lambda: '"event": "ready"' in command.stderr, 60, command.stderr)
    for code in ("old", "renewed"):
        if code == "renewed":
            (short_dir / "which_code.py").write_text(CODE.replace('"old"', '"renewed"'))
            done = running.taskqd("restart")
            assert done.returncode == 0, done.stderr
        await jobs.plant(1, actor="'which'")
        await eventually(lambda: (short_dir / "ran").exists() and (short_dir / "ran").read_text().endswith(code), 30)  # noqa: B023
    assert running.status()["io.0"]["made_by"] == "exec"
    command.process.terminate()
    assert command.wait() == 0, command.stderr


async def test_quiet_stops_claims_and_resume_starts_them_again(running: Running, jobs: JobTable) -> None:
    assert running.taskqd("quiet").returncode == 0
    assert running.taskqd("restart", "io.0").returncode == 0, "its successor is quiet from its first moment"
    await jobs.plant(10)
    seen = running.status()["io.0"]["beat"]["seq"]
    await eventually(lambda: running.status()["io.0"]["beat"]["seq"] >= seen + 3, 30)
    assert running.executions() == []
    assert running.taskqd("resume").returncode == 0
    await eventually(lambda: len(running.executions()) == 10, 30)


async def test_drained_workers_finish_what_they_run_and_resumed_ones_take_the_rest(
    running: Running, jobs: JobTable
) -> None:
    await jobs.plant(200, payload="""'{"seconds": 0.05}'""")
    await eventually(lambda: len(running.executions()) > 10, 30)
    done = running.taskqd("drain", "io")
    assert done.returncode == 0, done.stderr
    ran = len(running.executions())
    assert await outcomes(jobs) == {("succeeded", 1): ran, ("pending", 0): 200 - ran}
    assert running.taskqd("resume", "io").returncode == 0
    await eventually(lambda: len(running.executions()) == 200, 30)
    assert len(set(running.executions())) == 200
