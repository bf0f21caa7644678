"""Every argument of every command is given nonsense: one message and an exit code of ours, and nothing is stored."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import click
import pytest

from taskqd import TaskQ
from taskqd.cli.app import DISPATCHED, app
from taskqd.cli.main import main
from tests.client.actors import double
from tests.jobs import JobTable
from tests.supervisor.test_bad_input import GROUP
from tests.support import child_environment, taskqd_argv

NONSENSE = ["", " ", "NaN", "-1", "1" + "0" * 30, "\udcff", "x" * 5000, "a\nb", "none", "0"]
OF_SLOW = ["", "\udcff", "1" + "0" * 30, "a\nb"]
SLOW = ("budget", "check", "init k8s", "init systemd")
"""Commands that ask another process."""
CODES = {0, 1, 2, 4, 5, 69, 75, 78}

GIVEN: dict[str, list[str]] = {
    "actor set": ["succeed"],
    "budget": ["group.toml", "--offline"],
    "check": ["group.toml"],
    "dump": ["io.0"],
    "explain exit": ["70"],
    "migrate up": ["--max-steps", "1"],
    "queue pause": ["default"],
    "queue resume": ["default"],
    "queue set": ["default", "--create"],
    "scale": ["io", "2"],
    "schedule backfill": ["nightly", "--from", "2024-01-01", "--dry-run"],
    "schedule pause": ["nightly"],
    "schedule resume": ["nightly"],
    "schedule retire": ["nightly", "--yes"],
    "schedule run-now": ["nightly"],
    "schedule show": ["nightly"],
    "schedule preview": ["--every", "60s"],
    "target bind": ["production"],
    "target rotate": ["production", "--reason", "a clone", "--from", "018f0000-0000-7000-8000-000000000000"],
    "worker": ["--actors", "no_such_module:registry", "--max-runtime", "1s"],
}
"""What else a command needs, or is best given."""
CREATES = ("migrate up", "schema")
"""Most of this would be the name of a new schema."""


def _commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path}{name} ")
        elif command is not None:
            yield f"{path}{name}", command


COMMANDS = dict(_commands(app))


def _argv(name: str, command: click.Command, parameter: click.Parameter, value: str) -> list[str]:
    """The command line that gives ``parameter`` this value, and the others what they need."""
    given = GIVEN.get(name, [])
    if isinstance(parameter, click.Option):
        kept = [*given]
        for flag in parameter.opts:
            while flag in kept:
                del kept[kept.index(flag) : kept.index(flag) + 2]
        return [*name.split(), *kept, f"{parameter.opts[-1]}={value}"]
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    place = arguments.index(parameter)
    plain = given[: len(arguments)]
    plain = [*plain[:place], value, *plain[place + 1 :]] if place < len(plain) else [*plain, value]
    return [*name.split(), *given[len(arguments) :], "--", *plain]


def _takes_text(parameter: click.Parameter) -> bool:
    return not (isinstance(parameter, click.Option) and parameter.is_flag)


@pytest.fixture
async def stocked(schema: str, dsn: str, conn: asyncpg.Connection) -> str:
    """A schema with an actor and a schedule that commands can name."""
    await JobTable(conn, schema).store_actor()
    async with TaskQ(dsn=dsn, schema=schema) as tq:
        await tq.create_schedule("0 3 * * *", double, name="nightly", enabled=False)
    return schema


@pytest.fixture
def place(stocked: str, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own with a workgroup file, and the environment of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKQ_PG_DSN", dsn)
    monkeypatch.setenv("TASKQ_SCHEMA_NAME", stocked)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    (tmp_path / "group.toml").write_text(GROUP)
    return tmp_path


def _run(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command; return what is wrong with how it ended, ``""`` when nothing is."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    except BaseException as error:
        return f"{argv!a}: {type(error).__name__}: {error}"
    told = capfd.readouterr().err
    messages = told.count("error: ") + told.count("Error: ") or told.startswith("usage: ")
    if code not in CODES or "Traceback" in told or messages > 1 or (code in (2, 78) and messages == 0):
        return f"{ascii(argv)[:120]}: exit {code}: {told[-300:]}"
    return ""


TEXT = [(name, command) for name, command in COMMANDS.items() if any(map(_takes_text, command.params))]


@pytest.mark.parametrize(("name", "command"), TEXT, ids=[name for name, _ in TEXT])
def test_a_command(name: str, command: click.Command, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for parameter in filter(_takes_text, command.params):
        if (name, parameter.name) == CREATES:
            continue
        for value in OF_SLOW if name in SLOW else NONSENSE:
            wrong.append(_run(_argv(name, command, parameter, value), capfd))
    assert not any(wrong), "\n" + "\n".join(filter(None, wrong))


@pytest.mark.parametrize("value", ["", "no such file", "\udcff", "x" * 5000, "a\nb"], ids=ascii)
def test_run(value: str, place: Path) -> None:
    """In a process of its own, as it takes the signals of this one."""
    done = subprocess.run(
        taskqd_argv("run", value), cwd=place, env=child_environment(), capture_output=True, timeout=60, check=False
    )
    assert done.returncode in (2, 78)
    assert done.stderr.count(b"error: ") == 1
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("name", [name for name in DISPATCHED if name != "run"])
def test_a_command_that_comes_at_once(name: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = []
    for value in NONSENSE:
        for argv in ([name, value], [name, "--socket", value], [name, value, value]):
            wrong.append(_run(argv, capfd))
    assert not any(wrong), "\n" + "\n".join(filter(None, wrong))
