"""``taskqd schedule``: see, plan, change and steer what runs by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from zoneinfo import ZoneInfo

import click

from taskqd.cli.columns import columns
from taskqd.cli.schedule_text import plan_object, plan_text, schedule_object, time_text, when_text
from taskqd.cli.session import session
from taskqd.domain.arguments import check_reason
from taskqd.domain.errors import ConfigError, ScheduleChangedError, TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.domain.names import nearest
from taskqd.domain.recurrence import recurrence
from taskqd.domain.schedule import Schedule
from taskqd.maintenance.slots import next_slots, slots_between
from taskqd.scheduler.manifest import SchedulePlan, Source, plan_schedules, read_manifest
from taskqd.settings import load_settings
from taskqd.settings.durations import parse_duration
from taskqd.storage.boot import admit
from taskqd.storage.schedules import (
    Steering,
    StoredSchedule,
    change_schedule,
    create_schedule,
    decisions_on,
    fire_slots,
    known_actors,
    read_schedules,
    run_now,
    steer_schedule,
)

if TYPE_CHECKING:
    import asyncpg

T = TypeVar("T")
BACKFILL_BATCH = 500
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _reason(_context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    try:
        check_reason(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from None
    return value


_reason_option = click.option("--reason", callback=_reason, metavar="TEXT", help="Why; kept with the decision.")
_version_option = click.option(
    "--version", "version", type=click.IntRange(1, 2**31 - 1), metavar="N", help="Only if it still has this version."
)
_wanted_options = [
    click.argument("file", required=False, type=click.Path(path_type=Path)),
    click.option("--actors", metavar="MODULE:ATTR", help="Take what actors declare, instead of a file."),
]


@click.group()
def command() -> None:
    """See, plan, change and steer schedules.

    The database is TASKQ_PG_DSN_DIRECT, else TASKQ_PG_DSN. What comes from code is changed by --actors, what comes from
    a manifest by its file; neither touches the other's.
    """


def _wanted(function: Any) -> Any:
    for option in reversed(_wanted_options):
        function = option(function)
    return function


@command.command()
@_wanted
@_json_option
def plan(file: Path | None, actors: str | None, as_json: bool) -> int:
    """Show what `apply` would change. Changes nothing.

    Exits 1 when something would be refused, else 0. Warns of actors of a file that no worker has made known.
    """
    wanted, source = _declared(file, actors)

    async def read(connection: asyncpg.Connection, schema: str) -> SchedulePlan:
        await _warn_of_strangers(connection, schema, wanted, source)
        return plan_schedules(await read_schedules(connection, schema), wanted, source)

    found = _run(read)
    click.echo(json.dumps(plan_object(found), indent=2) if as_json else plan_text(found))
    return ExitCode.ERROR if found.refused else ExitCode.DONE


@command.command()
@_wanted
@click.option("--plan", "digest", metavar="DIGEST", help="Apply only if this is still the plan, as `plan` named it.")
def apply(file: Path | None, actors: str | None, digest: str | None) -> None:
    """Make the stored schedules the same as the file's, or the actors', all of them or none.

    Creates and changes; never removes (`retire` does). Exits 75 when something was changed meanwhile: plan again.
    """
    wanted, source = _declared(file, actors)

    async def make(connection: asyncpg.Connection, schema: str) -> SchedulePlan:
        await _warn_of_strangers(connection, schema, wanted, source)
        async with connection.transaction():
            found = plan_schedules(await read_schedules(connection, schema), wanted, source)
            if digest is not None and digest != found.digest:
                raise ScheduleChangedError(f"the plan is {found.digest} now, not {digest}; look at it again")
            if found.refused:
                refused = found.refused[0]
                raise ConfigError(f"schedule {refused.wanted.name!r} is refused: {refused.why}")
            for change in found.changes:
                if change.action == "create":
                    done = await create_schedule(connection, schema, change.wanted, source)
                elif change.action == "change" and change.stored is not None:
                    done = await change_schedule(connection, schema, change.stored, change.wanted, source, change.why)
                else:
                    continue
                if not done:
                    raise ScheduleChangedError(f"schedule {change.wanted.name!r} was changed meanwhile; plan again")
        return found

    click.echo(plan_text(_run(make), done=True))


@command.command(name="list")
@click.option("--all", "everything", is_flag=True, help="Retired ones too.")
@_json_option
def list_(everything: bool, as_json: bool) -> None:
    """List the schedules with their next slots."""
    found = [one for one in _run(read_schedules) if everything or one.retired_at is None]
    if as_json:
        click.echo(json.dumps([schedule_object(one) for one in found], indent=2))
    elif not found:
        click.echo("no schedules")
    else:
        head = ("NAME", "STATE", "WHEN", "ZONE", "ACTOR", "SOURCE", "NEXT", "LAST", "FAILURES")
        rows = [
            (
                one.name,
                one.state,
                when_text(one),
                one.timezone,
                one.actor,
                one.source,
                time_text(one.next_fire_at) if one.state == "active" else "-",
                time_text(one.last_fired_at),
                str(one.failures),
            )
            for one in found
        ]
        click.echo(columns([head, *rows], left=range(8)))


@command.command()
@click.argument("name")
@_json_option
def show(name: str, as_json: bool) -> None:
    """Show one schedule and what was decided on it last."""

    async def read(connection: asyncpg.Connection, schema: str) -> dict[str, Any]:
        stored = await _find(connection, schema, name)
        return schedule_object(stored) | {"decisions": await decisions_on(connection, schema, stored.id, 10)}

    found = _run(read)
    if as_json:
        click.echo(json.dumps(found, indent=2, default=str))
        return
    decisions = found.pop("decisions")
    width = max(map(len, found))
    for key, value in found.items():
        if value not in (None, {}, ""):
            click.echo(f"{key:<{width}}  {value if isinstance(value, (str, int)) else json.dumps(value, default=str)}")
    if decisions:
        head = ("DECIDED", "WHAT", "FIRED", "SUPPRESSED", "SKIPPED", "WHY")
        rows = [
            (
                time_text(one["decided_at"]),
                one["action"],
                *(str(one[key]) for key in ("fired", "suppressed", "skipped")),
                one["reason"] or "",
            )
            for one in decisions
        ]
        click.echo("\n" + columns([head, *rows], left=(0, 1, 5)))


def _steer(name: str, steering: Steering, version: int | None, reason: str | None) -> None:
    async def change(connection: asyncpg.Connection, schema: str) -> str:
        stored = await _find(connection, schema, name)
        if await steer_schedule(connection, schema, name, steering, version, reason):
            return f"{name} is {steering}"
        if version is not None and stored.version != version:
            raise ScheduleChangedError(f"schedule {name!r} has version {stored.version}, not {version}")
        if stored.retired_at is not None and steering != "retired":
            raise ConfigError(f"schedule {name!r} is retired for good")
        return f"{name} was {stored.state} already"

    click.echo(_run(change))


@command.command()
@click.argument("name")
@_version_option
@_reason_option
def pause(name: str, version: int | None, reason: str | None) -> None:
    """Let a schedule fire no more until it is resumed."""
    _steer(name, "paused", version, reason)


@command.command()
@click.argument("name")
@_version_option
@_reason_option
def resume(name: str, version: int | None, reason: str | None) -> None:
    """Let a paused schedule fire again, from its next slot on; its failures are forgotten."""
    _steer(name, "resumed", version, reason)


@command.command()
@click.argument("name")
@_version_option
@_reason_option
@click.confirmation_option("--yes", prompt="A retired schedule does not come back, nor does its name. Retire it?")
def retire(name: str, version: int | None, reason: str | None) -> None:
    """End a schedule for good; what it fired stays."""
    _steer(name, "retired", version, reason)


@command.command(name="run-now")
@click.argument("name")
def run_now_(name: str) -> int:
    """Fire a schedule once, now, whatever its slots; at most every ten seconds.

    Exits 1 when its job was kept out by another one.
    """

    async def fire(connection: asyncpg.Connection, schema: str) -> str:
        await _find(connection, schema, name)
        return await run_now(connection, schema, name)

    outcome = _run(fire)
    click.echo(f"{name}: {outcome}")
    return ExitCode.DONE if outcome == "fired" else ExitCode.ERROR


@command.command()
@click.argument("name")
@click.option("--from", "begin", required=True, metavar="TIME", help="ISO 8601, with a time zone.")
@click.option("--to", "end", metavar="TIME", help="Default: now.")
@click.option("--dry-run", is_flag=True, help="Print the slots.")
def backfill(name: str, begin: str, end: str | None, dry_run: bool) -> None:
    """Fire the slots of a span of the past that were never decided on: each once, at most 10,000.

    With overlap = forbid the oldest fires, and the others are suppressed.
    """
    first, last = _instant("--from", begin), None if end is None else _instant("--to", end)

    async def fill(connection: asyncpg.Connection, schema: str) -> str:
        stored = await _find(connection, schema, name)
        slots = slots_between(stored, first, min(last or stored.now, stored.now))
        if dry_run:
            return "\n".join(slot.isoformat() for slot in slots) or "no slots"
        fired = suppressed = 0
        for start in range(0, len(slots), BACKFILL_BATCH):
            part = slots[start : start + BACKFILL_BATCH]
            jobs, kept_out = await fire_slots(connection, schema, stored.id, stored.version, part, "backfilled")
            fired, suppressed = fired + jobs, suppressed + kept_out
        before = len(slots) - fired - suppressed
        told = f"{name}: {len(slots)} slots, {fired} fired"
        told += f", {suppressed} suppressed" if suppressed else ""
        return told + (f", {before} decided before" if before else "")

    click.echo(_run(fill))


@command.command()
@click.argument("name", required=False)
@click.option("--cron", "expression", metavar="EXPRESSION", help="An expression, instead of a stored schedule.")
@click.option("--every", "interval", metavar="DURATION", help="An interval, instead of a stored schedule.")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="With --cron.")
@click.option("--dst-strategy", default="skip", type=click.Choice(["skip", "firstof", "allof"]), help="With --cron.")
@click.option("-n", "count", type=click.IntRange(1, 1000), default=10, show_default=True, help="How many slots.")
def preview(
    name: str | None, expression: str | None, interval: str | None, timezone: str, dst_strategy: Any, count: int
) -> None:
    """Print the next slots of a schedule, stored or not, in UTC and in its time zone."""
    if sum(one is not None for one in (name, expression, interval)) != 1:
        raise click.UsageError("give exactly one of NAME, --cron and --every")
    if name is not None:
        stored = _run(lambda connection, schema: _find(connection, schema, name))
        slots, zone = next_slots(stored, count), stored.timezone
    else:
        kind: Any = "cron" if expression is not None else "every"
        if interval is not None:
            try:
                expression = str(parse_duration(interval))
            except ValueError as error:
                raise click.UsageError(f"--every {interval!r} {error}") from None
        found = recurrence(kind, expression or "", timezone, dst_strategy, "")
        slots, zone = [found.first_after(datetime.now(UTC))], timezone
        while len(slots) < count:
            slots.append(found.next_after(slots[-1]))
    for slot in slots:
        click.echo(f"{slot:%Y-%m-%d %H:%M:%S}Z  {slot.astimezone(ZoneInfo(zone)):%a %Y-%m-%d %H:%M:%S %Z}")


# -- the database -----------------------------------------------------------------------------------


def _run(work: Callable[[asyncpg.Connection, str], Coroutine[Any, Any, T]]) -> T:
    settings = load_settings()

    async def run() -> T:
        async with session(settings, "schedule") as connection:
            await admit(connection, settings)
            return await work(connection, settings.schema_name)

    return asyncio.run(run())


async def _find(connection: asyncpg.Connection, schema: str, name: str) -> StoredSchedule:
    found = await read_schedules(connection, schema)
    for one in found:
        if one.name == name:
            return one
    raise TaskQError(f"no schedule {name!r}{nearest(name, [one.name for one in found])}")


def _declared(file: Path | None, actors: str | None) -> tuple[list[Schedule], Source]:
    if (file is None) == (actors is None):
        raise click.UsageError("give exactly one of FILE and --actors")
    if file is not None:
        return read_manifest(file), "manifest"
    from taskqd.actors.registry import load_registry
    from taskqd.actors.schedules import declared_schedules

    registry = load_registry(actors or "")
    return [one.definition for one in declared_schedules(registry.values()).values()], "decorator"


async def _warn_of_strangers(
    connection: asyncpg.Connection, schema: str, wanted: list[Schedule], source: Source
) -> None:
    """Say which actors of a file no worker has made known: a job of such an actor waits until one does."""
    if source != "manifest":
        return  # code names an actor by the actor itself
    known = set(await known_actors(connection, schema))
    for one in wanted:
        if one.actor not in known:
            told = f"schedule {one.name!r}: no worker has made actor {one.actor!r} known{nearest(one.actor, known)}"
            click.echo(f"warning: {told}; its jobs wait until one does", err=True)


def _instant(option: str, text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise click.UsageError(f"{option} {text!r} must be a time like 2026-03-01T03:00:00+01:00") from None
    if found.utcoffset() is None:
        raise click.UsageError(f"{option} {text!r} has no time zone; append Z or an offset like +01:00")
    return found.astimezone(UTC)
