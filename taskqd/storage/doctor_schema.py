"""Whether the schema is what this code was written for: migrations, objects, the plans of what runs all the time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import asyncpg

from taskqd.domain.errors import TargetMismatchError
from taskqd.storage.connect import close, connect
from taskqd.storage.credentials import login_of
from taskqd.storage.doctor import STATEMENT_TIMEOUT, Finding, Patient, fail, listed, ok, warn
from taskqd.storage.migrate import CODE_LEVEL, MIN_SCHEMA, migrate_status
from taskqd.storage.migration_files import MigrationFile, read_migrations, split_statements
from taskqd.storage.schema_name import quote, render
from taskqd.storage.statements import load
from taskqd.storage.target import attest, read_identity

HOT = {
    "heads": ("worker", "jobs_claim"),
    "claim": ("worker", "jobs_claim"),
    "renew": ("worker", "jobs_pkey"),
    "settle_succeeded": ("worker", "jobs_pkey"),
    "settle_failed": ("worker", "jobs_pkey"),
    "settle_snoozed": ("worker", "jobs_pkey"),
    "settle_released": ("worker", "jobs_pkey"),
    "cancelled": ("worker", "jobs_cancel"),
    "promote": ("scheduler", "jobs_due"),
}
"""What runs all the time: the file of the statement, and the index of the jobs that it must go through."""
_GOOD_NODES = {"Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"}
_OWN_PARTS = ("column", "index", "constraint", "trigger")
_Objects = dict[tuple[str, str, str], str]


async def check_migrations(patient: Patient) -> list[Finding]:
    """Compare the ledger with the files of this release."""
    name, schema = "migrations", patient.schema
    status = await migrate_status(patient.conn, schema)
    up = f"taskqd migrate up --schema {schema}"
    found: list[Finding] = []
    pre = [file.filename for file in status.pending if file.phase == "pre"]
    post = [file.filename for file in status.pending if file.phase == "post"]
    newer = [row.filename for row in status.applied if row.min_code > CODE_LEVEL]
    if not status.applied:
        return [fail(name, schema, "is not migrated", "nothing can be enqueued or run", f"run `{up}`")]
    if newer:
        found.append(
            fail(name, schema, f"is too new for this code: {listed(newer)}", "processes exit 75", "upgrade taskqd")
        )
    if status.version < MIN_SCHEMA:
        why = "processes of this release exit 75"
        found.append(fail(name, schema, f"is too old for this code: at migration {status.version}", why, f"run `{up}`"))
    elif pre:
        why = "the next release may need it"
        found.append(warn(name, schema, f"not applied yet: {listed(pre)}", why, f"run `{up} --phase pre`"))
    if post:
        do = f"run `{up}` once no older release runs"
        found.append(warn(name, schema, f"not applied yet: {listed(post)}", "old structures stay and cost", do))
    if status.drift:
        names = listed(row.filename for row in status.drift)
        do = "restore the text that was applied, and put the change into a new migration"
        found.append(fail(name, schema, f"changed after it was applied: {names}", "no migration can be applied", do))
    return found or [ok(name, f"at migration {status.version}, nothing pending", schema)]


async def check_target(patient: Patient) -> list[Finding]:
    """Tell which installation this is, and whether these settings are meant for it."""
    name, schema = "target", patient.schema
    try:
        await attest(patient.conn, schema, patient.settings)
    except TargetMismatchError as error:
        why = "processes with these settings are refused, exit 78"
        do = "give the right database, or the TASKQ_ENVIRONMENT that is bound; a clone needs `taskqd target rotate`"
        return [fail(name, schema, str(error), why, do)]
    found = await read_identity(patient.conn, schema)
    if found.environment is None:
        what = "bound to no environment: any process may work on it; `taskqd target bind ENVIRONMENT` ends that"
        return [ok(name, what, schema)]
    return [ok(name, f"environment {found.environment}, and these settings are meant for it", schema)]


async def check_drift(patient: Patient) -> list[Finding]:
    """Compare the schema with what its migrations make of an empty one, in a transaction that is rolled back."""
    name, conn = "drift", patient.conn
    status = await migrate_status(conn, patient.schema)
    applied = {(row.version, row.phase) for row in status.applied}
    files = [file for file in read_migrations() if (file.version, file.phase) in applied]
    scratch = f"taskqd_doctor_{uuid.uuid4().hex[:16]}"
    transaction = conn.transaction()
    await transaction.start()
    try:
        await conn.execute("set transaction read write")
        await conn.execute("set local search_path = ''")
        await conn.execute(f"create schema {scratch}")
        for file in files:
            await _apply(conn, file, scratch)
        expected = _renamed(
            await _objects(patient, scratch),
            scratch,
            patient.schema,
            await conn.fetchval("select pg_catalog.quote_ident($1)", patient.schema),
        )
        live = await _objects(patient, patient.schema)
    except asyncpg.InsufficientPrivilegeError:
        return [ok(name, "not compared: that needs a role that may create a schema in this database", patient.schema)]
    finally:
        await transaction.rollback()
    return _differences(name, expected, live) or [ok(name, f"{len(expected)} objects as migrated", patient.schema)]


async def check_plans(patient: Patient) -> list[Finding]:
    """Ask the planner for the plans of the statements that run all the time, in a session as the workers have."""
    name, settings = "plans", patient.settings
    conn = await connect(
        settings.direct_dsn(),
        role="doctor",
        schema=patient.schema,
        pinned=True,
        command_timeout=STATEMENT_TIMEOUT,
        login=login_of(settings),
    )
    found: list[Finding] = []
    try:
        await conn.execute("set default_transaction_read_only = on")
        await conn.execute("set plan_cache_mode = force_generic_plan")
        for statement, (file, index) in HOT.items():
            nodes = await _plan(conn, patient, load(file, patient.schema)[statement])
            if problem := judge_plan(nodes, index):
                do = f"compare with `taskqd doctor`'s drift; analyze {patient.schema}.jobs; reindex {index}"
                why = f"it should go through {index}, and slows down with the table otherwise"
                found.append(fail(name, f"statement {statement}", problem, why, do))
    finally:
        await close(conn)
    return found or [ok(name, f"{len(HOT)} statements go through their indexes")]


def judge_plan(nodes: list[dict[str, Any]], index: str) -> str:
    """Return what is wrong with a plan that should reach the jobs through ``index``, or nothing."""
    on_jobs = [node for node in nodes if node.get("Relation Name") == "jobs"]
    for node in on_jobs:
        if node["Node Type"] not in _GOOD_NODES:
            return f"reads jobs by {node['Node Type']}"
        if node.get("Index Name", index) != index:
            return f"reads jobs through {node['Index Name']}"
    if not any(node.get("Index Name") == index for node in nodes):
        return "does not read jobs through an index"
    bitmaps = [node["Index Name"] for node in nodes if node["Node Type"] == "Bitmap Index Scan"]
    return f"builds a bitmap of {bitmaps[0]}" if bitmaps else ""


# -- drift ----------------------------------------------------------------------------------------


async def _apply(conn: asyncpg.Connection, file: MigrationFile, scratch: str) -> None:
    sql = render(file.sql, scratch)
    if file.in_transaction:
        await conn.execute(sql)
        return
    for statement in split_statements(sql):
        # What must run outside a transaction builds the same inside one, where nobody else can see it.
        await conn.execute(statement.replace(" concurrently", "").replace(" CONCURRENTLY", ""))


async def _objects(patient: Patient, schema: str) -> _Objects:
    rows = await patient.rows("objects", schema)
    return {(row["kind"], row["owner"], row["part"]): row["definition"] for row in rows}


def _renamed(objects: _Objects, scratch: str, schema: str, identifier: str) -> _Objects:
    def rename(text: str) -> str:
        text = text.replace(f'"{scratch}"', quote(schema)).replace(f"'{scratch}'", f"'{schema}'")
        return text.replace(scratch, identifier)

    return {(kind, rename(owner), part): rename(text) for (kind, owner, part), text in objects.items()}


def _differences(name: str, expected: _Objects, live: _Objects) -> list[Finding]:
    found = []
    tables = {owner for kind, owner, _ in expected if kind == "table"}
    restore = "somebody changed it by hand: put it back as the migrations have it"
    for key, definition in expected.items():
        kind, owner, part = key
        if kind in _OWN_PARTS and ("table", owner, "") not in live:
            continue  # told of with its table
        where = ".".join(filter(None, [owner, part]))
        if key not in live:
            found.append(fail(name, f"{kind} {where}", "is missing", "statements fail, or crawl", restore))
        elif live[key] != definition:
            what = f"is {live[key]!r}, not {definition!r}" if kind != "function" else "has another text"
            found.append(fail(name, f"{kind} {where}", what, "code relies on it", restore))
    for kind, owner, part in live:
        if (kind, owner, part) not in expected and kind in _OWN_PARTS and owner in tables:
            why = "every write pays for it, and an index may end HOT updates"
            found.append(
                warn(name, f"{kind} {owner}.{part}", "is not taskqd's", why, "drop it, or know why it is there")
            )
    return found


# -- plans ----------------------------------------------------------------------------------------


async def _plan(conn: asyncpg.Connection, patient: Patient, sql: str) -> list[dict[str, Any]]:
    await conn.execute(f"prepare probe as {sql}")
    try:
        count = await conn.fetchval(patient.sql.parameters)
        arguments = f"({', '.join(['null'] * count)})" if count else ""
        text = await conn.fetchval(f"explain (format json, costs off) execute probe{arguments}")
    finally:
        await conn.execute("deallocate probe")
    return list(_nodes(json.loads(text)[0]["Plan"]))


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)
