"""``taskqd migrate``: bring the schema to the level of this release, or tell where it stands."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import click

from taskqd.cli.session import session
from taskqd.domain.exit_codes import ExitCode
from taskqd.settings import load_settings
from taskqd.storage.migrate import CODE_LEVEL, MIN_SCHEMA, Applied, Status, migrate_status, migrate_up
from taskqd.storage.target import attest

if TYPE_CHECKING:
    from taskqd.settings import Settings

_schema_option = click.option(
    "--schema", metavar="NAME", help="The schema to work on, instead of TASKQ_SCHEMA_NAME (default: taskq)."
)


@click.group()
def command() -> None:
    """Apply the database migrations, or show which are applied.

    The database is TASKQ_PG_DSN_DIRECT, else TASKQ_PG_DSN.
    """


@command.command()
@_schema_option
@click.option("--target", type=click.IntRange(min=1), metavar="NNNN", help="The last version to apply.")
@click.option("--max-steps", type=click.IntRange(min=1), metavar="N", help="Apply at most N files.")
@click.option("--phase", type=click.Choice(["pre", "post"]), help="Apply only files of this phase.")
@click.option(
    "--ddl-lock-timeout",
    type=click.FloatRange(min=0.001, max=3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for another migration, and for each lock of a file.",
)
def up(
    schema: str | None, target: int | None, max_steps: int | None, phase: str | None, ddl_lock_timeout: float
) -> None:
    """Apply the pending migrations; safe to run again and from several places at once.

    Run `up --phase pre` before new code is rolled out, and `up` once no older code runs.
    """

    async def run(settings: Settings) -> None:
        async with session(settings, "migrate") as conn:
            await attest(conn, settings.schema_name, settings)
            applied = await migrate_up(
                conn,
                settings.schema_name,
                target=target,
                max_steps=max_steps,
                phase=phase,
                lock_timeout=ddl_lock_timeout,
                on_applied=_print_applied,
            )
            status = await migrate_status(conn, settings.schema_name)
        done = f"{len(applied)} applied" if applied else "nothing to do"
        click.echo(f"{done}; {_summary(settings.schema_name, status)}")

    asyncio.run(run(_settings(schema)))


@command.command()
@_schema_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(schema: str | None, as_json: bool) -> int:
    """Show the applied and the pending migrations.

    Exits 1 when a pre migration is pending or an applied file was changed, else 0.
    """

    async def read(settings: Settings) -> Status:
        async with session(settings, "migrate", writable=False) as conn:
            return await migrate_status(conn, settings.schema_name)

    settings = _settings(schema)
    found = asyncio.run(read(settings))
    click.echo(_as_json(settings.schema_name, found) if as_json else _as_table(settings.schema_name, found))
    usable = not found.drift and all(file.phase == "post" for file in found.pending)
    return ExitCode.DONE if usable else ExitCode.ERROR


def _settings(schema: str | None) -> Settings:
    return load_settings({"schema_name": schema})


def _print_applied(applied: Applied) -> None:
    click.echo(f"{applied.file.filename} applied in {applied.seconds:.2f} s")


def _summary(schema: str, status: Status) -> str:
    pending = f", {len(status.pending)} pending" if status.pending else ""
    return f"schema {schema} is at migration {status.version}{pending}"


def _as_table(schema: str, status: Status) -> str:
    drift = {row.filename for row in status.drift}
    rows = [
        (
            row.filename,
            "changed since applied" if row.filename in drift else "applied",
            f"{row.applied_at:%Y-%m-%d %H:%M:%S%z} by {row.applied_by}",
        )
        for row in status.applied
    ]
    rows += [(file.filename, "pending", "") for file in status.pending]
    rows.sort(key=lambda row: (row[0][:4], ".post." in row[0]))
    table = [("MIGRATION", "STATE", "APPLIED"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in table]
    return "\n".join([*lines, _summary(schema, status)])


def _as_json(schema: str, status: Status) -> str:
    return json.dumps(
        {
            "schema": schema,
            "version": status.version,
            "code_level": CODE_LEVEL,
            "min_schema": MIN_SCHEMA,
            "applied": [
                {
                    "file": row.filename,
                    "version": row.version,
                    "phase": row.phase,
                    "min_code": row.min_code,
                    "checksum": row.checksum,
                    "applied_at": row.applied_at.isoformat(),
                    "applied_by": row.applied_by,
                }
                for row in status.applied
            ],
            "pending": [
                {"file": file.filename, "version": file.version, "phase": file.phase, "min_code": file.min_code}
                for file in status.pending
            ],
            "drift": [row.filename for row in status.drift],
        },
        indent=2,
    )
