"""``taskqd logs``: what the processes of a running group print, where their supervisor captures it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import click

from taskqd.cli.group_options import group_option, socket_option
from taskqd.cli.group_socket import NoGroupError, find_socket
from taskqd.domain.errors import TaskQError

_TIMEOUT = 30.0
"""Seconds without a sign of the group after which it is gone; it gives one each 10 s."""


@click.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what they print from now on, until interrupted.")
@group_option
@socket_option
def command(name: str | None, follow: bool, group: str | None, path: str | None) -> int:
    """Print the last 64 KiB that each process printed: of one such as io.0, of a worker's all, or of all.

    Only where the group captures its output: on a terminal, or with [supervisor] logs = "capture". Else its
    processes write to its own standard error, which the service manager keeps.
    """
    try:
        for message in _stream(find_socket(group, path), {"name": name, "follow": follow}):
            if "error" in message:
                raise TaskQError(str(message["error"]))
            label = "" if name == message["child"] else f"{message['child']:<12} | "
            for line in message["text"].splitlines():
                click.echo(f"{label}{line}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    return 0


def _stream(path: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = json.dumps(arguments).encode()
    head = f"POST /logs HTTP/1.1\r\nHost: taskqd\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_TIMEOUT)
            sock.connect(path)
            sock.sendall(head + body)
            with sock.makefile("rb") as lines:
                status = lines.readline().decode("latin-1")
                while lines.readline().strip():
                    continue
                if status.split(" ")[1:2] != ["200"]:
                    yield {"error": json.loads(lines.readline() or b"{}").get("reason", status.strip())}
                    return
                for line in lines:
                    message = json.loads(line)
                    if "child" in message or "error" in message:
                        yield message
    except (OSError, ValueError) as error:
        raise NoGroupError(f"{path} does not answer: {error}") from None
