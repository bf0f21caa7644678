"""``taskqd insights``: how queues and schedules get on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import click

from taskqd.cli.columns import columns
from taskqd.cli.session import session
from taskqd.settings import load_settings
from taskqd.settings.durations import parse_duration
from taskqd.storage.boot import admit
from taskqd.storage.insights import Insights, QueueFigures, ScheduleFigures, check_window, insights_sql, read_insights


def _window(_ctx: click.Context, _param: click.Parameter, value: str) -> float:
    try:
        window = parse_duration(value)
        check_window(window)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return window


@click.command()
@click.option(
    "--window", default="1h", show_default=True, callback=_window, metavar="TIME", help="How far to look back."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--sql", "as_sql", is_flag=True, help="Print the statements instead, for psql or a dashboard.")
def command(window: float, as_json: bool, as_sql: bool) -> None:
    """Show what queues and schedules did lately, and who is starved, drains slowly, is idle, or runs away.

    It reads at most the 100,000 newest ended jobs. The database is TASKQ_PG_DSN_DIRECT, else TASKQ_PG_DSN.
    """
    settings = load_settings()
    if as_sql:
        for name, sql in insights_sql(settings.schema_name, window=window).items():
            click.echo(f"-- {name}\n{sql};\n")
        return

    async def run() -> Insights:
        async with session(settings, "insights", writable=False) as conn:
            await admit(conn, settings)
            return await read_insights(conn, settings.schema_name, window=window)

    found = asyncio.run(run())
    click.echo(json.dumps(_as_json(found), indent=2) if as_json else _as_text(found))


def _as_json(found: Insights) -> dict[str, Any]:
    queues = [
        {**asdict(one), "rate": one.rate, "drain": one.drain, "utilisation": one.utilisation, "load": one.load}
        for one in found.queues
    ]
    verdicts = [{**asdict(each), "kind": each.kind.value} for each in found.found]
    schedules = [asdict(one) for one in found.schedules]
    return {"window": found.window, "found": verdicts, "queues": queues, "schedules": schedules}


def _as_text(found: Insights) -> str:
    parts = []
    if found.queues:
        head = [
            "queue",
            "waiting",
            "oldest",
            "p95 wait",
            "running",
            "ended",
            "badly",
            "per hour",
            "drain",
            "slots",
            "used",
        ]
        parts.append(columns([head, *map(_queue, found.queues)]))
    if found.schedules:
        head = ["schedule", "actor", "fired", "cleared", "fired before", "cleared before", "backlog", "skipped"]
        parts.append(columns([head, *map(_schedule, found.schedules)], left=(0, 1)))
    lines = [f"{each.kind.value}: {each.subject}: {each.what}\n  {each.do}" for each in found.found]
    parts.append("\n".join(lines) if lines else "nothing is starved, drains slowly, idles or runs away")
    return "\n\n".join(parts)


def _queue(one: QueueFigures) -> list[str]:
    return [
        one.queue,
        str(one.waiting),
        _seconds(one.oldest_wait if one.waiting else None),
        _seconds(one.wait_p95),
        str(one.running),
        str(one.ended),
        str(one.ended_badly),
        f"{one.rate * 3600:.0f}",
        _seconds(one.drain if one.waiting else None),
        str(one.slots),
        "-" if one.utilisation is None else f"{one.utilisation:.0%}",
    ]


def _schedule(one: ScheduleFigures) -> list[str]:
    counts = (one.fired, one.cleared, one.fired_before, one.cleared_before, one.backlog, one.skipped)
    return [one.name, one.actor, *map(str, counts)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"
