"""``taskqd target``: which installation a database is, and who may work on it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

import click

from taskqd.cli.session import session
from taskqd.settings import load_settings
from taskqd.settings.values import ENVIRONMENT_RULE, is_environment_name
from taskqd.storage.migrate import check_schema
from taskqd.storage.target import Identity, attest, bind, read_identity, rotate

if TYPE_CHECKING:
    import asyncpg

    from taskqd.settings import Settings

T = TypeVar("T")
MAX_REASON = 500


@click.group()
def command() -> None:
    """See and name the installation that a database is.

    Once an environment is bound to it, workers, schedulers, clients and commands whose TASKQ_ENVIRONMENT is another
    one, or none, are refused by the database, and so are those whose TASKQ_INSTALLATION_ID is. The database is
    TASKQ_PG_DSN_DIRECT, else TASKQ_PG_DSN.
    """


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(as_json: bool) -> None:
    """Show the installation and what it is bound to."""
    schema, found = _run(lambda conn, settings: read_identity(conn, settings.schema_name))
    if as_json:
        bound_at = found.bound_at.isoformat() if found.bound_at else None
        fields = {"installation_id": str(found.installation_id), "environment": found.environment}
        told = {"schema": schema, **fields, "version": found.version, "bound_at": bound_at, "bound_by": found.bound_by}
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(_describe(schema, found))


@command.command(name="bind")
@click.argument("environment", callback=lambda _ctx, _param, value: _environment(value))
@click.option("--reason", callback=lambda _ctx, _param, value: _reason(value), help="Why, for the audit.")
def bind_(environment: str, reason: str | None) -> None:
    """Bind it to ENVIRONMENT, once. From then on the database turns away whoever is configured for another."""
    schema, new = _run(lambda conn, settings: bind(conn, settings.schema_name, environment, reason))
    click.echo(f"schema {schema} {'is now' if new else 'was already'} bound to environment {environment}")


@command.command(name="rotate")
@click.argument("environment", callback=lambda _ctx, _param, value: _environment(value))
@click.option("--from", "was", type=click.UUID, required=True, metavar="ID", help="The installation that it is now.")
@click.option(
    "--reason", required=True, callback=lambda _ctx, _param, value: _reason(value), help="Why, for the audit."
)
def rotate_(environment: str, was: UUID, reason: str) -> None:
    """Make another installation of it, of ENVIRONMENT: a new id, as a clone of a database needs.

    What runs on it goes on until it starts again. A restored database keeps its identity and needs no rotation.
    """
    schema, new = _run(lambda conn, settings: rotate(conn, settings.schema_name, environment, was, reason))
    click.echo(f"schema {schema} is now installation {new} of environment {environment}")


@command.command(name="attest")
def attest_() -> None:
    """Ask as a worker does before it starts: exits 0 when these settings are meant for this database, 78 when not."""
    schema, found = _run(lambda conn, settings: attest(conn, settings.schema_name, settings))
    click.echo(f"schema {schema} is installation {_short(found)} and admits these settings")


def _run(work: Callable[[asyncpg.Connection, Settings], Awaitable[T]]) -> tuple[str, T]:
    settings = load_settings()

    async def run() -> T:
        async with session(settings, "target") as connection:
            await check_schema(connection, settings.schema_name)
            return await work(connection, settings)

    return settings.schema_name, asyncio.run(run())


def _describe(schema: str, found: Identity) -> str:
    head = f"schema {schema} is installation {_short(found.installation_id)}"
    if found.environment is None:
        return f"{head}, bound to no environment: it admits everybody"
    return (
        f"{head} of environment {found.environment}, bound by {found.bound_by} at {found.bound_at:%Y-%m-%d %H:%M:%S%z}"
    )


def _short(installation: UUID | None) -> str:
    return f"…{str(installation)[-8:]}"


def _environment(name: str) -> str:
    if not is_environment_name(name):
        raise click.UsageError(f"ENVIRONMENT {name!r} {ENVIRONMENT_RULE}")
    return name


def _reason(text: str | None) -> str | None:
    if text is not None and not 1 <= len(text.strip()) <= MAX_REASON:
        raise click.UsageError(f"--reason must be 1 to {MAX_REASON} characters")
    return text
