"""The real worker, forked: it runs jobs as an exec'ed one does, and shares nothing with its siblings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import BaseModel

from taskqd import TaskQ, actor
from tests.support import Command, eventually, wait_until


class Look(BaseModel):
    pass


@actor
async def look(payload: Look) -> None:
    """Stands for the actor of that name in the group's own module."""


ACTORS = """\
import atexit, gc, json, os, random, sys, threading, uuid
from pydantic import BaseModel
from taskqd import actor, new_uuid

AT_IMPORT = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "pid": os.getpid()}
os.environ["SET_BY_IMPORT"] = "yes"
os.environ["TASKQ_LOG_LEVEL"] = "nonsense"
random.random(), uuid.uuid4(), new_uuid()
atexit.register(lambda: print("goodbye", os.getpid()))

class Look(BaseModel):
    pass

@actor
async def look(payload: Look) -> None:
    name = os.environ["TASKQD_NAME"] + "." + os.environ["TASKQD_INDEX"]
    seen = {
        "at_import": AT_IMPORT,
        "pid": os.getpid(),
        "random": [random.random() for _ in range(8)],
        "uuid4": [str(uuid.uuid4()) for _ in range(8)],
        "new_uuid": [str(new_uuid()) for _ in range(64)],
        "environment": dict(os.environ),
        "arguments": sys.argv[1:],
        "collects": gc.isenabled(),
        "frozen": gc.get_freeze_count() > 0,
    }
    with open(name + ".new", "w") as file:
        json.dump(seen, file)
    os.rename(name + ".new", name + ".json")

registry = [look]
"""
FILE = """\
actors = "group_actors:registry"
[supervisor]
runtime_dir = "run"
[scheduler]
enabled = false
[[workers]]
name = "a"
queues = ["default"]
[[workers]]
name = "b"
queues = ["other"]
preload = "auto"
"""


@pytest.fixture
def running(start: Callable[..., Command], short_dir: Path, child_env: dict[str, str]) -> Callable[..., Command]:
    def run(command: str = "run", *, actors: str = ACTORS, file: str = FILE, wait: bool = True) -> Command:
        (short_dir / "group.toml").write_text(file)
        (short_dir / "group_actors.py").write_text(actors)
        started = start(command, "group.toml", env=child_env | {"OWN": "kept"})
        if wait:
            wait_until(lambda: len(events(started, "ready")) == 2, 60, "two ready workers")
        return started

    return run


def events(command: Command, name: str) -> list[dict[str, Any]]:
    lines = [line for line in command.stderr.splitlines() if line.startswith("{")]
    return [event for event in map(json.loads, lines) if event["event"] == name]


async def look_into_both(dsn: str, schema: str, directory: Path) -> list[dict[str, Any]]:
    async with TaskQ(dsn=dsn, schema=schema) as queue:
        for name in ("default", "other"):
            await queue.enqueue(look, Look(), queue=name)
    files = [directory / "a.0.json", directory / "b.0.json"]
    await eventually(lambda: all(file.exists() for file in files), 30)
    return [json.loads(file.read_text()) for file in files]


async def test_forked_workers_run_jobs_and_repeat_no_random_number(
    running: Callable[..., Command], short_dir: Path, dsn: str, schema: str
) -> None:
    command = running(file=FILE.replace("[scheduler]", 'preload = "require"\n[scheduler]'))
    pids = {event["child"]: event["pid"] for event in events(command, "spawn")}
    (zygote,) = events(command, "preload-ready")
    a, b = await look_into_both(dsn, schema, short_dir)
    for name, seen in (("a", a), ("b", b)):
        assert seen["pid"] == pids[f"{name}.0"]
        assert seen["at_import"] == {"OMP_NUM_THREADS": "1", "pid": zygote["pid"]}, "imported once, in the zygote"
        assert seen["arguments"] == ["worker", "--actors", "group_actors:registry"]
        assert seen["collects"]
        assert seen["frozen"]
    for kind in ("random", "uuid4", "new_uuid"):
        assert len({*a[kind], *b[kind]}) == len(a[kind]) + len(b[kind]), f"{kind} repeats"
    command.process.terminate()
    assert command.wait() == 0, command.stderr
    goodbyes = sorted(int(line.split()[1]) for line in command.stdout.splitlines() if line.startswith("goodbye"))
    assert goodbyes == sorted(seen["pid"] for seen in (a, b))
    assert command.children() == []


async def test_the_environment_of_a_forked_worker_is_that_of_an_execed_one(
    running: Callable[..., Command], short_dir: Path, dsn: str, schema: str
) -> None:
    command = running(file=FILE.replace('preload = "auto"', 'preload = "off"'))
    assert len(events(command, "preload-ready")) == 1
    forked, execed = await look_into_both(dsn, schema, short_dir)
    assert forked["at_import"]["pid"] != forked["pid"]
    assert execed["at_import"] == {"OMP_NUM_THREADS": None, "pid": execed["pid"]}
    own = ("TASKQD_NAME", "TASKQD_CONTROL_FD", "TASKQD_SETTINGS", "TASKQD_HEALTH_SOCKET")
    environments = [seen["environment"] for seen in (forked, execed)]
    for environment in environments:
        assert environment["OWN"] == environment["SET_BY_IMPORT"].replace("yes", "kept")
        assert environment["TASKQ_LOG_LEVEL"] == "nonsense", "set by the import, after the settings were read"
        for name in own:
            assert environment.pop(name)
    assert environments[0] == environments[1]
    assert [seen["arguments"] for seen in (forked, execed)] == [["worker", "--actors", "group_actors:registry"]] * 2
    command.process.terminate()
    assert command.wait() == 0, command.stderr


async def test_each_environment_has_a_zygote_that_imports_the_actors_in_it(
    running: Callable[..., Command], short_dir: Path, dsn: str, schema: str
) -> None:
    (short_dir / "b.env").write_text("SECRET=hunter2\n")
    actors = ACTORS.replace(
        '"pid": os.getpid()}', '"pid": os.getpid(), "REGION": os.environ["REGION"], "SECRET": os.environ.get("SECRET")}'
    )
    own = '\nenv_file = "b.env"\n[workers.env]\nREGION = "there"\nTASKQ_MAX_CONCURRENCY = "3"'
    file = FILE.replace("[scheduler]", 'preload = "require"\n[scheduler]').replace('\npreload = "auto"', own)
    assert own in file
    file = file.replace('queues = ["default"]', 'queues = ["default"]\n[workers.env]\nREGION = "here"')
    command = running(actors=actors, file=file)
    zygotes = {tuple(event["workers"]): event["pid"] for event in events(command, "preload-ready")}
    assert set(zygotes) == {("a",), ("b",)}
    a, b = await look_into_both(dsn, schema, short_dir)
    common = {"OMP_NUM_THREADS": "1"}
    assert a["at_import"] == {**common, "pid": zygotes["a",], "REGION": "here", "SECRET": None}
    assert b["at_import"] == {**common, "pid": zygotes["b",], "REGION": "there", "SECRET": "hunter2"}
    assert (a["environment"]["REGION"], b["environment"]["REGION"]) == ("here", "there")
    assert b["environment"]["TASKQ_MAX_CONCURRENCY"] == "3"
    assert "SECRET" not in a["environment"]
    with open(f"/proc/{zygotes['b',]}/cmdline") as line:
        assert "hunter2" not in line.read()
    assert "hunter2" not in command.stderr
    command.process.terminate()
    assert command.wait() == 0, command.stderr


def test_actors_that_import_only_in_the_environment_of_their_workers(running: Callable[..., Command]) -> None:
    actors = ACTORS + 'os.environ["NEEDED"]\n'
    command = running("check", actors=actors, wait=False)
    assert command.wait() == 78
    assert "'group_actors:registry' does not import: KeyError: 'NEEDED'" in command.stderr
    needed = '[workers.env]\nNEEDED = "yes"\n'
    file = FILE.replace('[[workers]]\nname = "b"', f'{needed}[[workers]]\nname = "b"') + needed
    command = running("check", actors=actors, file=file, wait=False)
    assert command.wait() == 0, command.stderr
    assert "forked from one process that has imported the actors: a, b" in command.stdout
    file = file.removesuffix('NEEDED = "yes"\n') + 'NEEDED = ""\n'
    broken = actors + "assert os.environ['NEEDED']\n"
    command = running("check", actors=broken, file=file, wait=False)
    assert command.wait() == 78
    assert "does not import: AssertionError: " in command.stderr
    assert command.stderr.count("Traceback") == 1
    assert "(in the environment of b)" in command.stderr
    command = running("check", actors=actors + "os.environ['NEEDED'] or os._exit(5)\n", file=file, wait=False)
    assert command.wait() == 78
    assert "got no answer while importing group_actors:registry: exit code 5" in command.stderr


THREADED = ACTORS.replace(
    "registry =",
    "threading.Thread(target=lambda: threading.Event().wait(), name='exporter', daemon=True).start()\n\nregistry =",
)
UNSAFE = "a fork is not safe after the import of group_actors:registry: thread 'exporter'"


def test_actors_that_start_a_thread_are_execed_and_the_thread_is_named(running: Callable[..., Command]) -> None:
    command = running(actors=THREADED)
    (unfit,) = events(command, "preload-unfit")
    assert unfit["why"] == UNSAFE
    command.process.terminate()
    assert command.wait() == 0, command.stderr


def test_check_says_that_workers_cannot_be_forked(running: Callable[..., Command]) -> None:
    command = running("check", actors=THREADED, wait=False)
    assert command.wait() == 0, command.stderr
    assert f"warning: workers will be started by exec: {UNSAFE}" in command.stderr
    command = running("check", wait=False)
    assert command.wait() == 0, command.stderr
    assert "  forked from one process that has imported the actors: a, b\n" in command.stdout
    assert command.stderr == ""


@pytest.mark.parametrize("verb", ["run", "check"])
def test_actors_that_start_a_thread_are_refused_where_forking_is_required(
    running: Callable[..., Command], verb: str
) -> None:
    file = FILE.replace('preload = "auto"', 'preload = "require"')
    command = running(verb, actors=THREADED, file=file, wait=False)
    assert command.wait() == 78
    assert f'error: preload = "require" (b): {UNSAFE}' in command.stderr
    assert command.children() == []


def test_actors_that_do_not_import_are_shown_once(running: Callable[..., Command]) -> None:
    command = running(actors="import gone_for_good\n", wait=False)
    assert command.wait() == 78
    assert command.stderr.count("Traceback") == 1
    assert command.stderr.count("No module named 'gone_for_good'") == 2, "in the traceback and in the error"
    assert not events(command, "preload-unfit")


async def test_a_restart_forks_from_a_zygote_that_has_imported_the_code_of_now(
    running: Callable[..., Command],
    start: Callable[..., Command],
    short_dir: Path,
    child_env: dict[str, str],
    dsn: str,
    schema: str,
) -> None:
    command = running(file=FILE.replace('runtime_dir = "run"', 'runtime_dir = "run"\nsettle_after = 0'))
    (short_dir / "group_actors.py").write_text(ACTORS.replace('"frozen"', '"changed": True, "frozen"'))
    restart = start("restart", "--socket", str(short_dir / "run" / "group.sock"), env=child_env)
    assert restart.wait(60) == 0, restart.stdout + restart.stderr
    first, second = events(command, "preload-ready")
    for seen in await look_into_both(dsn, schema, short_dir):
        assert seen["changed"]
        assert seen["at_import"]["pid"] == second["pid"] != first["pid"]
    assert not psutil.pid_exists(first["pid"])
    command.process.terminate()
    assert command.wait() == 0, command.stderr
