"""``taskqd worker``: one worker process."""

from __future__ import annotations

import click

from taskqd.settings import load_settings
from taskqd.settings.durations import parse_duration

MAX_RUNTIME = 30 * 86_400.0


def _max_runtime(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from None
    if not 1 <= seconds <= MAX_RUNTIME:
        raise click.BadParameter(f"{text!r} must be between 1s and 30d")
    return seconds


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
@click.option("--maintenance", metavar="auto|off|on", help="Whether it maintains the schema as a scheduler does.")
@click.option("--worker-group", metavar="NAME", help="The group that this worker belongs to; a label.")
@click.option("--worker-label", metavar="NAME", help="A name for this worker in lists and logs.")
@click.option("--workgroup-instance", metavar="UUID", help="Id of the running workgroup.")
@click.option("--health-socket-path", metavar="PATH", help="The unix socket of the health server.")
@click.option("--until-idle", is_flag=True, help="Stop when no job of its queues and actors is left.")
@click.option(
    "--max-runtime",
    metavar="DURATION",
    type=_max_runtime,
    help="With --until-idle: stop after this time all the same, 1s to 30d.",
)
def command(
    actors: str, queues: tuple[str, ...], until_idle: bool, max_runtime: float | None, **flags: str | None
) -> int:
    """Run one worker process until it is told to stop, or with --until-idle until its queues are empty.

    Flags win over TASKQ_* variables. SIGTERM drains: running jobs may finish within the grace periods.

    Exits 0 after a clean stop, 69 when the database stays down, 70 when the watchdog trips, 75 when the schema is
    not migrated or out of range, 78 when settings or actors are refused. With --until-idle also 3 when a job of its
    queues and actors has ended badly meanwhile, in whatever worker, and 4 when --max-runtime was over first.
    """
    if max_runtime is not None and not until_idle:
        raise click.UsageError("--max-runtime needs --until-idle")
    settings = load_settings({"queues": ",".join(queues) or None, **flags})
    from taskqd.worker.main import run_worker

    return run_worker(settings, actors, until_idle=until_idle, max_runtime=max_runtime)
