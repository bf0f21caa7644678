"""``taskqd worker``: one worker process."""

from __future__ import annotations

import click

from taskqd.settings import load_settings


@click.command()
@click.option(
    "--actors",
    required=True,
    metavar="MODULE:ATTR",
    help="The actors to run: an importable mapping, list or tuple of them.",
)
@click.option("--queues", multiple=True, metavar="NAME", help="A queue to serve; repeat it, or separate by commas.")
@click.option("--max-concurrency", metavar="N", help="Jobs that run at once.")
@click.option("--poll-interval", metavar="DURATION", help="Time between polls when notifications are off.")
@click.option("--worker-group", metavar="NAME", help="The group that this worker belongs to; a label.")
@click.option("--worker-label", metavar="NAME", help="A name for this worker in lists and logs.")
@click.option("--workgroup-instance", metavar="UUID", help="Id of the running workgroup.")
@click.option("--health-socket-path", metavar="PATH", help="The unix socket of the health server.")
def command(actors: str, queues: tuple[str, ...], **flags: str | None) -> int:
    """Run one worker process until it is told to stop.

    Flags win over TASKQ_* variables. SIGTERM drains: running jobs may finish within the grace periods.

    Exits 0 after a clean stop, 69 when the database stays down, 70 when the watchdog trips, 75 when the schema is
    not migrated or out of range, 78 when settings or actors are refused.
    """
    settings = load_settings({"queues": ",".join(queues) or None, **flags})
    from taskqd.worker.main import run_worker

    return run_worker(settings, actors=actors)
