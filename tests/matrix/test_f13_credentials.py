"""F13: the password changes in the database, its provider hangs, it fails for one process of several: nothing is
restarted, no job fails, and who works with an old credential says so.
"""

from __future__ import annotations

import contextlib
import json
import signal
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest

from taskqd import EnqueueItem, TaskQ
from tests.matrix.conftest import Trial
from tests.matrix.oracle import tagged
from tests.postgres import PASSWORD_ROLE, Server
from tests.rotating import ACTORS, ROTATION_WITHIN, Secret, Work, admin, locked, schema, secret, work
from tests.supervisor.asking import pids
from tests.supervisor.conftest import Group
from tests.support import child_environment, eventually

__all__ = ["admin", "locked", "schema", "secret"]


@pytest.fixture
def child_env(locked: Server, schema: str) -> dict[str, str]:
    """That of processes which log in by a password."""
    return child_environment(TASKQ_PG_DSN=locked.dsn(PASSWORD_ROLE), TASKQ_SCHEMA_NAME=schema)


Enqueue = Callable[[int], Awaitable[None]]


@pytest.fixture
def enqueue(locked: Server, schema: str) -> Enqueue:
    """Enqueue so many jobs more, numbered from the first to the last."""
    total = 0

    async def add(count: int) -> None:
        nonlocal total
        async with TaskQ(dsn=locked.dsn(), schema=schema) as queue:
            await queue.enqueue_batch(
                [EnqueueItem(actor_ref=work, payload=Work(number=total + n)) for n in range(count)]
            )
        total += count

    return add


def tables(credentials: str, workers: str = "replicas = 2") -> dict[str, str]:
    return {
        "credentials": credentials,
        "scheduler": "enabled = true",
        "[workers]": f"max_concurrency = 4\nnotify_poll_interval = 1\n{workers}",
    }


def from_file(secret: Secret) -> str:
    return f'provider = "file"\npath = "{secret.path}"\nrefresh_interval = 0'


def rotations(g: Group) -> list[dict[str, Any]]:
    """What the supervisor told of rotations; its processes' own lines name resources instead."""
    return [event for event in g.events("credentials-reloaded") if "children" in event]


def executions(g: Group) -> list[int]:
    path = g.directory / "executions"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


async def sessions(admin: asyncpg.Connection, schema: str) -> dict[int, str]:
    """The group's sessions: pid of the backend and what it is for."""
    rows = await admin.fetch(
        "select pid, application_name from pg_stat_activity where starts_with(application_name, $1)",
        f"taskqd/{schema}/group/",
    )
    return {row["pid"]: row["application_name"].rpartition("/")[2] for row in rows}


async def all_done(g: Group, admin: asyncpg.Connection, schema: str, total: int) -> None:
    """Wait until every job has succeeded; each was executed once, and no process was restarted."""
    query = f"select count(*) from \"{schema}\".jobs where status = 'succeeded' and attempt = 1"

    async def reached() -> bool:
        return bool(await admin.fetchval(query) == total)

    await eventually(reached, 60, g.command.stderr)
    assert sorted(executions(g)) == list(range(total))
    assert g.events("child-exit") == []


def stale(g: Group) -> set[str]:
    """Who says that it works with an old credential."""
    lines = g.ask("/metrics")[1]["text"].splitlines()
    flagged = [line for line in lines if line.startswith("taskqd_child_credentials_stale{") and line.endswith(" 1")]
    return {line.split('"')[1] for line in flagged}


async def test_f13_a_rotation_under_load_restarts_nothing_and_loses_nothing(
    trial: Trial, secret: Secret, admin: asyncpg.Connection, schema: str, enqueue: Enqueue
) -> None:
    with trial(tables=tables(from_file(secret)), ready=3, preload="require", actors=ACTORS) as g:
        before, processes = await sessions(admin, schema), pids(g)
        await enqueue(300)
        await eventually(lambda: executions(g), 30)
        await secret.rotate()
        g.command.signal(signal.SIGHUP)
        (told,) = await eventually(lambda: rotations(g), ROTATION_WITHIN, g.command.stderr)
        assert (told["children"], told.get("failed")) == (3, None)
        await enqueue(300)
        after = await sessions(admin, schema)
        old = sorted(set(before) & set(after))
        assert old == [], f"sessions from before the rotation: {[before[pid] for pid in old]}"
        assert set(before.values()) <= set(after.values()) | {"boot", "preflight"}
        # The new password holds: whatever is ended comes back with it.
        await admin.execute("select pg_terminate_backend(pid) from unnest($1::int[]) pid", list(after))
        await enqueue(200)
        query = f"select count(*) from \"{schema}\".jobs where status = 'succeeded'"

        async def reached() -> bool:
            return bool(await admin.fetchval(query) == 800)

        await eventually(reached, 60, g.command.stderr)
        assert sorted(set(executions(g))) == list(range(800))
        attempts = await admin.fetchval(f'select sum(attempt) from "{schema}".jobs')
        assert attempts == len(executions(g))
        assert pids(g) == processes
        assert g.events("child-exit") == []
    for value in secret.values:
        assert value not in g.everything_logged() + g.command.stdout
        assert json.dumps(value)[1:-1] not in g.everything_logged()


async def test_f13_a_credential_that_does_not_work_leaves_the_old_sessions_in_use(
    trial: Trial, secret: Secret, admin: asyncpg.Connection, schema: str, enqueue: Enqueue
) -> None:
    short = {"TASKQ_DATABASE_BOOT_TIMEOUT": "1"}
    with trial(tables=tables(from_file(secret)), ready=3, preload="require", actors=ACTORS, **short) as g:
        before = await sessions(admin, schema)
        secret.mount("wrong")
        g.command.signal(signal.SIGHUP)
        await eventually(lambda: rotations(g) or g.events("reload-failed"), ROTATION_WITHIN)
        assert "wrong" not in json.dumps(rotations(g))
        now = await sessions(admin, schema)
        assert {role for pid, role in before.items() if pid not in now} <= {"boot", "preflight"}
        await enqueue(20)
        await all_done(g, admin, schema, 20)
        secret.mount(secret.values[-1])
        g.command.signal(signal.SIGHUP)
        await eventually(lambda: any("failed" not in event for event in rotations(g)), ROTATION_WITHIN)


def names(g: Group) -> set[str]:
    """What runs in the name of the group."""
    found = set()
    for pid in tagged(g.tag):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid).name())
    return found


async def test_f13_a_provider_that_hangs(
    trial: Trial, secret: Secret, admin: asyncpg.Connection, schema: str, enqueue: Enqueue, short_dir: Path
) -> None:
    """Nobody waits for it longer than its timeout, and it is ended; when it answers again all is well."""
    program, hang, answer = short_dir / "credential", short_dir / "hang", short_dir / "answer"
    program.write_text(f"#!/bin/sh\n[ -e {hang} ] && exec sleep 60\nexec cat {answer}\n")  # starts at once
    program.chmod(stat.S_IRWXU)

    def will_answer() -> None:
        answer.write_text(json.dumps({"username": PASSWORD_ROLE, "password": secret.values[-1]}))

    will_answer()
    provider = f'provider = "exec"\ncommand = ["{program}"]\ntimeout = 2\nrefresh_interval = 1'
    short = {"TASKQ_DATABASE_BOOT_TIMEOUT": "1"}
    with trial(tables=tables(provider), ready=3, preload="require", actors=ACTORS, **short) as g:
        processes = pids(g)
        hang.touch()
        await eventually(lambda: "sleep" in names(g), 30)
        await eventually(lambda: stale(g) == {"io", "scheduler"}, 30, "all say that they could not look")
        await secret.rotate()
        will_answer()
        g.command.signal(signal.SIGHUP)
        (failed,) = await eventually(lambda: g.events("reload-failed"), 60, g.command.stderr)
        assert "2 s" in failed["why"]
        await enqueue(20)
        await all_done(g, admin, schema, 20)
        hang.unlink()
        await eventually(lambda: stale(g) == set(), 30, "they have looked again")
        await eventually(lambda: "sleep" not in names(g), 30, "no provider runs on")
        assert pids(g) == processes
        assert g.ask("/ready")[0] == 200


async def test_f13_a_provider_that_fails_for_one_process_of_eight(
    trial: Trial, secret: Secret, admin: asyncpg.Connection, schema: str, enqueue: Enqueue, short_dir: Path
) -> None:
    own = short_dir / "own"
    own.write_text(secret.values[-1])
    others = '[[workers]]\nname = "well"\nreplicas = 6\nmax_concurrency = 1'
    workers = f'pg_credential_path = "{own}"\n{others}'
    with trial(tables=tables(from_file(secret), workers), ready=8, preload="require", actors=ACTORS) as g:
        before = await sessions(admin, schema)
        own.write_text("")
        g.command.signal(signal.SIGHUP)
        (told,) = await eventually(lambda: rotations(g), ROTATION_WITHIN, g.command.stderr)
        assert list(told["failed"]) == ["io.0"]
        assert "the password must be one line of text" in told["failed"]["io.0"]
        kept = {role for pid, role in (await sessions(admin, schema)).items() if pid in before}
        assert {"dispatch", "worker", "heartbeat", "notify"} <= kept
        assert "scheduler" not in kept
        await eventually(lambda: stale(g) == {"io"}, 30)
        await enqueue(20)
        await all_done(g, admin, schema, 20)
        own.write_text(secret.values[-1])
        g.command.signal(signal.SIGHUP)
        await eventually(lambda: len(rotations(g)) == 2 and "failed" not in rotations(g)[-1], ROTATION_WITHIN)
        await eventually(lambda: stale(g) == set(), 30)
        assert g.events("child-exit") == []
