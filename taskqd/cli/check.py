"""``taskqd check FILE``: everything that can be known about a workgroup without starting it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import click

from taskqd.cli.columns import columns
from taskqd.cli.findings import Finding, PlatformError
from taskqd.cli.stop_report import interrupted_lines, shorten
from taskqd.supervisor.consult import consult_alone
from taskqd.supervisor.plan import ChildSpec, Plan


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--show", is_flag=True, help="Print every effective value of each process, its unit and its source.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--platform", type=click.Choice(["systemd", "k8s"]), help="Compare with a unit or a manifest.")
@click.option("--unit", "units", multiple=True, metavar="FILE", help="The unit; repeat it for drop-ins, in order.")
@click.option("--manifest", metavar="FILE", help="The manifest, of one or more documents; - is standard input.")
def command(
    file: str, show: bool, as_json: bool, platform: str | None, units: tuple[str, ...], manifest: str | None
) -> int:
    """Validate a workgroup file: its keys, every setting, and that the actors import.

    With --platform it also compares what the platform grants with what the group needs. Warns about queues that
    nobody serves, and lists the actors that a stop may interrupt. Starts nothing and does not touch the database.
    Exits 0 when all is well, 78 with every problem when not.
    """
    _check_usage(platform, units, manifest)
    arguments = [file, "--for", "check", *(["--show"] if show else [])]
    plan, warnings = asyncio.run(consult_alone(arguments))
    findings = _compare(plan, platform, units, manifest)
    errors = [finding for finding in findings if finding.fatal]
    if errors:
        raise PlatformError(findings)
    warnings += [*map(str, findings), *_unserved(plan.report)]
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(_as_json(plan, warnings, show), indent=2))
    else:
        click.echo("\n".join(_as_text(plan, show)))
    return 0


def _check_usage(platform: str | None, units: tuple[str, ...], manifest: str | None) -> None:
    wanted = {"systemd": ("--unit", bool(units)), "k8s": ("--manifest", manifest is not None)}
    for name, (option, given) in wanted.items():
        if (platform == name) != given:
            raise click.UsageError(f"--platform {name} and {option} FILE go together")


def _compare(plan: Plan, platform: str | None, units: tuple[str, ...], manifest: str | None) -> list[Finding]:
    if platform == "systemd":
        from taskqd.cli.systemd_unit import compare_unit

        return compare_unit(plan, units)
    if manifest is not None:
        from taskqd.cli.manifest import compare_manifest

        return compare_manifest(plan, manifest)
    return []


def _unserved(report: dict[str, Any]) -> list[str]:
    return [
        f"queue {each['queue']!r}: no worker that knows its actors serves it, so that their jobs wait: "
        f"{shorten(each['actors'])}"
        for each in report["unserved"]
    ]


def _as_json(plan: Plan, warnings: list[str], show: bool) -> dict[str, Any]:
    found = {"group": plan.group, "warnings": warnings, **plan.report, "connections": plan.budget["required"]}
    if not show:
        del found["values"]
    return found


def _as_text(plan: Plan, show: bool) -> list[str]:
    processes = sum(child.replicas for child in plan.children)
    lines = [f"ok: workgroup {plan.group!r}, {processes} processes"]
    lines += [f"  {_describe(child, plan.budget['auto_replicas'])}" for child in plan.children]
    forked = plan.report["forked"]
    zygotes = len({child.zygote for child in plan.children if child.name in forked})
    if zygotes:
        what = "one process that has" if zygotes == 1 else f"{zygotes} processes that have"
        lines.append(f"  forked from {what} imported the actors: {', '.join(forked)}")
    stop = plan.report["stop"]
    lines.append(
        f"  up to {plan.budget['required']} database connections; stops within {plan.grace:g} s "
        f"({stop['worst_case']:g} at worst)"
    )
    lines += [f"  {line}" for line in interrupted_lines(plan.report)]
    if show:
        lines += ["", _values(plan.report["values"])]
    return lines


def _describe(child: ChildSpec, decided: dict[str, str]) -> str:
    graces = f"{child.graces.cancellation:g} s to finish, {child.graces.cleanup:g} s to clean up"
    auto = f" (auto: {decided[child.name]})" if child.name in decided else ""
    return f"{child.name} × {child.replicas}{auto}: taskqd {' '.join(child.arguments)} ({graces})"


def _values(values: list[dict[str, Any]]) -> str:
    rows = [("PROCESS", "NAME", "VALUE", "UNIT", "SOURCE")]
    rows += [(each["part"], each["name"], _shown(each["value"]), each["unit"] or "", each["source"]) for each in values]
    return columns(rows, left=range(5))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
