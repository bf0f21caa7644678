"""F14: The database stops, starts again, crashes, ends sessions or grants no more of them: the group is alive and not
ready meanwhile, and nobody is restarted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator

import asyncpg
import pytest

from tests.fleet import QUICK
from tests.jobs import JobTable
from tests.matrix.conftest import Trial
from tests.postgres import Server
from tests.supervisor.conftest import Group
from tests.support import eventually, wait_until

TABLES = {"scheduler": "enabled = true", "[workers]": "replicas = 2"}
REAL = {"io": "real", "scheduler": "real", "supervisor": "stale-soon"}


@pytest.fixture(scope="module")
def role(server: Server) -> Iterator[str]:
    """A role whose connections may be limited, unlike those of a superuser."""
    name = f"limited_{uuid.uuid4().hex[:8]}"
    asyncio.run(execute(server, f"create role {name} login in role postgres"))
    yield name
    asyncio.run(execute(server, f"drop role {name}"))


@pytest.fixture(scope="module")
def running(module_trial: Trial, server: Server, role: str) -> Iterator[Group]:
    """Two real workers and a scheduler."""
    with module_trial(REAL, TABLES, ready=3, TASKQ_PG_DSN=server.dsn(role), **QUICK) as g:
        yield g
        assert not g.events("kill")


async def test_f14_a_database_that_is_away_costs_readiness_and_nothing_else(
    running: Group, server: Server, role: str, module_env: dict[str, str]
) -> None:
    schema = module_env["TASKQ_SCHEMA_NAME"]
    await work(server, schema)
    await execute(server, f"alter role {role} connection limit 0")
    await asyncio.to_thread(server.stop)
    await watched(running, lambda: running.ask("/ready")[0] == 503)
    assert "the database has not answered" in running.ask("/ready")[1]["reason"]
    await asyncio.to_thread(server.start)
    until = time.monotonic() + 2  # a server that is up and has no connection left is no better
    await watched(running, lambda: time.monotonic() > until)
    assert running.ask("/ready")[0] == 503
    await execute(server, f"alter role {role} connection limit -1")
    await watched(running, lambda: running.ask("/ready")[0] == 200)
    await work(server, schema)


async def test_f14_sessions_that_are_ended_and_a_crash_of_the_server_are_passed_over(
    running: Group, server: Server, module_env: dict[str, str]
) -> None:
    schema = module_env["TASKQ_SCHEMA_NAME"]
    for _ in range(5):
        await execute(
            server,
            f"select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'taskqd/{schema}/%'",
        )
        await asyncio.sleep(0.1)
    await work(server, schema)
    await asyncio.to_thread(server.restart, immediate=True)
    await work(server, schema)
    await watched(running, lambda: running.ask("/ready")[0] == 200)


def test_f14_what_a_process_says_of_the_database_counts(trial: Trial) -> None:
    with trial(modes={"io": "database-away"}) as g:
        wait_until(lambda: g.ask("/ready")[0] == 503, 30)
        assert "the database has not answered io.0" in g.ask("/ready")[1]["reason"]
        assert g.ask("/live")[0] == 200
        assert g.ask("/status")[1]["children"][0]["verdict"] == "environment"
        assert [event["verdict"].partition(":")[0] for event in g.events("verdict")] == ["environment"]
        assert not g.events("child-exit")


async def watched(g: Group, predicate: Callable[[], bool]) -> None:
    """Wait for something; meanwhile the group must be alive, and every one of its processes."""

    def look() -> bool:
        assert g.ask("/live")[0] == 200
        assert not g.events("child-exit")
        return predicate()

    await eventually(look, 60)


async def work(server: Server, schema: str) -> None:
    """Have some jobs done."""
    conn = await asyncpg.connect(server.dsn(), timeout=30)
    try:
        table = JobTable(conn, schema)
        ids = await table.plant(20, actor="'nothing'", max_attempts="50")

        async def done() -> bool:
            found = await conn.fetchval(
                f"select count(*) from \"{schema}\".jobs where id = any($1) and status = 'succeeded'", ids
            )
            return bool(found == len(ids))

        await eventually(done, 60)
    finally:
        await conn.close(timeout=10)


async def execute(server: Server, statement: str) -> None:
    conn = await asyncpg.connect(server.dsn(), timeout=30)
    try:
        await conn.execute(statement)
    finally:
        await conn.close(timeout=10)
