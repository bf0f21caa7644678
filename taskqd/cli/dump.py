"""``taskqd dump NAME``: where a process of a running group is, by the stacks of its threads."""

from __future__ import annotations

import click

from taskqd.cli.group_options import group_option, socket_option
from taskqd.cli.group_socket import find_socket, order
from taskqd.domain.errors import TaskQError


@click.command()
@click.argument("name", metavar="NAME")
@group_option
@socket_option
def command(name: str, group: str | None, path: str | None) -> int:
    """Print the stack of every thread of a process such as io.0. It goes on undisturbed.

    Works from a signal handler in C: a process whose event loop is blocked, or whose interpreter lock is held,
    answers too. Exits 1 when it showed nothing within 2 s, as one does that is stopped.
    """
    answer = order(find_socket(group, path), "/dump", {"name": name})
    if "stacks" not in answer:
        raise TaskQError(str(answer.get("error", "no answer")))
    click.echo(answer["stacks"])
    return 0
