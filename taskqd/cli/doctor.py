"""``taskqd doctor``: what is wrong with an installation, why it matters, and what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import click

from taskqd.cli.session import session
from taskqd.domain.errors import SchemaNotMigratedError, SchemaOutOfRangeError
from taskqd.domain.exit_codes import ExitCode
from taskqd.settings import load_settings
from taskqd.storage import doctor_queue, doctor_schema, doctor_server
from taskqd.storage.doctor import Check, Finding, Severity, examine
from taskqd.storage.migrate import check_schema

CHECKS: dict[str, Check] = {
    "migrations": doctor_schema.check_migrations,
    "target": doctor_schema.check_target,
    "drift": doctor_schema.check_drift,
    "plans": doctor_schema.check_plans,
    "snapshots": doctor_server.check_snapshots,
    "vacuum": doctor_server.check_vacuum,
    "notifications": doctor_server.check_notifications,
    "clock": doctor_server.check_clock,
    "connections": doctor_server.check_connections,
    "jit": doctor_server.check_settings,
    "service": doctor_queue.check_service,
    "limits": doctor_queue.check_caps,
    "progress": doctor_queue.check_progress,
    "insights": doctor_queue.check_insights,
    "schedules": doctor_queue.check_schedules,
    "maintenance": doctor_queue.check_maintenance,
}
"""What is looked at, in this order."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--fix-sql", is_flag=True, help="Print the statements that set right what can be, and nothing else.")
def command(as_json: bool, fix_sql: bool) -> int:
    """Look for what is wrong with an installation: its schema, the server, its jobs, who maintains it.

    Changes nothing. Exits 0 when all is well, 5 when something is not. The database is TASKQ_PG_DSN_DIRECT, else
    TASKQ_PG_DSN.
    """
    settings = load_settings()

    async def run() -> list[Finding]:
        async with session(settings, "doctor") as conn:
            first = await examine(conn, settings, [("migrations", CHECKS["migrations"])])
            try:
                await check_schema(conn, settings.schema_name)
            except (SchemaNotMigratedError, SchemaOutOfRangeError):
                return first  # there is nothing that the others could look at
            return first + await examine(conn, settings, [each for each in CHECKS.items() if each[0] != "migrations"])

    findings = asyncio.run(run())
    healthy = all(each.severity is Severity.OK for each in findings)
    if fix_sql:
        for fix in dict.fromkeys(each.fix for each in findings if each.fix):
            click.echo(fix)
    elif as_json:
        told = {"schema": settings.schema_name, "healthy": healthy, "findings": [each.to_dict() for each in findings]}
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(_as_text(settings.schema_name, findings))
    return ExitCode.DONE if healthy else ExitCode.DEGRADED


def _as_text(schema: str, findings: Sequence[Finding]) -> str:
    lines = []
    for each in findings:
        where = f"{each.where}: " if each.where else ""
        lines.append(f"{each.severity.value:<5} {each.check:<14} {where}{each.what}")
        if each.severity is not Severity.OK:
            lines += [f"{'':<21}{text}" for text in (f"why: {each.why}", f"do:  {each.do}")]
    wrong = sum(each.severity is not Severity.OK for each in findings)
    return "\n".join([*lines, f"schema {schema}: " + (f"{wrong} finding{'s' * (wrong > 1)}" if wrong else "healthy")])
