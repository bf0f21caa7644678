"""Builds releases, and installs each into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support import child_environment

ACTORS = """
from pydantic import BaseModel

from taskqd import actor


class Numbers(BaseModel):
    values: list[int]


class Sum(BaseModel):
    total: int


@actor
async def add(payload: Numbers) -> Sum:
    return Sum(total=sum(payload.values))


actors = [add]
"""

ENQUEUE = """
import asyncio
import os

from jobs import Numbers, Sum, add

from taskqd import TaskQ


async def main():
    async with TaskQ(dsn=os.environ["TASKQ_PG_DSN"], schema=os.environ["TASKQ_SCHEMA_NAME"]) as taskq:
        handle = await taskq.enqueue(add, Numbers(values=[1, 2, 39]))
        print((await handle.wait(timeout=60)).total)


asyncio.run(main())
"""


@dataclass(frozen=True)
class Built:
    """The two files of a release."""

    wheel: Path
    sdist: Path


def build(source: Path, directory: Path) -> Built:
    """Build the sdist of a tree, and the wheel from the sdist."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(source)])
    return Built(next(directory.glob("*.whl")), next(directory.glob("*.tar.gz")))


def install(wheel: Path, directory: Path) -> Path:
    """Return the interpreter of a new environment that holds the wheel and what it depends on, nothing else."""
    run([sys.executable, "-m", "venv", str(directory)])
    python = directory / "bin" / "python"
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
    return python


def run(argv: list[str], cwd: Path | None = None, **environment: str) -> str:
    """Run a command that sees nothing of this tree, to its good end; return what it printed."""
    env = child_environment(**environment)
    env.pop("PYTHONPATH")
    done = subprocess.run(
        argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{argv} ended {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
