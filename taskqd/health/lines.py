"""One JSON object per line over a stream socket: the codec between a supervisor and its children."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

GROUP_ENDS = "shutdown"
"""The reason of a drain with which every process of the group is asked to end."""

PROTOCOL_VERSION = 1
"""What a child says in its first line; a supervisor of another version ends it."""

LINE_LIMIT = 64 * 1024
"""Bytes of the longest line; a longer one ends the connection."""

Message = dict[str, Any]


def encode(message: Mapping[str, object]) -> bytes:
    """Return one message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


_chunk = bytearray(64 * 1024)
"""Where what arrives is put first, for every connection of the process: it is taken out before anything else runs.

Without it each message would cost a buffer of 256 KiB, asked of the system and given back.
"""


class LineProtocol(asyncio.BufferedProtocol):
    """Calls ``on_message`` for every message, and ``on_lost(reason)`` once when the connection ends.

    A line that is no JSON object with an ``op``, or is longer than ``limit`` bytes, ends the connection.
    """

    def __init__(
        self,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        *,
        limit: int = LINE_LIMIT,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._limit = limit
        self._transport: asyncio.Transport | None = None
        self._pending = b""
        self._fault = ""
        self._closed = False

    def send(self, message: Mapping[str, object], *, droppable: bool = False) -> bool:
        """Write one message without ever waiting. Returns False when it was not taken.

        A ``droppable`` message is not taken while earlier ones are unread: a stopped reader must not make
        this process grow.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > (0 if droppable else LINE_LIMIT):
            return False
        transport.write(encode(message))
        return True

    def read_rest(self) -> None:
        """Take what has arrived by now, at once: the other end is gone, and its last message may lie unread."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        number = transport.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):  # nothing is left, or the connection was cut
            while count := os.readv(number, [_chunk]):
                self.buffer_updated(count)

    def close(self) -> None:
        """Close the connection after what was sent is written. ``on_lost`` is not called."""
        self._on_lost = _ignore
        self._closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # what a stream socket always gives
        if self._closed:
            self._transport.close()

    def get_buffer(self, sizehint: int) -> bytearray:
        return _chunk

    def buffer_updated(self, nbytes: int) -> None:
        *lines, self._pending = (self._pending + _chunk[:nbytes]).split(b"\n")
        for line in lines:
            if self._fault:
                return
            self._take(line)
        if len(self._pending) > self._limit:
            self._break(f"a line of more than {self._limit} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(self._fault or (str(exc) if exc else "closed"))

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):  # the second one of brackets within brackets without end
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("op"), str):
            self._break(f"not a message: {line[:80]!r}")
        else:
            self._on_message(message)

    def _break(self, fault: str) -> None:
        self._fault = fault
        if self._transport is not None:
            self._transport.abort()


def _ignore(_reason: str) -> None:
    """Nobody is left to tell."""
