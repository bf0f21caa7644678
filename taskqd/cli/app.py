"""The commands that click parses, each imported only when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import click

from taskqd import __version__
from taskqd.domain.names import nearest

COMMANDS = {
    "init": "Write a workgroup file, systemd units or Kubernetes manifests to begin with.",
    "run": "Run the workgroup of a TOML file: workers and a scheduler, watched and restarted.",
    "check": "Validate a workgroup file without starting anything.",
    "budget": "Print the database connections that a workgroup needs.",
    "status": "Show a running group on one screen.",
    "dump": "Print where a process of a running group is: the stacks of its threads.",
    "logs": "Print what the processes of a running group print, where that is captured.",
    "explain": "Explain the exit code of a process.",
    "reload": "Read the workgroup file of a running group again and change what differs.",
    "restart": "Replace processes of a running group by fresh ones.",
    "drain": "Stop processes of a running group until they are resumed.",
    "quiet": "Let workers of a running group claim no more jobs until they are resumed.",
    "resume": "Undo quiet and drain.",
    "scale": "Run another number of processes of a worker.",
    "health": "Ask a running group or process over its unix socket: live, ready, startup.",
    "worker": "Run one worker process.",
    "scheduler": "Run the scheduler process.",
    "queue": "See queues, limit them, pause them, let their keys take turns.",
    "actor": "See actors, limit them, and choose where their jobs go.",
    "schedule": "See, plan, change and steer what runs by itself.",
    "insights": "Show how queues and schedules get on: starved, slow, idle, running away.",
    "target": "See which installation a database is, and bind it to an environment.",
    "doctor": "Say what is wrong with an installation, why it matters, and what to do.",
    "migrate": "Apply the database migrations, or show which are applied.",
}
"""Every command with its line of help, in the order that a newcomer meets them."""

DISPATCHED = ("run", "status", "health")
"""Commands that :mod:`taskqd.cli.main` runs itself, without click."""


_CONTROL = ("reload", "restart", "drain", "quiet", "resume", "scale")
"""Commands that share :mod:`taskqd.cli.control`."""


class CommandGroup(click.Group):
    """A group that knows the names of its commands and imports the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import ``taskqd.cli.<name>`` and return its ``command``; or that of its name where several share a module."""
        if cmd_name not in COMMANDS or cmd_name in DISPATCHED:
            return None
        if cmd_name in _CONTROL:
            return getattr(import_module("taskqd.cli.control"), cmd_name)  # type: ignore[no-any-return]
        command = import_module(f"taskqd.cli.{cmd_name}").command
        assert isinstance(command, click.Command)  # noqa: S101 - each command module defines one
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table, without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, or name the nearest one there is."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            _refuse(ctx, args[0])
        return super().resolve_command(ctx, args)


def _refuse(ctx: click.Context, name: str) -> NoReturn:
    ctx.fail(f"unknown command {name!r}{nearest(name, COMMANDS)}")


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Settings come from flags, the workgroup file, TASKQ_* variables and .env files, in this order.",
)
@click.version_option(__version__, prog_name="taskqd", message="%(prog)s %(version)s")
def app() -> None:
    """A Postgres-backed job system for Python services, delivered as a daemon."""


def run_app(argv: Sequence[str]) -> int:
    """Run one command and return its exit code; wrong usage is explained on standard error and returns 2."""
    try:
        result = app.main(list(argv), prog_name="taskqd", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 1
    return result if isinstance(result, int) else 0
