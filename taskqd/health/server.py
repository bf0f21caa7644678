"""HTTP/1.1 over a unix socket: what a probe, an operator and a metrics scraper ask one process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from taskqd.domain.background import BackgroundLoop
from taskqd.domain.errors import ConfigError

MAX_PATH_BYTES = 107
"""The longest path that a unix socket may have on Linux."""

_HEADER_LIMIT = 16 * 1024
_REQUEST_TIMEOUT = 2.0
_MAX_SILENT = 256
"""Connections that may have asked nothing yet; one more costs the oldest its own, so that probes are always heard."""
_BACKLOG = 512
_MAX_SCRAPES = 16
_BODY_LIMIT = 16 * 1024
_MAX_STREAMS = 32
_LOOK_INTERVAL = 2.0
"""Seconds between two looks at whether the socket is still where it is looked for."""
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
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
Verb = Callable[[dict[str, Any]], AsyncIterator[Mapping[str, Any]]]
"""Does what a POST asks with its JSON object, and yields what to answer: one JSON object a line."""

_Answer = tuple[int, str, str, bytes]


def check_socket_path(path: str) -> None:
    """Raise ``ConfigError`` when ``path`` is longer than a unix socket's path may be."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path!r} is {length} bytes long, the limit is {MAX_PATH_BYTES}: use a shorter directory"
        )


class HealthServer:
    """Serves ``GET /live``, ``/ready``, ``/metrics`` and ``routes``, and ``POST`` of ``verbs``, on the unix socket at
    ``path`` (mode 0600).

    The callables run on the event loop and must be quick and never touch the database. One that raises is
    answered with 500. ``metrics`` returns the Prometheus text format, now or once awaited. Verbs are for root and
    this process's own user; they are answered as they go, and go on when the asker leaves.

    A socket that somebody removes is made again within seconds, where its directory exists: ``on_place("")`` is told
    then, and ``on_place(why)`` when it cannot be.
    """

    def __init__(
        self,
        path: str,
        *,
        live: Route,
        ready: Route,
        metrics: Callable[[], str | Awaitable[str]] | None = None,
        routes: Mapping[str, Route] | None = None,
        verbs: Mapping[str, Verb] | None = None,
        on_place: Callable[[str], None] | None = None,
    ) -> None:
        check_socket_path(path)
        self.path = path
        """Where the socket is; it may be moved within its directory."""
        self._routes: dict[str, Route] = {"/live": live, "/ready": ready, **(routes or {})}
        self._verbs = dict(verbs or {})
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._port: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._on_place = on_place
        self._misplaced = ""
        self._keeper = BackgroundLoop(
            "socket", self._keep_place, cadence=_LOOK_INTERVAL, on_failure=self._cannot_keep, backoff_cap=_LOOK_INTERVAL
        )
        self._silent: dict[asyncio.StreamWriter, None] = {}
        self._scrapes = 0
        self._streams = 0

    async def start(self) -> None:
        """Listen. ``ConfigError`` when the directory cannot be written or another process listens there."""
        await self._listen()
        self._keeper.start()

    async def _listen(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind(sock)
            self._server = await asyncio.start_unix_server(
                self._serve, sock=sock, limit=_HEADER_LIMIT, backlog=_BACKLOG
            )
        except BaseException:
            sock.close()
            raise

    async def listen_on_port(self, host: str, port: int, *, only: Collection[str] | None = None) -> None:
        """Serve the same, or ``only`` these paths, on a TCP port too.

        Raises ``ConfigError`` when the port is taken or not ours to bind.
        """
        try:
            serve = partial(self._serve, only=only)
            self._port = await asyncio.start_server(serve, host, port, limit=_HEADER_LIMIT, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    async def stop(self) -> None:
        """Stop listening and remove the socket unless another process replaced it. Safe to call twice."""
        await self._keeper.stop()
        port, self._port = self._port, None
        if port is not None:
            port.close()
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(OSError):  # somebody cleaned the directory: nothing is left to remove
            if (place := self._place()) is not None:
                os.unlink(place)
        server.close()

    async def _keep_place(self) -> None:
        """Follow the socket when it was moved, and listen anew when it is gone."""
        place = self._place()
        if place is not None:
            self.path = place
            return
        before = self._server
        await self._listen()
        if before is not None:
            before.close()
        self._misplaced = ""
        if self._on_place is not None:
            self._on_place("")

    def _cannot_keep(self, _name: str, error: BaseException, _streak: int) -> None:
        why, self._misplaced = self._misplaced, str(error)
        if self._on_place is not None and why != self._misplaced:
            self._on_place(self._misplaced)

    def _place(self) -> str | None:
        """Return the path of the socket, which somebody may have moved, or None when it has none any more."""
        with contextlib.suppress(OSError):
            if _identity(os.stat(self.path)) == self._identity:
                return self.path
        with contextlib.suppress(OSError), os.scandir(os.path.dirname(self.path) or ".") as entries:
            for entry in entries:
                if _identity(entry.stat(follow_symlinks=False)) == self._identity:
                    return entry.path
        return None

    def _bind(self, sock: socket.socket) -> None:
        try:
            _remove_stale(self.path)
            sock.bind(self.path)
            # Nobody can connect before listen(), so that the socket is never open to others.
            os.chmod(self.path, stat.S_IRUSR | stat.S_IWUSR)
            self._identity = _identity(os.stat(self.path))
        except OSError as error:
            what = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"cannot create the socket {self.path!r}: {what}") from None

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, only: Collection[str] | None = None
    ) -> None:
        self._silent[writer] = None
        if len(self._silent) > _MAX_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT):
                answer = await self._answer(reader, writer, only)
                if isinstance(answer, tuple):
                    status, reason, kind, body = answer
                    phrase = " ".join(reason.split()).encode("ascii", "replace").decode()[:200]
                    head = (
                        f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\n"
                        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                    )
                    writer.write(head.encode() + body)
                    await writer.drain()
                    return
            await self._stream(writer, answer)
        except (TimeoutError, ConnectionError):
            pass  # the asker went away or is too slow; it is owed nothing more
        finally:
            self._silent.pop(writer, None)
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, only: Collection[str] | None
    ) -> _Answer | AsyncIterator[Mapping[str, Any]]:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _error(431)
        except asyncio.IncompleteReadError:
            return _error(400)
        self._silent.pop(writer, None)
        method, _, rest = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if only is not None and path not in only:
            return _error(404, f"no {path[:80]}; there are {', '.join(sorted(only))}")
        if path in self._verbs:
            return await self._begin(method, self._verbs[path], head, reader, writer)
        if path == "/metrics" and self._metrics is not None:
            return await self._measure(method, self._metrics)
        if path not in self._routes:
            return _error(404, f"no {path[:80]}; there are {', '.join(sorted(self._paths()))}")
        return self._ask(method, self._routes[path])

    async def _begin(
        self, method: str, verb: Verb, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Answer | AsyncIterator[Mapping[str, Any]]:
        """Return the answer of a verb, or why it is refused."""
        if method != "POST":
            return _error(405, "only POST")
        if not _may_change(writer.get_extra_info("socket")):
            return _error(403, "only root and the group's own user may change it, over its unix socket")
        if self._streams >= _MAX_STREAMS:
            return _error(503, "too many requests are being answered")
        length = _content_length(head)
        if length > _BODY_LIMIT:
            return _error(413)
        try:
            arguments = json.loads(await reader.readexactly(length) if length > 0 else b"{}")
        except (asyncio.IncompleteReadError, ValueError):
            arguments = None
        if not isinstance(arguments, dict):
            return _error(400, "the body must be one JSON object, its length in Content-Length")
        return verb(arguments)

    async def _stream(self, writer: asyncio.StreamWriter, lines: AsyncIterator[Mapping[str, Any]]) -> None:
        self._streams += 1
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n")
            async for line in lines:
                writer.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
                async with asyncio.timeout(_REQUEST_TIMEOUT):
                    await writer.drain()
        finally:
            self._streams -= 1

    async def _measure(self, method: str, metrics: Callable[[], str | Awaitable[str]]) -> tuple[int, str, str, bytes]:
        if self._scrapes >= _MAX_SCRAPES:
            return _error(503, "too many requests are being answered")
        self._scrapes += 1
        try:
            found = metrics() if method == "GET" else ""
            text = await found if isinstance(found, Awaitable) else found
        except Exception as error:
            return _error(500, f"the metrics themselves failed: {type(error).__name__}: {error}")
        finally:
            self._scrapes -= 1
        return self._ask(method, lambda: text)

    def _paths(self) -> list[str]:
        return [*self._routes, *self._verbs, *(["/metrics"] if self._metrics is not None else [])]

    def _ask(self, method: str, route: Callable[[], Report | str]) -> _Answer:
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


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _may_change(sock: socket.socket) -> bool:
    """True when the asker is root or this process's own user."""
    if sock.family != socket.AF_UNIX:
        return False
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid in (0, os.geteuid())


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return 0


def _error(status: int, reason: str = "") -> _Answer:
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
