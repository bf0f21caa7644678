"""The supervisor's own log: one JSON object a line to standard error, or plain lines on a terminal.

Small on purpose: the supervisor loads no logging library. Never blocks: what standard error does not take is
dropped and counted, because a supervisor that waits for a log reader supervises nothing.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

_CHUNK = select.PIPE_BUF
_CLEAR = b"\r\x1b[K"
"""Takes away what stands in the present line of a terminal."""

_LONGEST = 64 * 1024


class Journal:
    """Writes events with their fields. ``bound`` fields are on every line.

    Lines that were lost are told of with the first one that is not.
    """

    def __init__(self, fd: int = 2, *, human: bool | None = None, outlet: Outlet | None = None, **bound: Any) -> None:
        self._outlet = outlet or Outlet(fd)
        self._human = os.isatty(fd) if human is None else human
        self._bound = bound

    def bind(self, **bound: Any) -> Journal:
        """Return a journal with more fields on every line."""
        return Journal(human=self._human, outlet=self._outlet, **{**self._bound, **bound})

    def tell(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write one event."""
        self._write(self._line(event, level, fields))

    @property
    def human(self) -> bool:
        """A person reads along, on a terminal."""
        return self._human

    @property
    def dropped(self) -> int:
        """Lines that standard error did not take."""
        return self._outlet.dropped

    def pass_on(self, line: bytes) -> None:
        """Write a line that a process has printed."""
        self._write(line)

    def show(self, text: str) -> None:
        """Keep ``text`` below everything that is written, on a terminal; an empty one takes it away."""
        self._outlet.show(text.encode("utf-8", "backslashreplace"))

    def _line(self, event: str, level: str, fields: dict[str, Any]) -> bytes:
        everything = {**self._bound, **{key: value for key, value in fields.items() if value is not None}}
        line = _plain(event, level, everything) if self._human else _json(event, level, everything)
        return line.encode("utf-8", "backslashreplace")[:_LONGEST] + b"\n"

    def _write(self, line: bytes) -> None:
        lost = self._outlet.unsaid
        notice = self._line("log-lines-dropped", "warning", {"count": lost}) if lost else b""
        self._outlet.write(notice + line)


class Outlet:
    """The file descriptor behind one journal and all that are bound to it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._torn = False
        self._shown = b""
        self.dropped = 0
        """Lines that were lost."""
        self.unsaid = 0
        """Lines that were lost since the last one that was not."""

    def write(self, line: bytes) -> None:
        """Write a line whole, as far as that does not block; else it is lost."""
        # What comes after the beginning of a lost line is a line of its own.
        rest = b"\n" + line if self._torn else line
        if self._shown:
            rest = _CLEAR + rest + self._shown
        size = len(rest)
        while rest:
            # No more than PIPE_BUF: a pipe that polls writable takes that much without blocking.
            written = self._take(rest[:_CHUNK])
            if not written:
                self.dropped += 1
                self.unsaid += 1
                self._torn = self._torn or len(rest) < size
                return
            rest = rest[written:]
        self._torn, self.unsaid = False, 0

    def show(self, text: bytes) -> None:
        """Keep ``text`` as the last line."""
        if text != self._shown:
            self._shown = text
            self._take(_CLEAR + text)

    def _take(self, data: bytes) -> int:
        try:
            return os.write(self._fd, data) if select.select([], [self._fd], [], 0)[1] else 0
        except (OSError, ValueError):  # closed, a vanished terminal, a full disk: nobody is left to tell
            return 0


def _json(event: str, level: str, fields: dict[str, Any]) -> str:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
    return json.dumps({**fields, "event": event, "level": level, "timestamp": stamp}, default=str)


def _plain(event: str, level: str, fields: dict[str, Any]) -> str:
    who = fields.pop("child", fields.pop("group", ""))
    fields.pop("group", None)
    texts = [f"{key}={value}" for key, value in fields.items() if "\n" not in str(value)]
    blocks = [str(value).rstrip() for value in fields.values() if "\n" in str(value)]
    mark = "" if level == "info" else f"{level.upper()} "
    head = f"{time.strftime('%H:%M:%S')} {who:<14} {mark}{event} {' '.join(texts)}".rstrip()
    return "\n    ".join([head, *(line for block in blocks for line in block.splitlines())])
