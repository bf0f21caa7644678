"""``taskqd budget FILE``: the database connections of a workgroup, and the time of its stop."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from taskqd.cli.columns import columns
from taskqd.cli.stop_report import stop_table
from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.consult import consult_alone

_CODES = {"never fits": ExitCode.REFUSED, "crowded": ExitCode.TRY_AGAIN}


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--offline", is_flag=True, help="Do not ask the server; compare with --max-connections, if given.")
@click.option(
    "--max-connections",
    type=click.IntRange(min=1, max=1_000_000),
    metavar="N",
    help="Compare with a server of this max_connections; needs --offline.",
)
@click.option("--time", "with_time", is_flag=True, help="Print the worst case of a stop instead; imports the actors.")
def command(file: str, as_json: bool, offline: bool, max_connections: int | None, with_time: bool) -> int:
    """Print the connections that a workgroup may hold at once, and whether the server grants them.

    Asks the server when it is reachable. With --time it prints how long a stop may take, process by process, and the
    actors that it interrupts, and asks no server. Exits 78 when the workgroup can never fit, 75 when only the sessions
    of others keep it from fitting, else 0.
    """
    if max_connections is not None and not offline:
        raise click.UsageError("--max-connections needs --offline: a server that is asked says it itself")
    if with_time:
        return _print_time(file, as_json)
    arguments = [file, "--for", "budget"]
    if offline:
        arguments.append("--offline")
    if max_connections is not None:
        arguments.append(f"--max-connections={max_connections}")
    plan, warnings = asyncio.run(consult_alone(arguments))
    click.echo(json.dumps(plan.budget, indent=2) if as_json else as_table(plan.budget, asked=not offline))
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return _CODES.get(plan.budget["verdict"], ExitCode.DONE)


def _print_time(file: str, as_json: bool) -> int:
    plan, warnings = asyncio.run(consult_alone([file, "--for", "budget", "--offline", "--time"]))
    shown = {key: plan.report[key] for key in ("stop", "interrupted")}
    click.echo(json.dumps(shown, indent=2) if as_json else stop_table(shown))
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return ExitCode.DONE


def as_table(budget: dict[str, Any], *, asked: bool) -> str:
    """Return the budget for a person: what each role holds, and how that compares with the server.

    ``asked``: the limits come from the server itself.
    """
    rows: list[tuple[str, ...]] = [("ROLE", "PROCESSES", "DIRECT", "POOLED", "TOTAL")]
    for worker in budget["workers"]:
        name = f"{worker['name']} (max_concurrency {worker['max_concurrency']})"
        rows.append(_row(name, worker["replicas"], worker["direct"], worker["pooled"]))
    rows.append(_row("elected leader", "", budget["leader"], 0))
    rows.append(("web pods", str(budget["web_pods"]), "", "", str(budget["web_connections"])))
    rows.append(("application", "", "", "", str(budget["app_connections"])))
    rows.append(("steady", "", str(budget["direct"]), str(budget["pooled"]), str(budget["total"])))
    rows.append(_row("scheduler", 1 if budget["scheduler"] else 0, budget["scheduler"], 0))
    rows.append(_row("preflight", 1, budget["preflight"], 0))
    rows.append(("required", "", "", "", str(budget["required"])))
    notes = [f"database {budget['database']}, schema {budget['schema']}", *_server(budget, asked)]
    notes += [f'{name}: replicas = "auto": {why}' for name, why in budget["auto_replicas"].items()]
    if budget["pooler"]:
        notes.append("pooled connections end at the pooler and are not counted as required of the server")
    if budget["pgbouncer_recommended"]:
        notes.append("above 80 connections a pooler such as PgBouncer is recommended for the pooled ones")
    return "\n".join([columns(rows), "", *notes])


def _server(budget: dict[str, Any], asked: bool) -> list[str]:
    limits = budget["limits"]
    if limits is None:
        return ["not compared with a server"]
    reserved = limits["superuser_reserved"] + limits["reserved"]
    line = f"max_connections {limits['max_connections']} - reserved {reserved} = available {budget['available']}"
    if limits["limited_by"]:
        line = f"connection limit of {limits['limited_by']}: available {budget['available']}"
    lines = [f"{line}; others hold {limits['others']} now" if asked else line]
    if budget["over"]:
        return [*lines, f"verdict: {budget['verdict']}, {budget['over']} too many"]
    return [*lines, "verdict: fits"]


def _row(name: str, processes: int | str, direct: int, pooled: int) -> tuple[str, ...]:
    return name, str(processes), str(direct), str(pooled), str(direct + pooled)
