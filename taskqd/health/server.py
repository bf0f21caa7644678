"""HTTP/1.1 over a unix socket: what a probe, an operator and a metrics scraper ask one process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from taskqd.domain.errors import ConfigError

MAX_PATH_BYTES = 107
"""The longest path that a unix socket may have on Linux."""

_HEADER_LIMIT = 16 * 1024
_REQUEST_TIMEOUT = 2.0
_MAX_CONNECTIONS = 64
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to a check: 200 when ``ok``, else 503. A probe prints ``body["reason"]``, if given."""

    ok: bool
    body: dict[str, object] = field(default_factory=dict)


Route = Callable[[], Report]


def check_socket_path(path: str) -> None:
    """Raise ``ConfigError`` when ``path`` is longer than a unix socket's path may be."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path!r} is {length} bytes long, the limit is {MAX_PATH_BYTES}: use a shorter directory"
        )


class HealthServer:
    """Serves ``GET /live``, ``/ready``, ``/metrics`` and ``routes`` on the unix socket at ``path`` (mode
    0600).

    The callables run on the event loop and must be quick and never touch the database. One that raises is
    answered with 500. ``metrics`` returns the Prometheus text format.
    """

    def __init__(
        self,
        path: str,
        *,
        live: Route,
        ready: Route,
        metrics: Callable[[], str] | None = None,
        routes: Mapping[str, Route] | None = None,
    ) -> None:
        check_socket_path(path)
        self.path = path
        self._routes: dict[str, Route] = {"/live": live, "/ready": ready, **(routes or {})}
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._port: asyncio.Server | None = None
        self._inode: int | None = None
        self._connections = 0

    async def start(self) -> None:
        """Listen. ``ConfigError`` when the directory cannot be written or another process listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind(sock)
            self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=_HEADER_LIMIT)
        except BaseException:
            sock.close()
            raise

    async def listen_on_port(self, host: str, port: int, *, only: Collection[str] | None = None) -> None:
        """Serve the same, or ``only`` these paths, on a TCP port too.

        Raises ``ConfigError`` when the port is taken or not ours to bind.
        """
        try:
            serve = partial(self._serve, only=only)
            self._port = await asyncio.start_server(serve, host, port, limit=_HEADER_LIMIT)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    async def stop(self) -> None:
        """Stop listening and remove the socket unless another process replaced it. Safe to call twice."""
        port, self._port = self._port, None
        if port is not None:
            port.close()
        server, self._server = self._server, None
        if server is None:
            return
        try:
            if os.stat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass  # somebody cleaned the directory: nothing is left to remove
        server.close()

    def _bind(self, sock: socket.socket) -> None:
        try:
            _remove_stale(self.path)
            sock.bind(self.path)
            # Nobody can connect before listen(), so that the socket is never open to others.
            os.chmod(self.path, stat.S_IRUSR | stat.S_IWUSR)
            self._inode = os.stat(self.path).st_ino
        except OSError as error:
            what = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"cannot create the socket {self.path!r}: {what}") from None

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, only: Collection[str] | None = None
    ) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT):
                status, reason, kind, body = await self._answer(reader, only)
                phrase = " ".join(reason.split()).encode("ascii", "replace").decode()[:200]
                head = (
                    f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the asker went away or is too slow; it is owed nothing more
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, only: Collection[str] | None) -> tuple[int, str, str, bytes]:
        if self._connections > _MAX_CONNECTIONS:
            return _error(503, "too many connections")
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _error(431)
        except asyncio.IncompleteReadError:
            return _error(400)
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if only is not None and path not in only:
            return _error(404, f"no {path[:80]}; there are {', '.join(sorted(only))}")
        if path == "/metrics" and self._metrics is not None:
            return self._ask(method, self._metrics)
        if path not in self._routes:
            return _error(404, f"no {path[:80]}; there are {', '.join(sorted(self._paths()))}")
        return self._ask(method, self._routes[path])

    def _paths(self) -> list[str]:
        return [*self._routes, *(["/metrics"] if self._metrics is not None else [])]

    def _ask(self, method: str, route: Callable[[], Report | str]) -> tuple[int, str, str, bytes]:
        if method != "GET":
            return _error(405, "only GET")
        try:
            answer = route()
        except Exception as error:
            return _error(500, f"the check itself failed: {type(error).__name__}: {error}")
        if isinstance(answer, str):
            return 200, "OK", _METRICS_TYPE, answer.encode()
        reason = str(answer.body.get("reason") or ("ok" if answer.ok else "not ok"))
        return (
            200 if answer.ok else 503,
            reason,
            "application/json",
            json.dumps({"ok": answer.ok, **answer.body}).encode() + b"\n",
        )


def _error(status: int, reason: str = "") -> tuple[int, str, str, bytes]:
    text = reason or _REASONS[status]
    return status, text, "application/json", json.dumps({"ok": False, "reason": text}).encode() + b"\n"


def _remove_stale(path: str) -> None:
    """Remove a socket that a dead process left; a socket that answers belongs to somebody."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path!r} exists and is not a socket; remove it or choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ENOENT):
                raise
        else:
            raise ConfigError(f"another process listens on {path!r}; stop it or choose another path")
    os.unlink(path)
