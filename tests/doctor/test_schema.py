"""What the doctor says of a schema: its migrations, what was changed by hand, the plans of hot statements."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest

from taskqd.settings import Settings, load_settings
from taskqd.storage.connect import describe_dsn
from taskqd.storage.doctor import Finding, Severity, examine
from taskqd.storage.doctor_schema import HOT, check_drift, check_migrations, check_plans, check_target, judge_plan
from taskqd.storage.migrate import migrate_up
from taskqd.storage.target import bind
from tests.doctor.conftest import Look
from tests.postgres import Server
from tests.worker.test_plans import CASES

ALL = [("migrations", check_migrations), ("drift", check_drift), ("plans", check_plans)]


@pytest.mark.parametrize("version", ["server", "pg16", "pg15"])
@pytest.mark.parametrize("name", ["d_{}", "Select{}"])
async def test_what_the_migrations_made_is_well(request: pytest.FixtureRequest, version: str, name: str) -> None:
    server: Server = request.getfixturevalue(version)
    schema = name.format(uuid.uuid4().hex[:8])
    settings = load_settings(environ={"TASKQ_PG_DSN": server.dsn(), "TASKQ_SCHEMA_NAME": schema})
    conn = await asyncpg.connect(server.dsn(), timeout=30)
    try:
        await migrate_up(conn, schema)
        findings = await examine(conn, settings, ALL)
        assert [(each.check, each.severity) for each in findings] == [(check, Severity.OK) for check, _ in ALL], (
            findings
        )
        left = await conn.fetchval("select count(*) from pg_namespace where nspname like 'taskqd_doctor_%'")
        assert left == 0
    finally:
        await conn.execute("set default_transaction_read_only = off")
        await conn.execute(f'drop schema "{schema}" cascade')
        await conn.close(timeout=10)


@pytest.mark.parametrize(
    ("change", "where", "what", "severity"),
    [
        ("drop index {s}.jobs_due", "index jobs.jobs_due", "is missing", Severity.FAIL),
        ("drop function {s}.wake() cascade", "function wake()", "is missing", Severity.FAIL),
        ("drop table {s}.job_events", "table job_events", "is missing", Severity.FAIL),
        ("alter table {s}.jobs drop column span_id", "column jobs.span_id", "is missing", Severity.FAIL),
        (
            "create or replace function {s}.wake() returns void language sql as ''",
            "function wake()",
            "has another text",
            Severity.FAIL,
        ),
        (
            "alter table {s}.jobs alter trace_id set default 'x'",
            "column jobs.trace_id",
            "is \"text 'x'::text\", not 'text'",
            Severity.FAIL,
        ),
        (
            "alter table {s}.queues disable trigger set_gate",
            "trigger queues.set_gate",
            "(disabled)",
            Severity.FAIL,
        ),
        ("create index mine on {s}.jobs (actor)", "index jobs.mine", "is not taskqd's", Severity.WARN),
        ("alter table {s}.jobs add mine int", "column jobs.mine", "is not taskqd's", Severity.WARN),
        ("alter type {s}.job_status add value 'lost'", "type job_status", "lost", Severity.FAIL),
    ],
)
async def test_what_was_changed_by_hand_is_named(
    conn: asyncpg.Connection, schema: str, look: Look, change: str, where: str, what: str, severity: Severity
) -> None:
    await conn.execute(change.format(s=f'"{schema}"'))
    found = [each for each in await look(check_drift) if each.where == where]
    assert [each.severity for each in found] == [severity]
    assert what in found[0].what
    assert found[0].why
    assert found[0].do


async def test_a_table_of_somebody_else_beside_ours_is_nobodys_business(
    conn: asyncpg.Connection, schema: str, look: Look
) -> None:
    await conn.execute(f'create table "{schema}".mine (id int primary key)')
    assert [each.severity for each in await look(check_drift)] == [Severity.OK]


async def test_which_installation_it_is(conn: asyncpg.Connection, schema: str, look: Look) -> None:
    (unbound,) = await look(check_target)
    assert (unbound.severity, unbound.what[:23]) == (Severity.OK, "bound to no environment")
    await bind(conn, schema, "production", None)
    (refused,) = await look(check_target)
    assert refused.severity is Severity.FAIL
    assert "is bound to environment 'production', the one expected is none" in refused.what


async def test_a_plan_without_its_index_is_a_finding(conn: asyncpg.Connection, schema: str, look: Look) -> None:
    await conn.execute(f'drop index "{schema}".jobs_due, "{schema}".jobs_claim')
    found = {each.where: each for each in await look(check_plans)}
    assert {"statement promote", "statement claim"} <= set(found)
    assert found["statement promote"].severity is Severity.FAIL
    assert "jobs_due" in found["statement promote"].why


def test_another_index_and_a_bitmap_are_findings() -> None:
    scan = {"Node Type": "Index Scan", "Relation Name": "jobs", "Index Name": "jobs_due"}
    assert judge_plan([scan], "jobs_due") == ""
    assert judge_plan([scan], "jobs_claim") == "reads jobs through jobs_due"
    assert judge_plan([{**scan, "Node Type": "Bitmap Heap Scan"}], "jobs_due") == "reads jobs by Bitmap Heap Scan"
    assert judge_plan([{"Node Type": "Result"}], "jobs_due") == "does not read jobs through an index"


def test_the_hot_statements_are_those_whose_plans_are_tested() -> None:
    assert {name: (CASES[name][0], CASES[name][2]) for name in HOT} == HOT


@pytest.fixture
async def reader(conn: asyncpg.Connection, schema: str) -> AsyncIterator[str]:
    """A role that may read and write the schema, and create nothing."""
    name = f"r_{uuid.uuid4().hex[:12]}"
    await conn.execute(
        f'create role {name} login; grant usage on schema "{schema}" to {name}; '
        f'grant select, insert, update, delete on all tables in schema "{schema}" to {name}'
    )
    yield name
    await conn.execute(f"drop owned by {name}; drop role {name}")


async def test_a_role_that_creates_nothing_is_told_what_was_not_compared(
    server: Server, settings: Settings, reader: str
) -> None:
    own = server.dsn(user=reader)
    conn = await asyncpg.connect(own, timeout=30)
    try:
        theirs = load_settings(environ={"TASKQ_PG_DSN": own, "TASKQ_SCHEMA_NAME": settings.schema_name})
        found = await examine(conn, theirs, ALL)
    finally:
        await conn.close(timeout=10)
    by_check: dict[str, Finding] = {each.check: each for each in found}
    assert {each.severity for each in found} == {Severity.OK}
    assert by_check["drift"].what.startswith("not compared"), describe_dsn(own)


async def test_migrations_that_are_missing_or_were_edited(conn: asyncpg.Connection, schema: str, look: Look) -> None:
    await conn.execute(f"update \"{schema}\".schema_migrations set checksum = 'x'")
    (edited,) = await look(check_migrations)
    assert (edited.severity, edited.what) == (Severity.FAIL, "changed after it was applied: 0001_initial.pre.sql")
    await conn.execute(f'update "{schema}".schema_migrations set min_code = 99')
    assert "is too new for this code: 0001_initial.pre.sql" in [each.what for each in await look(check_migrations)]
    await conn.execute(f'delete from "{schema}".schema_migrations')
    (empty,) = await look(check_migrations)
    assert (empty.severity, empty.what) == (Severity.FAIL, "is not migrated")
    assert empty.do == f"run `taskqd migrate up --schema {schema}`"
