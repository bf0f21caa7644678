"""``taskqd queue``: see queues, limit them, pause them, let their keys take turns."""

from __future__ import annotations

import json
from typing import Any

import click

from taskqd.cli.columns import columns
from taskqd.cli.rules import MAX_COUNTED, counted, limit_from, limit_text, query, single
from taskqd.domain.errors import ConfigError
from taskqd.domain.names import QUEUE_RULE, is_queue_name, nearest

_MODES = click.Choice(["strict_fifo", "round_robin"])


@click.group()
def command() -> None:
    """See and steer queues. Workers go by a change within 5 seconds.

    The database is TASKQ_PG_DSN_DIRECT, else TASKQ_PG_DSN.
    """


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the queues that have a rule, an actor, or jobs that wait."""
    queues = query("queues", MAX_COUNTED + 1)
    if as_json:
        click.echo(json.dumps([_object(queue) for queue in queues], indent=2))
        return
    rows = [["queue", "mode", "limit", "state", "waiting", "running"]]
    for queue in queues:
        rows.append(
            [
                queue["name"],
                queue["mode"],
                limit_text(queue["max_concurrent"]),
                "paused" if queue["paused_at"] else "open",
                counted(queue["waiting"]),
                str(queue["running"]),
            ]
        )
    click.echo(columns(rows, left=(0, 1, 3)))


@command.command(name="set")
@click.argument("name")
@click.option("--max-concurrent", callback=limit_from(1), metavar="N|none", help="Most jobs of it that run at once.")
@click.option("--mode", type=_MODES, help="Oldest first, or fairness keys in turns.")
@click.option("--create", is_flag=True, help="Also one that no worker, actor or job knows yet.")
def set_(name: str, max_concurrent: Any, mode: str | None, create: bool) -> None:
    """Limit a queue, or choose how it is served."""
    if max_concurrent is None and mode is None:
        raise click.UsageError("give --max-concurrent, --mode or both")
    _store(name, mode=mode, limit=max_concurrent, create=create)


@command.command()
@click.argument("name")
def pause(name: str) -> None:
    """Let no worker claim from a queue until it is resumed; what runs goes on, and enqueue goes on."""
    _store(name, paused=True)


@command.command()
@click.argument("name")
def resume(name: str) -> None:
    """Undo pause."""
    _store(name, paused=False)


def _store(
    name: str, *, mode: str | None = None, limit: Any = None, paused: bool | None = None, create: bool = False
) -> None:
    if not is_queue_name(name):
        raise ConfigError(f"queue = {name!r} must be {QUEUE_RULE}")
    known = [queue["name"] for queue in query("queues", 0)]
    if name not in known and not create:
        raise ConfigError(f"no worker, actor or job knows a queue {name!r}{nearest(name, known)}")
    stored = single(
        "set_queue",
        name,
        mode,
        mode is not None,
        None if limit is None else limit.value,
        limit is not None,
        bool(paused),
        paused is not None,
    )
    state = "paused" if stored["paused_at"] else "open"
    click.echo(f"{name}: {stored['mode']}, limit {limit_text(stored['max_concurrent'])}, {state}")


def _object(queue: Any) -> dict[str, Any]:
    paused = queue["paused_at"]
    return {**dict(queue), "paused_at": paused.isoformat() if paused else None}
