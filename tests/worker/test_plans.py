"""Plans must not flip: the very statements that are sent, under statistics that would tempt any planner.

Without the session settings and the shapes of the statements, few rows pending in the statistics turn the claim into a
bitmap scan and a sort of the whole backlog.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import uuid
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.storage.connect import connect
from taskqd.storage.migrate import migrate_up
from taskqd.storage.statements import load
from taskqd.worker.floors import BEGINNING
from taskqd.worker.lane_claims import NO_CLAIM
from tests.postgres import Server

ROWS = 100_000
PLAIN = """
insert into "{schema}".jobs (id, queue, route, actor, payload, {columns})
select ('{kind}0000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'default', 'default', 'succeed', '{{}}',
    {values}
from generate_series(1, {count}) n
"""
STATES: dict[str, tuple[str, str, int, bool]] = {
    "fresh": ("status", "'pending'", 5, False),
    "few": ("status", "'pending'", 10, True),
    "pending": ("status", "'pending'", ROWS, True),
    "pending unknown to statistics": ("status", "'pending'", ROWS, False),
    "finished": ("status, finished_at", "'succeeded', now()", ROWS, True),
    "future": ("status, scheduled_at", "'scheduled', now() + interval '1 day'", ROWS, True),
}
"""What fills the table beside ten pending rows, and whether the planner was told."""

PAIRS = ([new_uuid() for _ in range(256)], [1] * 256)
SECONDS = [0.1] * 256
TEXTS = ["x"] * 256
FUTURE = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
CASES: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "heads": ("worker", (["default", "mail"], ["succeed"]), "jobs_claim"),
    "claim": (
        "worker",
        (100, new_uuid(), ["default"] * 2, [5, 0], [BEGINNING[0]] * 2, [BEGINNING[1]] * 2, ["succeed"], 60.0),
        "jobs_claim",
    ),
    "renew": ("worker", (*PAIRS, SECONDS, 60.0, 58.0), "jobs_pkey"),
    "settle_succeeded": ("worker", (*PAIRS, SECONDS, TEXTS, *NO_CLAIM), "jobs_pkey"),
    "settle_failed": (
        "worker",
        (*PAIRS, SECONDS, TEXTS, TEXTS, TEXTS, ["transient"] * 256, [None] * 256, [None] * 256),
        "jobs_pkey",
    ),
    "settle_snoozed": ("worker", (*PAIRS, SECONDS, SECONDS), "jobs_pkey"),
    "settle_released": ("worker", (*PAIRS, SECONDS, TEXTS), "jobs_pkey"),
    "settle_abandoned": ("worker", (*PAIRS, SECONDS), "jobs_pkey"),
    "cancelled": ("worker", (new_uuid(),), "jobs_cancel"),
    "store_progress": ("worker", (*PAIRS, [1] * 256, ["{}"] * 256), "jobs_pkey"),
    "settle_state": ("worker", PAIRS, "jobs_pkey"),
    "promote": ("scheduler", (1000, FUTURE), "jobs_due"),
    "next_scheduled": ("scheduler", (FUTURE,), "jobs_due"),
}


def literal(value: Any) -> str:
    """Write a value as SQL of no type yet."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "'{" + ",".join("null" if item is None else f'"{_text(item)}"' for item in value) + "}'"
    return f"'{_text(value)}'"


def _text(value: Any) -> str:
    if isinstance(value, dt.datetime):
        return "-infinity" if value == BEGINNING[0] else value.isoformat()
    return str(value)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every node of a plan, the root first."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.fixture(scope="module", params=["server", "pg16", "pg15"])
def postgres(request: pytest.FixtureRequest) -> Server:
    """Each version that is tested."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="module")
def filled(postgres: Server) -> Iterator[dict[str, str]]:
    """The name of a schema for each state of the table."""
    schemas = {state: f"p_{uuid.uuid4().hex[:12]}" for state in STATES}
    asyncio.run(_fill(postgres, schemas))
    yield schemas
    asyncio.run(_drop(postgres, schemas))


async def _fill(postgres: Server, schemas: dict[str, str]) -> None:
    conn = await asyncpg.connect(postgres.dsn(), timeout=30)
    try:
        for state, (columns, values, count, analyzed) in STATES.items():
            schema = schemas[state]
            await migrate_up(conn, schema)
            await conn.execute(f'alter table "{schema}".jobs set (autovacuum_enabled = off)')  # it would analyze
            await conn.execute(PLAIN.format(schema=schema, kind=0, columns="status", values="'pending'", count=10))
            await conn.execute(PLAIN.format(schema=schema, kind=1, columns=columns, values=values, count=count))
            if analyzed:
                await conn.execute(f'analyze "{schema}".jobs')
    finally:
        await conn.close(timeout=10)


async def _drop(postgres: Server, schemas: dict[str, str]) -> None:
    conn = await asyncpg.connect(postgres.dsn(), timeout=30)
    try:
        for schema in schemas.values():
            await conn.execute(f'drop schema if exists "{schema}" cascade')
    finally:
        await conn.close(timeout=10)


async def explain(postgres: Server, schema: str, name: str, mode: str) -> str:
    """The plan, as JSON, in a session with the settings that a worker gives its own."""
    file, arguments, _ = CASES[name]
    conn = await connect(postgres.dsn(), role="test", schema=schema, pinned=True)
    try:
        await conn.execute(f"set plan_cache_mode = {mode}")
        await conn.execute(f"prepare probe as {load(file, schema)[name]}")
        values = ", ".join(map(literal, arguments))
        return str(await conn.fetchval(f"explain (format json, costs off) execute probe({values})"))
    finally:
        await conn.close(timeout=10)


@pytest.mark.parametrize("mode", ["custom", "generic"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", CASES)
async def test_the_plan_is_the_one_that_was_measured(
    postgres: Server, filled: dict[str, str], name: str, state: str, mode: str
) -> None:
    index = CASES[name][2]
    text = await explain(postgres, filled[state], name, f"force_{mode}_plan")
    plan = json.loads(text)[0]["Plan"]
    found = list(nodes(plan))
    on_jobs = [node for node in found if node.get("Relation Name") == "jobs"]
    kinds = {node["Node Type"] for node in on_jobs}
    assert kinds <= {"Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"}, text
    assert not {node["Node Type"] for node in found} & {"Bitmap Index Scan", "Hash Join", "Merge Join"}, text
    for sort in (node for node in found if node["Node Type"] in ("Sort", "Incremental Sort")):
        assert not any(node.get("Relation Name") == "jobs" for node in nodes(sort)), text
    scans = [node for node in on_jobs if "Index Name" in node]
    assert {node["Index Name"] for node in scans} == {index}, text
    for scan in scans:
        condition = scan.get("Index Cond", "")
        if index == "jobs_claim":
            assert "route =" in condition, text
            assert "lane = ''" in condition or (name == "heads" and "lane >" in condition), text
        elif index in ("jobs_pkey", "jobs_cancel"):
            assert "id =" in condition, text
        elif name == "next_scheduled":
            assert "scheduled_at >" in condition, text
        else:
            assert "scheduled_at >=" in condition, text
            assert "scheduled_at <= statement_timestamp()" in condition, text
    if name == "claim":
        assert all("ROW(scheduled_at, id) >=" in scan["Index Cond"] for scan in scans), text
        assert all("priority =" in scan["Index Cond"] for scan in scans), text
