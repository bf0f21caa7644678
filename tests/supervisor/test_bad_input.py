"""What a person may get wrong: one clear message each, the right exit code, and nothing left running."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.postgres import PASSWORD_ROLE, Server
from tests.supervisor.conftest import ACTORS
from tests.support import Command, child_environment, wait_until

Start = Callable[..., Command]
GROUP = """\
actors = "group_actors:registry"
[supervisor]
runtime_dir = "run"
[[workers]]
name = "io"
"""


@pytest.fixture
def write(short_dir: Path) -> Callable[..., None]:
    """Write the workgroup file, and the actors beside it."""

    def write(text: str = GROUP, actors: str = ACTORS) -> None:
        (short_dir / "group.toml").write_text(text)
        (short_dir / "group_actors.py").write_text(actors)

    return write


def refused(command: Command, code: int) -> str:
    """The one error message of a command that ends with ``code``."""
    assert command.wait(60) == code, command.stderr
    _, *messages = re.split(r"^error: ", command.stderr, flags=re.MULTILINE)
    assert len(messages) == 1, command.stderr
    assert "Traceback" not in messages[0]
    assert '"spawn"' not in command.stderr
    assert not command.children()
    return messages[0].strip()


@pytest.mark.parametrize("verb", ["run", "check", "budget"])
def test_a_missing_file(start: Start, verb: str) -> None:
    assert refused(start(verb, "group.toml"), 78) == "group.toml: no such file"


@pytest.mark.parametrize("verb", ["run", "check", "budget"])
def test_invalid_toml(start: Start, write: Callable[..., None], verb: str) -> None:
    write("a = 1\nb = = 2\n")
    message = refused(start(verb, "group.toml"), 78)
    assert message.startswith("group.toml:2: invalid TOML: ")


@pytest.mark.parametrize("verb", ["run", "check", "budget"])
def test_problems_of_the_file_and_of_settings_come_together(
    start: Start, write: Callable[..., None], verb: str
) -> None:
    write(GROUP + 'replcas = 2\nmax_concurrency = 0\nheartbeat_interval = "1h"\n[sheduler]\n')
    assert refused(start(verb, "group.toml"), 78).splitlines() == [
        "4 problems:",
        "  group.toml:6:workers.io.replcas: unknown key (did you mean 'replicas'?)",
        "  group.toml:9:sheduler: unknown table (did you mean 'scheduler'?)",
        "  group.toml:7:workers.io.max_concurrency = 0: must be a whole number from 1 to 10000",
        "  group.toml:8:workers.io.heartbeat_interval = '1h': must be a duration from 0.5 to 300 seconds",
    ]


def test_a_duplicate_name_and_no_workers(start: Start, write: Callable[..., None]) -> None:
    write(GROUP + '[[workers]]\nname = "io"\n')
    assert "workers.io.name: 'io' is taken by workers[0]" in refused(start("run", "group.toml"), 78)
    write('actors = "group_actors:registry"\n')
    assert "a workgroup needs at least one [[workers]] table" in refused(start("run", "group.toml"), 78)


def test_a_wrong_setting_in_the_environment_is_said_once(start: Start, write: Callable[..., None]) -> None:
    write(GROUP + '[[workers]]\nname = "cpu"\n')
    env = child_environment(TASKQ_MAX_CONCURENCY="3")
    message = refused(start("check", "group.toml", env=env), 78)
    assert message == "TASKQ_MAX_CONCURENCY (environment): unknown setting (did you mean 'TASKQ_MAX_CONCURRENCY'?)"


def test_a_password_in_the_file_is_refused_and_not_shown(start: Start, write: Callable[..., None]) -> None:
    write(GROUP + '[defaults]\npg_dsn = "postgresql://app:hunter2@db/app"\n')
    command = start("run", "group.toml")
    assert "group.toml:7:defaults.pg_dsn: holds a password" in refused(command, 78)
    assert "hunter2" not in command.stderr


def test_a_setting_is_named_as_it_is_written(start: Start, write: Callable[..., None]) -> None:
    write(GROUP + 'soft_stop_timeout = "soon"\n')
    message = refused(start("check", "group.toml"), 78)
    assert message.startswith("group.toml:6:workers.io.soft_stop_timeout = 'soon': must be a duration")


def test_graces_that_cannot_fit(start: Start, write: Callable[..., None]) -> None:
    write(GROUP.replace("[[workers]]", "termination_grace_period = 30\n[[workers]]") + "soft_stop_timeout = 30\n")
    assert "cancellation_grace_period 30 = 30 s must be less than" in refused(start("check", "group.toml"), 78)
    write(GROUP.replace("[[workers]]", "termination_grace_period = 30\n[[workers]]"))
    command = start("check", "group.toml")
    assert command.wait() == 0
    assert "io × 1: taskqd worker --actors group_actors:registry (17 s to finish, 5 s to clean up)" in command.stdout


def test_a_boot_timeout_below_the_wait_for_the_database(start: Start, write: Callable[..., None]) -> None:
    write(GROUP.replace("[[workers]]", "boot_timeout = 20\n[[workers]]"))
    assert "boot_timeout: 20 must be above database_boot_timeout = 30" in refused(start("check", "group.toml"), 78)


# -- actors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_registry_that_does_not_import(start: Start, write: Callable[..., None], verb: str) -> None:
    write(actors="print('noise')\nraise ZeroDivisionError('at import')\n")
    command = start(verb, "group.toml")
    message = refused(command, 78)
    assert "actors = 'group_actors:registry' does not import: ZeroDivisionError: at import" in message
    assert command.stderr.count("Traceback") == 1
    assert "noise" not in command.stdout, "what modules print does not mix with answers"


@pytest.mark.parametrize(
    ("actors", "expected"),
    [
        ("raise SystemExit(3)", "it ends the process (sys.exit(3))"),
        ("import os; os._exit(4)", "ended without an answer while importing group_actors:registry: exit code 4"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "ended without an answer while importing group_actors:registry: SIGSEGV",
        ),
        ("registry = []", "holds no actors"),
        ("registri = []", "has no attribute 'registry' (did you mean 'registri'?)"),
    ],
)
def test_a_registry_that_is_no_good(start: Start, write: Callable[..., None], actors: str, expected: str) -> None:
    write(actors=actors)
    assert expected in refused(start("check", "group.toml"), 78)


def test_threads_that_a_module_starts_do_not_hold_the_check_up(start: Start, write: Callable[..., None]) -> None:
    write(actors=ACTORS + "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n")
    assert start("check", "group.toml").wait(30) == 0


def test_actors_are_found_in_app_dir(start: Start, write: Callable[..., None], short_dir: Path) -> None:
    write('app_dir = "src"\n' + GROUP.replace("group_actors", "elsewhere"))
    message = refused(start("check", "group.toml"), 78)
    assert message == f"group.toml:1:app_dir: 'src': '{short_dir / 'src'}' is not a directory"
    (short_dir / "src").mkdir()
    assert "no module named 'elsewhere'" in refused(start("check", "group.toml"), 78)
    (short_dir / "src" / "elsewhere.py").write_text(ACTORS)
    assert start("check", "group.toml").wait() == 0


# -- the database ---------------------------------------------------------------------------------


def test_a_database_that_is_down_is_waited_for_and_then_69(start: Start, write: Callable[..., None]) -> None:
    write()
    env = child_environment(TASKQ_PG_DSN="postgresql://app:hunter2@127.0.0.1:9/app", TASKQ_DATABASE_BOOT_TIMEOUT="1.5")
    began = time.monotonic()
    command = start("run", "group.toml", env=env)
    message = refused(command, 69)
    assert 1.5 <= time.monotonic() - began < 30
    assert message.startswith("database app@127.0.0.1:9/app is not reachable: connection refused (tried ")
    assert "hunter2" not in command.stderr


def test_a_database_that_comes_up_in_time(
    start: Start, write: Callable[..., None], child_env: dict[str, str], dsn: str, short_dir: Path
) -> None:
    write()
    link = short_dir / "pg"  # the server's socket directory, which appears late
    env = {**child_env, "TASKQ_PG_DSN": f"postgresql://postgres@/postgres?host={link}"}
    command = start("run", "group.toml", env=env)
    wait_until(lambda: "preflight-warning" in command.stderr, 30)
    link.symlink_to(dsn.partition("host=")[2])
    wait_until(lambda: command.stderr.count('"event": "ready"') == 2, 60)
    command.process.terminate()
    assert command.wait() == 0


def test_a_wrong_password(start: Start, write: Callable[..., None], server: Server) -> None:
    write()
    env = child_environment(TASKQ_PG_DSN=server.dsn(PASSWORD_ROLE, "hunter2"))
    command = start("run", "group.toml", env=env)
    assert "password authentication failed" in refused(command, 78)
    assert "hunter2" not in command.stderr


def test_a_schema_that_is_not_migrated(start: Start, write: Callable[..., None], dsn: str) -> None:
    write()
    env = child_environment(TASKQ_PG_DSN=dsn, TASKQ_SCHEMA_NAME=f"t_{uuid.uuid4().hex[:12]}")
    assert "is not migrated: run `taskqd migrate up" in refused(start("run", "group.toml", env=env), 75)


async def test_a_schema_of_a_later_release(
    start: Start, write: Callable[..., None], conn: asyncpg.Connection, schema: str, child_env: dict[str, str]
) -> None:
    write()
    await conn.execute(
        f"insert into {schema}.schema_migrations (version, phase, name, checksum, min_code, applied_by) "
        "values (9000, 'post', 'later', 'x', 9000, 'later')"
    )
    assert "is too new for this code" in refused(start("run", "group.toml", env=child_env), 75)


# -- the budget -----------------------------------------------------------------------------------


def test_a_budget_that_can_never_fit(start: Start, write: Callable[..., None], child_env: dict[str, str]) -> None:
    write(GROUP + "replicas = 20\n")
    message = refused(start("run", "group.toml", env=child_env), 78)
    assert "needs 446 connections and can have 297 of the server's 300" in message
    assert "what would fit: io.replicas 20→1" in message
    budget = start("budget", "group.toml", "--json", env=child_env)
    assert budget.wait() == 78
    assert json.loads(budget.stdout)["verdict"] == "never fits"


def test_a_budget_over_the_limit_runs_when_it_only_warns(
    start: Start, write: Callable[..., None], child_env: dict[str, str]
) -> None:
    write(GROUP + 'max_concurrency = 300\n[budget]\nenforce = "warn"\n')
    command = start("run", "group.toml", env=child_env)
    wait_until(lambda: command.stderr.count('"event": "ready"') == 2, 60)
    assert "466 connections and can have 297" in command.stderr
    command.process.terminate()
    assert command.wait() == 0


@pytest.fixture
async def crowd(dsn: str) -> Iterator[list[asyncpg.Connection]]:
    """Thirty sessions of somebody else."""
    sessions = [await asyncpg.connect(dsn) for _ in range(30)]
    yield sessions  # type: ignore[misc]
    for session in sessions:
        await session.close()


async def test_a_budget_that_others_fill(
    start: Start, write: Callable[..., None], child_env: dict[str, str], crowd: list[asyncpg.Connection]
) -> None:
    write(GROUP + "replicas = 13\n")  # 292 of 297
    message = refused(start("run", "group.toml", env=child_env), 75)
    assert "needs 292 connections beside the " in message
    budget = start("budget", "group.toml", "--json", env=child_env)
    assert budget.wait() == 75
    assert json.loads(budget.stdout)["limits"]["others"] >= 30


async def test_a_server_that_has_no_connection_left(
    start: Start, write: Callable[..., None], conn: asyncpg.Connection, server: Server
) -> None:
    write()
    role = f"narrow_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {role} login connection limit 1")
    only = await asyncpg.connect(server.dsn(role))
    try:
        env = child_environment(TASKQ_PG_DSN=server.dsn(role), TASKQ_DATABASE_BOOT_TIMEOUT="0.5")
        assert "every connection of the server is taken" in refused(start("run", "group.toml", env=env), 75)
    finally:
        await only.close()
        await conn.execute(f"drop role {role}")


def test_the_budget_of_the_worked_example(start: Start, write: Callable[..., None]) -> None:
    write(GROUP + "replicas = 10\nmax_concurrency = 16\n")
    command = start("budget", "group.toml", "--json", "--offline", "--max-connections", "400")
    assert command.wait() == 0
    budget = json.loads(command.stdout)
    assert (budget["direct"], budget["pooled"], budget["total"]) == (102, 240, 342)
    assert (budget["scheduler"], budget["preflight"], budget["required"]) == (3, 1, 346)
    assert budget["verdict"] == "fits"
    table = start("budget", "group.toml", "--offline")
    assert table.wait() == 0
    assert "not compared with a server" in table.stdout
    assert "342" in table.stdout


def test_a_budget_without_a_server_is_no_verdict(start: Start, write: Callable[..., None]) -> None:
    write()
    command = start("budget", "group.toml", env=child_environment(TASKQ_PG_DSN="postgresql://x@127.0.0.1:9/x"))
    assert command.wait() == 0
    assert "not compared with the server: database x@127.0.0.1:9/x is not reachable" in command.stderr
    assert start("budget", "group.toml", "--max-connections", "10").wait() == 2


# -- the file system ------------------------------------------------------------------------------


def test_a_metrics_port_in_the_environment_of_many_children(
    start: Start, write: Callable[..., None], child_env: dict[str, str], short_dir: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        write(GROUP + "replicas = 2\n")
        (short_dir / ".env").write_text(f"TASKQ_METRICS_PORT={port}\n")
        command = start("run", "group.toml", env={**child_env, "TASKQ_METRICS_PORT": port})
        wait_until(lambda: command.stderr.count('"event": "ready"') == 3, 60)
        command.process.terminate()
        assert command.wait() == 0
        assert "child-exit" in command.stderr
    assert not os.path.exists(short_dir / "run" / "group.sock")
