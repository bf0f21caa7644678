"""``taskqd actor``: see actors, limit them, and choose where their jobs go."""

from __future__ import annotations

import json
from typing import Any

import click

from taskqd.cli.columns import columns
from taskqd.cli.rules import limit_from, limit_text, query, single
from taskqd.domain.errors import ConfigError
from taskqd.domain.names import QUEUE_RULE, is_queue_name, nearest


@click.group()
def command() -> None:
    """See and steer actors. What is set here wins over the code; workers go by it within 5 seconds.

    The database is TASKQ_PG_DSN_DIRECT, else TASKQ_PG_DSN.
    """


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the actors that a worker has made known."""
    actors = query("actors")
    if as_json:
        click.echo(json.dumps([dict(actor) for actor in actors], indent=2))
        return
    rows = [["actor", "queue", "limit", "max pending", "running", "reservations"]]
    for actor in actors:
        rows.append(
            [
                actor["actor"],
                actor["queue"],
                limit_text(actor["max_concurrent"]),
                limit_text(actor["max_pending"]),
                str(actor["running"]),
                ", ".join(actor["reservations"]),
            ]
        )
    click.echo(columns(rows, left=(0, 1, 5)))


@command.command(name="set")
@click.argument("name")
@click.option(
    "--max-concurrent", callback=limit_from(0), metavar="N|none", help="Most of its jobs that run at once; 0: none."
)
@click.option(
    "--max-pending", callback=limit_from(0), metavar="N|none", help="Most of its jobs that may wait; 0: none."
)
@click.option("--queue", metavar="NAME", help="Where its jobs go when they are handed back, and by default.")
def set_(name: str, max_concurrent: Any, max_pending: Any, queue: str | None) -> None:
    """Change what is stored of an actor. Jobs that wait stay in the queue they were put into."""
    if max_concurrent is None and max_pending is None and queue is None:
        raise click.UsageError("give --max-concurrent, --max-pending or --queue")
    if queue is not None and not is_queue_name(queue):
        raise ConfigError(f"queue = {queue!r} must be {QUEUE_RULE}")
    stored = single(
        "set_actor",
        name,
        None if max_concurrent is None else max_concurrent.value,
        max_concurrent is not None,
        None if max_pending is None else max_pending.value,
        max_pending is not None,
        queue,
        queue is not None,
    )
    if stored is None:
        known = [actor["actor"] for actor in query("actors")]
        raise ConfigError(f"no worker has made an actor {name!r} known{nearest(name, known)}")
    click.echo(
        f"{name}: queue {stored['queue']}, limit {limit_text(stored['max_concurrent'])}, "
        f"max pending {limit_text(stored['max_pending'])}"
    )
