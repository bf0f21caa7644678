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
@click.option(
    "--fleet",
    type=click.IntRange(min=1, max=10_000),
    default=1,
    metavar="N",
    help="Count N supervisors of this file, on as many hosts. Default: 1.",
)
@click.option("--offline", is_flag=True, help="Do not ask the server; compare with --max-connections, if given.")
@click.option(
    "--max-connections",
    type=click.IntRange(min=1, max=1_000_000),
    metavar="N",
    help="Compare with a server of this max_connections; needs --offline.",
)
@click.option("--time", "with_time", is_flag=True, help="Print the worst case of a stop instead.")
def command(file: str, as_json: bool, fleet: int, offline: bool, max_connections: int | None, with_time: bool) -> int:
    """Print the connections that a workgroup may hold at once, and whether the server grants them.

    Imports the actors, to see whether they work in transactions of their own, which takes a connection for each slot.
    Asks the server when it is reachable, and counts what others hold and what other groups of the schema have declared.
    With --time it prints how long a stop may take, process by process, and the actors that it interrupts, and asks no
    server. Exits 78 when the workgroup can never fit, 75 when only others keep it from fitting, else 0.
    """
    if max_connections is not None and not offline:
        raise click.UsageError("--max-connections needs --offline: a server that is asked says it itself")
    if with_time:
        return _print_time(file, as_json)
    arguments = [file, "--for", "budget", f"--fleet={fleet}"]
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
    return "\n".join([columns(_rows(budget)), "", *_notes(budget, asked)])


def _rows(budget: dict[str, Any]) -> list[tuple[str, ...]]:
    supervisors = budget["supervisors"]
    rows: list[tuple[str, ...]] = [("ROLE", "PROCESSES", "EACH", "IDLE", "DIRECT", "POOLED", "TOTAL")]
    for worker in budget["workers"]:
        processes = worker["replicas"] * supervisors
        sessions = worker["sessions"]
        name = f"{worker['name']} (max_concurrency {worker['max_concurrency']})"
        each, idle = (sum(part[key] for part in sessions) for key in ("each", "idle"))
        rows.append(_row(name, worker["direct"], worker["pooled"], processes=processes, each=each, idle=idle))
        for part in sessions:
            held = part["each"] * processes
            direct, pooled = (0, held) if part["pooled"] else (held, 0)
            rows.append(_row(f"  {part['role']}", direct, pooled, each=part["each"], idle=part["idle"]))
    if budget["leader"]:
        rows.append(_row("elected leader", budget["leader"], 0, idle=budget["leader_idle"]))
    rows.append(_total("web pods", budget["web_connections"], processes=budget["web_pods"]))
    rows.append(_total("application", budget["app_connections"]))
    rows.append(_row("steady", budget["direct"], budget["pooled"], total=budget["total"]))
    if budget["scheduler"]:
        each = budget["scheduler"] // supervisors
        idle = budget["scheduler_idle"] // supervisors
        rows.append(_row("scheduler", budget["scheduler"], 0, processes=supervisors, each=each, idle=idle))
    rows.append(_row("preflight", budget["preflight"], 0, processes=supervisors, each=1, idle=0))
    if budget["pooler"]:
        rows.append(_total("pooler, in place of the pooled", budget["pooler_sessions"]))
    rows.append(_total("required", budget["required"], idle=budget["idle"]))
    rows.append(_total("rotation of credentials", budget["rotation"], processes=supervisors))
    rows.append(_total("surge of a roll", budget["surge"], processes=supervisors))
    rows.append(_total("peak", budget["peak"]))
    return rows


def _notes(budget: dict[str, Any], asked: bool) -> list[str]:
    notes = [f"database {budget['database']}, schema {budget['schema']}"]
    notes += [f'{name}: replicas = "auto": {why}' for name, why in budget["auto_replicas"].items()]
    if budget["pooler"]:
        notes += [f"pooled connections go to {budget['pooled_database']}", _pooler(budget)]
    notes += _server(budget, asked)
    if budget["pgbouncer_recommended"] and not budget["pooler"]:
        notes.append("above 80 connections a pooler such as PgBouncer is recommended for the pooled ones")
    return notes


def _pooler(budget: dict[str, Any]) -> str:
    limits, peak = budget["pooler_limits"], budget["pooler_peak"]
    if limits is None:
        return (
            f"the pooler did not say what it allows ({budget['pooler_unknown']}): it must take {peak} clients "
            "(max_client_conn), and what it opens at the server (default_pool_size) is not counted"
        )
    verdict = "fits" if peak <= limits["max_client_conn"] else f"{peak - limits['max_client_conn']} too many"
    return (
        f"pooler: max_client_conn {limits['max_client_conn']}, at most {peak} of this group: {verdict}; "
        f"it opens up to {limits['pool_size']} sessions at the server"
    )


def _server(budget: dict[str, Any], asked: bool) -> list[str]:
    limits = budget["limits"]
    if limits is None:
        return ["not compared with a server"]
    reserved = limits["superuser_reserved"] + limits["reserved"]
    line = f"max_connections {limits['max_connections']} - reserved {reserved} = available {budget['available']}"
    if limits["limited_by"]:
        line = f"connection limit of {limits['limited_by']}: available {budget['available']}"
    lines = [f"{line}; others hold {limits['others']} now" if asked else line]
    for group in limits["groups"]:
        lines.append(f"group {group['name']} of this schema: {group['declared']} declared, {group['live']} live")
    if budget["over"]:
        return [*lines, f"verdict: {budget['verdict']}, {budget['over']} too many"]
    if budget["peak_over"]:
        return [*lines, f"verdict: fits; the peak does not, {budget['peak_over']} too many"]
    return [*lines, "verdict: fits"]


def _row(
    name: str,
    direct: int,
    pooled: int,
    *,
    processes: int | str = "",
    each: int | str = "",
    idle: int | str = "",
    total: int | None = None,
) -> tuple[str, ...]:
    together = direct + pooled if total is None else total
    return name, str(processes), str(each), str(idle), str(direct), str(pooled), str(together)


def _total(name: str, total: int, *, processes: int | str = "", idle: int | str = "") -> tuple[str, ...]:
    return name, str(processes), "", str(idle), "", "", str(total)
