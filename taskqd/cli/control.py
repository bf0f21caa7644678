"""``taskqd reload|restart|drain|quiet|resume|scale``: changing a running group over its socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from taskqd.cli.group_options import group_option, socket_option
from taskqd.cli.group_socket import NoGroupError, find_socket
from taskqd.domain.errors import TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.settings.durations import parse_duration

_CONNECT_TIMEOUT = 5.0
_LONGEST_LINE = 1024 * 1024


def _duration(_context: click.Context, _option: click.Parameter, value: str) -> float:
    try:
        seconds = parse_duration(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise click.BadParameter(f"{value!r} must be a duration above 0 and up to 1d, such as '90s' or '5m'")
    return seconds


def _options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command what all of them take."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print what the group says as it is, one object a line."),
        click.option(
            "--timeout",
            default="15m",
            show_default=True,
            callback=_duration,
            metavar="DURATION",
            help="How long to wait; then 4 is returned, and the group goes on.",
        ),
        click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is done."),
        group_option,
        socket_option,
    ):
        command = option(command)
    return command


@click.command()
@_options
def reload(**options: Any) -> int:
    """Read the workgroup file again and change what differs.

    Everything is checked first: with anything wrong the group goes on as it is, and the error is printed here.
    Changed workers are replaced one process after the other, each when its successor is ready.

    Exits 0 when it is done, 1 when a new process did not come up and the old ones were kept, 4 when the wait
    timed out, 69 when no group answers or its database is away, 75 when others hold the connections, 78 when the
    file is refused.
    """
    return _send("reload", {}, **options)


@click.command()
@click.argument("name", required=False)
@_options
def restart(name: str | None, **options: Any) -> int:
    """Replace the processes of NAME (a worker, `scheduler`, or one process such as `io.0`), or all, by fresh ones.

    One after the other, each when its successor is ready. New code is imported. Exits as `reload` does.
    """
    return _send("restart", _named(name), **options)


@click.command()
@click.argument("name", required=False)
@_options
def drain(name: str | None, **options: Any) -> int:
    """Stop the processes of NAME, or all workers, within their grace periods; they stay away until `resume`.

    Exits 0 when they ended by themselves, 3 when one had to be killed, 4 when the wait timed out, 69 when no
    group answers.
    """
    return _send("drain", _named(name), **options)


@click.command()
@click.argument("name", required=False)
@_options
def quiet(name: str | None, **options: Any) -> int:
    """Let NAME, or all workers, claim no more jobs; those that run go on. Until `resume`.

    Exits 0 when they were told, 1 when there is no such worker, 69 when no group answers.
    """
    return _send("quiet", _named(name), **options)


@click.command()
@click.argument("name", required=False)
@_options
def resume(name: str | None, **options: Any) -> int:
    """Undo `quiet` and `drain`, and start again what was given up.

    Exits 0 when all of them are ready, 1 when one does not come up, 4 when the wait timed out, 69 when no group
    answers.
    """
    return _send("resume", _named(name), **options)


@click.command()
@click.argument("name")
@click.argument("replicas", metavar="N", type=click.IntRange(min=1))
@_options
def scale(name: str, replicas: int, **options: Any) -> int:
    """Run N processes of the worker NAME, until the next reload: the file says how many then.

    Exits 0 when it is done, 1 when a new process did not come up and none was kept, 4 when the wait timed out, 69
    when no group answers, 78 when the connection budget does not allow it.
    """
    return _send("scale", {"name": name, "replicas": replicas}, **options)


def _named(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"name": name}


def _send(
    verb: str,
    arguments: dict[str, Any],
    *,
    group: str | None,
    path: str | None,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Ask the group and print what it says; return the exit code that it says."""
    place = find_socket(group, path)
    for line in _lines(place, verb, {**arguments, "wait": wait}, time.monotonic() + timeout if wait else None):
        if as_json:
            click.echo(json.dumps(line))
        elif line["op"] == "progress":
            click.echo(line["text"])
        if line["op"] == "done":
            code = int(line["exit_code"])
            if not as_json:
                click.echo(line["text"] if code == 0 else f"error: {line['text']}", err=code != 0)
            return code
        if line["op"] == "accepted" and not wait:
            return ExitCode.DONE
    raise NoGroupError(f"the group at {place} went away before it was done")


def _lines(path: str, verb: str, arguments: Mapping[str, Any], deadline: float | None) -> Iterator[dict[str, Any]]:
    """Yield the lines of the answer until the group has said everything, or :class:`_LateError` at the deadline."""
    body = json.dumps(arguments).encode()
    head = f"POST /{verb} HTTP/1.1\r\nHost: taskqd\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_TIMEOUT)
        try:
            sock.connect(path)
            sock.sendall(head.encode() + body)
        except OSError as error:
            raise NoGroupError(f"no group answers at {path}: {error.strerror or error}") from None
        yield from _read(sock, path, verb, deadline)


def _read(sock: socket.socket, path: str, verb: str, deadline: float | None) -> Iterator[dict[str, Any]]:
    pending, status = b"", b""
    while True:
        sock.settimeout(_CONNECT_TIMEOUT if deadline is None else max(0.001, deadline - time.monotonic()))
        try:
            data = sock.recv(65536)
        except TimeoutError:
            raise _LateError(f"the {verb} is not done yet; the group goes on with it") from None
        except OSError as error:
            raise NoGroupError(f"the group at {path} went away: {error.strerror or error}") from None
        pending += data
        if not status and b"\r\n\r\n" in pending:
            status, _, pending = pending.partition(b"\r\n\r\n")
        if status:
            *lines, pending = pending.split(b"\n")
            for line in lines:
                yield _understood(line, status, path)
        if not data:
            return
        if len(pending) > _LONGEST_LINE:
            raise NoGroupError(f"{path} gave no answer that this version understands")


def _understood(line: bytes, status: bytes, path: str) -> dict[str, Any]:
    """Return a line of the answer. Raises ``TaskQError`` with the reason when the request itself was refused."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise NoGroupError(f"{path} gave no answer that this version understands")
    if status.split(b" ")[1:2] != [b"200"] or "op" not in found:
        raise TaskQError(f"{path}: {found.get('reason', 'refused')}")
    return found


class _LateError(TaskQError):
    """The wait timed out."""

    exit_code = ExitCode.TIMED_OUT
