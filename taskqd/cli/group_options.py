"""How a command is told which running group to ask."""

from __future__ import annotations

import click

group_option = click.option("--group", metavar="GROUP", help="The group's name; needed where several run.")
socket_option = click.option(
    "--socket", "path", metavar="PATH", help="The group's socket, instead of TASKQD_SOCKET or the only one."
)
