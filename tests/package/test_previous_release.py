"""A rolling deploy: the last release runs on the schema of this one, and this one before its last migrations.

It begins by itself with the first release: the newest tag ``v*`` before this commit is built and installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.package.released import ACTORS, build, install, run
from tests.postgres import Server
from tests.support import REPOSITORY, Command, child_environment, eventually, wait_until

pytestmark = pytest.mark.timeout(900)

SCHEMA = "rolling"
JOBS = 300
ENQUEUE = f"""
import asyncio
import os

from jobs import Numbers, add

from taskqd import EnqueueItem, TaskQ


async def main():
    async with TaskQ(dsn=os.environ["TASKQ_PG_DSN"], schema=os.environ["TASKQ_SCHEMA_NAME"]) as taskq:
        items = [EnqueueItem(actor_ref=add, payload=Numbers(values=[n, n])) for n in range({JOBS})]
        await taskq.enqueue_batch(items)
        handle = await taskq.enqueue(add, Numbers(values=[1, 2, 39]))
        print((await handle.wait(timeout=60)).total)


asyncio.run(main())
"""


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in this repository."""
    return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the release before this one."""
    if shutil.which("git") is None or git("rev-parse", "HEAD").returncode:
        pytest.skip("this is no clone of the repository: the release before this one cannot be built")
    found = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    if found.returncode:
        pytest.skip("there is no release before this commit: no tag v* (where the clone is shallow: git fetch --tags)")
    tree, archive = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("archive") / "tree.tar"
    archive.write_bytes(git("archive", found.stdout.decode().strip()).stdout)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    return install(build(tree, tmp_path_factory.mktemp("dist")).wheel, tmp_path_factory.mktemp("venv"))


@pytest.fixture
def environment(server: Server, tmp_path: Path) -> dict[str, str]:
    """What every process here is told."""
    for name, text in (("jobs.py", ACTORS), ("enqueue.py", ENQUEUE)):
        (tmp_path / name).write_text(text)
    return {"TASKQ_PG_DSN": server.dsn(), "TASKQ_SCHEMA_NAME": SCHEMA}


@pytest.fixture
def begin(environment: dict[str, str], tmp_path: Path, short_dir: Path) -> Iterator[Callable[..., Command]]:
    """Start a command of one of the releases, and wait until it is ready."""
    commands: list[Command] = []

    def command(python: Path, *arguments: str) -> Command:
        socket = short_dir / f"{len(commands)}.sock"
        env = child_environment(**environment, TASKQ_HEALTH_SOCKET_PATH=str(socket))
        env.pop("PYTHONPATH")
        commands.append(Command([str(python), "-m", "taskqd", *arguments], tmp_path, env))
        wait_until(lambda: "-ready" in commands[-1].stderr, 60, commands[-1].stderr)
        return commands[-1]

    yield command
    for one in commands:
        one.end()


async def test_both_releases_work_at_once_before_the_last_migrations_and_this_one_after_them(
    previous: Path, environment: dict[str, str], begin: Callable[..., Command], tmp_path: Path, conn: asyncpg.Connection
) -> None:
    this = Path(sys.executable)
    worker = ("worker", "--actors", "jobs:actors")

    def enqueue(python: Path) -> None:
        assert run([str(python), "enqueue.py"], tmp_path, **environment) == "42\n"

    try:
        run([str(this), "-m", "taskqd", "migrate", "up", "--phase", "pre"], tmp_path, **environment)
        old = [begin(previous, *worker), begin(previous, "scheduler", "run")]
        enqueue(previous)
        enqueue(this)
        new = [begin(this, *worker), begin(this, "scheduler", "run")]
        enqueue(previous)
        for process in old:
            process.process.terminate()
        assert [process.wait(60) for process in old] == [0, 0]
        enqueue(this)
        run([str(this), "-m", "taskqd", "migrate", "up"], tmp_path, **environment)
        enqueue(this)

        async def all_done() -> bool:
            return not await conn.fetchval(f"select count(*) from {SCHEMA}.jobs where status <> 'succeeded'")

        await eventually(all_done, 60)
        assert await conn.fetchval(f"select count(*) from {SCHEMA}.jobs") == 5 * (JOBS + 1)
        assert await conn.fetchval(f"select max(attempt) from {SCHEMA}.jobs") == 1
        for process in new:
            process.process.terminate()
        assert [process.wait(60) for process in new] == [0, 0]
    finally:
        await conn.execute(f"drop schema if exists {SCHEMA} cascade")
