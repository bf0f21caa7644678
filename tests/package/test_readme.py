"""What README and quick start tell people to type works as it stands, with real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY, child_environment

README = REPOSITORY / "README.md"
QUICKSTART = REPOSITORY / "docs" / "quickstart.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.\w+)(?:, continued)?\n")
_END_GROUP = "\nkill %1\nwait %1\n"
_LEAVE_NOTHING = "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"

PRINT_REPORT = """
import asyncio
import os

import asyncpg

REPORT = "select result from %s.jobs where actor = 'day.report' and status = 'succeeded'"


async def main():
    connection = await asyncpg.connect(os.environ["TASKQ_PG_DSN"])
    async with asyncio.timeout(60):
        while (result := await connection.fetchval(REPORT % os.environ["TASKQ_SCHEMA_NAME"])) is None:
            await asyncio.sleep(0.1)
    print(result)


asyncio.run(main())
"""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of every code block of a page."""
    return _BLOCK.findall(page.read_text())


def write_files(page: Path, directory: Path) -> None:
    """Write every block that begins with a file's name into that file; a later block of a file goes on with it."""
    for _, text in blocks(page):
        if named := _FILE.match(text):
            with (directory / named[1]).open("a") as file:
                file.write(text)


def commands_of(page: Path, containing: str) -> str:
    """Return the one block of commands that contains a text."""
    (found,) = [text for language, text in blocks(page) if language == "sh" and containing in text]
    return found


def run(commands: str, directory: Path, **environment: str) -> str:
    """Run commands as a person would type them and return what they print."""
    (directory / "run").mkdir(mode=0o700, exist_ok=True)
    env = child_environment(**environment, RUNTIME_DIRECTORY=str(directory / "run"))
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", _LEAVE_NOTHING + commands],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = shell.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)  # the group's processes die with their supervisor
        raise
    assert shell.returncode == 0, f"{commands}\nended {shell.returncode}\n{output}\n{errors}"
    return output


def test_the_example_of_the_readme_works(dsn: str, schema: str, short_dir: Path) -> None:
    write_files(README, short_dir)
    output = run(
        commands_of(README, "python enqueue.py") + _END_GROUP, short_dir, TASKQ_PG_DSN=dsn, TASKQ_SCHEMA_NAME=schema
    )
    assert output.splitlines()[-1] == "Hello, world!"


def test_the_example_is_twenty_lines() -> None:
    lines = [line for _, text in blocks(README) if _FILE.match(text) for line in text.splitlines() if line.strip()]
    assert len(lines) <= 25  # three of them name the files


@pytest.mark.parametrize("page", [README, *(REPOSITORY / "docs").rglob("*.md")], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_commands_of_the_readme_exist() -> None:
    for name in re.findall(r"scripts/(\w+)", README.read_text()):
        assert shutil.which(str(REPOSITORY / "scripts" / name)), name


def test_the_quick_start_works(dsn: str, schema: str, short_dir: Path) -> None:
    write_files(QUICKSTART, short_dir)
    commands = commands_of(QUICKSTART, "taskqd check") + commands_of(QUICKSTART, "python orders.py")
    look = commands_of(QUICKSTART, "taskqd status")
    (short_dir / "report.py").write_text(PRINT_REPORT)
    environment = {"TASKQ_PG_DSN": dsn, "TASKQ_SCHEMA_NAME": schema}
    output = run(f"{commands}{look}python report.py{_END_GROUP}", short_dir, **environment)
    (expected,) = [text for language, text in blocks(QUICKSTART) if language == "text"]
    assert expected in output
    assert "ok: workgroup 'workgroup', 4 processes" in output
    assert "verdict: fits" in output
    assert "ready: 4/4 ready" in output
    assert output.splitlines()[-1] == '"3 of 3 orders shipped"'


def test_the_embedded_server_of_the_quick_start_starts_and_stops(short_dir: Path) -> None:
    start, stop = commands_of(QUICKSTART, "export TASKQ_PG_DSN"), commands_of(QUICKSTART, "cleanup()")
    output = run(f"{start}taskqd migrate status\n{stop}", short_dir)
    assert "schema taskq is at migration" in output
    assert not (short_dir / "pgdata" / "postmaster.pid").exists()
