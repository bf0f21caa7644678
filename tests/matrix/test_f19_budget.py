"""F19: The connections do not suffice, at a start or a reload, beside others or beside another group: refused for good
where the server never grants them, for now where others hold them, and what has no room beside its successor ends
before it.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.matrix.conftest import Trial
from tests.postgres import Server
from tests.supervisor.asking import SOON, edit, pids, taskqd
from tests.supervisor.conftest import ACTORS, Group
from tests.supervisor.test_bad_input import refused
from tests.support import eventually, taskqd_argv, wait_until

LARGE = {"[workers]": "max_concurrency = 180"}
"""A group that needs 283 of the 297 connections that the server grants."""


@pytest.fixture
async def crowd(dsn: str) -> AsyncIterator[list[asyncpg.Connection]]:
    """Thirty sessions of somebody else."""
    sessions = [await asyncpg.connect(dsn, timeout=30) for _ in range(30)]
    yield sessions
    for session in sessions:
        await session.close(timeout=10)


def verdict(g: Group) -> tuple[int, str]:
    """What the budget command says: its exit code, and in a word."""
    done = subprocess.run(
        taskqd_argv("budget", "group.toml", "--json"),
        cwd=g.directory,
        env=g._env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)["verdict"]


def test_f19_more_than_the_server_ever_grants_is_refused_for_good(trial: Trial) -> None:
    with trial(tables={"[workers]": "replicas = 20"}, ready=0, ends=78) as g:
        message = refused(g.command, 78)
        assert "needs 443 connections and can have 297 of the server's 300" in message
        assert "what would fit: io.replicas 20→1" in message
        assert verdict(g) == (78, "never fits")


async def test_f19_more_than_others_leave_is_refused_until_they_go(
    trial: Trial, crowd: list[asyncpg.Connection], conn: asyncpg.Connection
) -> None:
    with trial(tables=LARGE, ready=0) as g:
        assert "needs 283 connections beside the " in refused(g.command, 75)
        assert verdict(g) == (75, "crowded")
        for session in crowd:
            await session.close(timeout=10)
        await eventually(lambda: few_sessions(conn), 30)
        g.command = g.run_again()
        g.wait_for("ready")


async def few_sessions(conn: asyncpg.Connection) -> bool:
    """Those that were closed are gone."""
    return bool(await conn.fetchval("select count(*) < 10 from pg_stat_activity where backend_type = 'client backend'"))


async def test_f19_a_server_that_has_no_connection_left(trial: Trial, conn: asyncpg.Connection, server: Server) -> None:
    role = f"narrow_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {role} login connection limit 1")
    only = await asyncpg.connect(server.dsn(role), timeout=30)
    try:
        with trial(ready=0, ends=75, TASKQ_PG_DSN=server.dsn(role), TASKQ_DATABASE_BOOT_TIMEOUT="0.5") as g:
            assert "every connection of the server is taken" in refused(g.command, 75)
    finally:
        await only.close(timeout=10)
        await conn.execute(f"drop role {role}")


def test_f19_a_second_group_is_refused_while_the_first_one_has_the_rest(trial: Trial) -> None:
    second_of_all = {**LARGE, "supervisor": 'name = "second"'}
    with trial(tables=LARGE, actors=ACTORS) as first, trial(tables=second_of_all, ready=0) as second:
        assert "283 of group 'group'" in refused(second.command, 75)
        assert first.stop() == 0
        second.command = second.run_again()
        second.wait_for("ready")


def test_f19_a_reload_that_does_not_fit_beside_another_group_changes_nothing(trial: Trial) -> None:
    with trial(tables={"supervisor": 'name = "other"', "[workers]": "max_concurrency = 100"}), trial(tables=SOON) as g:
        before = pids(g)
        edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 150'))
        done = taskqd(g, "reload")
        assert done.returncode == 75, done.stderr
        assert "of group 'other'" in done.stderr
        assert pids(g) == before
        assert g.ask("/ready")[0] == 200


def test_f19_without_room_for_both_the_old_process_goes_first(trial: Trial) -> None:
    # The server grants 297; the group needs 25, and a second worker beside the first 22 more.
    tables = {"budget": "app_connections = 260", **SOON}
    with trial(modes={"io": "picky"}, tables=tables) as g:
        edit(g, ('name = "io"', 'name = "io"\npoll_interval = 2'))
        assert taskqd(g, "reload").returncode == 0
        told = ["spawn", "ready", "child-exit", "spawn", "ready"]
        assert [event["event"] for event in g.events() if event.get("child") == "io.0"] == told
        edit(g, ("poll_interval = 2", "max_concurrency = 15\ndispatcher_pool_size = 1"))
        done = taskqd(g, "reload")
        assert (done.returncode, "the old one is back" in done.stderr) == (1, True)
        wait_until(lambda: g.ask("/ready")[0] == 200)
