"""``taskqd scheduler``: the process that maintains the queue."""

from __future__ import annotations

import click

from taskqd.settings import load_settings


@click.group()
def command() -> None:
    """Run the scheduler process: it fires schedules, promotes due jobs, reaps expired leases and enforces deadlines."""


@command.command()
@click.option("--once", is_flag=True, help="Do everything that is due now, then exit.")
def run(once: bool) -> int:
    """Run the scheduler until it is told to stop.

    Exits 0 after a clean stop or a complete --once, 69 when the database stays down, 75 when the schema is not
    migrated or out of range, or --once could not finish in its time, 78 when settings are refused.
    """
    settings = load_settings()
    from taskqd.scheduler.main import run_scheduler

    return run_scheduler(settings, once=once)
