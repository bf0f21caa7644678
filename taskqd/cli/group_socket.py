"""Asking a running group over its socket."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from taskqd.domain.errors import TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.health.probe import runtime_directories

TIMEOUT = 5.0
"""Seconds for each step of an exchange."""

_LARGEST = 16 * 1024 * 1024
"""Bytes of an answer; of a longer one the rest is not read, so that it is none that could be understood."""


class NoGroupError(TaskQError):
    """No group answers."""

    exit_code = ExitCode.UNAVAILABLE


def find_socket(group: str | None, path: str | None) -> str:
    """Return the socket to ask: ``path``, else that of ``group``, else ``TASKQD_SOCKET``, else the only one there is.

    Raises ``NoGroupError`` that names where it looked and what it found.
    """
    if path is not None:
        return path
    if group is None and os.environ.get("TASKQD_SOCKET"):
        return os.environ["TASKQD_SOCKET"]
    for directory in runtime_directories():
        names = [name for name in _sockets(directory) if group in (None, name.removesuffix(".sock"))]
        if len(names) > 1:
            groups = ", ".join(name.removesuffix(".sock") for name in names)
            raise NoGroupError(f"several groups in {directory} ({groups}): name one, or its socket with --socket")
        if names:
            return os.path.join(directory, names[0])
    what = "no group" if group is None else f"no group {group!r}"
    where = ", ".join(runtime_directories())
    raise NoGroupError(f"{what} in {where}: name its socket with --socket or TASKQD_SOCKET")


def ask(path: str, question: str) -> dict[str, Any]:
    """GET ``question`` of the socket at ``path`` and return the answer. Raises ``NoGroupError`` when none comes."""
    head, body = _exchange(path, f"GET {question} HTTP/1.1\r\nHost: taskqd\r\n\r\n".encode())
    answer = _parse(path, body)
    if head.split(b" ")[1:2] not in ([b"200"], [b"503"]):
        raise TaskQError(f"{path}: {answer.get('reason', head.decode('latin-1'))}")
    return answer


def order(path: str, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """POST ``arguments`` to ``verb`` and return the last line of the answer. Raises as :func:`ask` does."""
    body = json.dumps(arguments).encode()
    request = f"POST {verb} HTTP/1.1\r\nHost: taskqd\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    head, content = _exchange(path, request)
    lines = content.strip().splitlines()
    answer = _parse(path, lines[-1] if lines else b"")
    if head.split(b" ")[1:2] != [b"200"]:
        raise TaskQError(f"{path}: {answer.get('reason', head.decode('latin-1'))}")
    return answer


def _sockets(directory: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if name.endswith(".sock"))
    except OSError:
        return []


def _exchange(path: str, request: bytes) -> tuple[bytes, bytes]:
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(TIMEOUT)
            sock.connect(path)
            sock.sendall(request)
            answer = b""
            while (part := sock.recv(65536)) and len(answer) <= _LARGEST:
                answer += part
    except OSError as error:
        raise NoGroupError(f"{path} does not answer: {error.strerror or error}") from None
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], body


def _parse(path: str, body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise NoGroupError(f"{path} gave no answer that this version understands")
    return answer
