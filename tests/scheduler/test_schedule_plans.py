"""The statements that look at schedules every second are served by their indexes, whatever the statistics say."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.maintenance.firing import Firing
from taskqd.storage.migrate import migrate_up
from tests.postgres import Server
from tests.scheduler.schedules import ScheduleTable, fire


def nodes(plan: Any) -> list[dict[str, Any]]:
    """Return every node of a plan."""
    if isinstance(plan, list):
        return [node for part in plan for node in nodes(part)]
    found = [plan] if "Node Type" in plan else []
    return found + [node for key in ("Plan", "Plans") if key in plan for node in nodes(plan[key])]


async def explain(pool: Any, sql: str, *arguments: Any) -> list[dict[str, Any]]:
    """Return the nodes of the plan that a scheduler's session makes."""
    async with pool.acquire() as conn:
        return nodes(json.loads(await conn.fetchval(f"explain (format json) {sql}", *arguments)))


@pytest.mark.parametrize("analyzed", [False, True])
async def test_due_schedules_are_found_by_their_index(
    schedules: ScheduleTable, firing: Firing, pool: Any, analyzed: bool
) -> None:
    await schedules.plant_many(3000, "clock_timestamp() + random() * interval '1 day'")
    if analyzed:
        await schedules.conn.execute(f'analyze "{schedules.schema}".schedules')
    for sql, arguments in (
        (firing._sql.claim_schedules, (500, new_uuid(), new_uuid(), 60.0)),
        (firing._sql.next_due, ()),
    ):
        plan = await explain(pool, sql, *arguments)
        scans = {
            node.get("Index Name")
            for node in plan
            if node.get("Relation Name") == "schedules" and "Scan" in node["Node Type"]
        }
        assert scans <= {"schedules_due", "schedules_pkey"}, plan
        assert "schedules_due" in scans


async def test_a_slot_is_looked_up_by_its_key(schedules: ScheduleTable, firing: Firing, pool: Any) -> None:
    await schedules.plant_many(300, "clock_timestamp() - interval '1 minute'")
    await fire(firing)
    await schedules.conn.execute(f'analyze "{schedules.schema}".schedule_occurrences')
    one = new_uuid()
    now = await schedules.conn.fetchval("select clock_timestamp()")
    arguments = [[one], [one], ["fired"], [1], [now], [0], one, None, [one], [now], [one], one]
    plan = await explain(pool, firing._sql.fire, *arguments)
    scans = [
        node for node in plan if node.get("Relation Name") == "schedule_occurrences" and "Scan" in node["Node Type"]
    ]
    assert [node["Index Name"] for node in scans] == ["schedule_occurrences_pkey"]


@pytest.mark.parametrize("version", ["pg15", "pg16"])
async def test_schedules_fire_on_older_servers(request: pytest.FixtureRequest, version: str) -> None:
    server: Server = request.getfixturevalue(version)
    connection = await asyncpg.connect(server.dsn(), timeout=30)
    schema = f"fires_{version}"
    pool = await asyncpg.create_pool(server.dsn(), min_size=1, max_size=1, timeout=30)
    try:
        await migrate_up(connection, schema)
        schedules = ScheduleTable(connection, schema)
        await schedules.plant("new")
        await schedules.plant("old", due="clock_timestamp() - interval '90 seconds'", catch_up="fire_all")
        await schedules.plant("broken", due="clock_timestamp() - interval '1 second'")
        await schedules.update("broken", timezone="'nowhere'")
        firing = Firing(pool, schema, new_uuid(), statement_timeout=10)
        counts = await fire(firing)
        assert (counts.fired, counts.failed) == (2, 1)
        assert await firing.next_due() is not None
    finally:
        pool.terminate()
        await connection.execute(f"drop schema if exists {schema} cascade")
        await connection.close(timeout=10)
