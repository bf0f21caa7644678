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
_LONGEST = 64 * 1024


class Journal:
    """Writes events with their fields. ``bound`` fields are on every line."""

    def __init__(self, fd: int = 2, *, human: bool | None = None, **bound: Any) -> None:
        self._fd = fd
        self._human = os.isatty(fd) if human is None else human
        self._bound = bound
        self.dropped = 0
        """Lines that standard error did not take."""

    def bind(self, **bound: Any) -> Journal:
        """Return a journal with more fields on every line."""
        return Journal(self._fd, human=self._human, **{**self._bound, **bound})

    def tell(self, event: str, level: str = "info", **fields: Any) -> None:
        """Write one event."""
        everything = {**self._bound, **{key: value for key, value in fields.items() if value is not None}}
        line = _plain(event, level, everything) if self._human else _json(event, level, everything)
        self._write(line.encode("utf-8", "backslashreplace")[:_LONGEST] + b"\n")

    @property
    def human(self) -> bool:
        """A person reads along, on a terminal."""
        return self._human

    def pass_on(self, line: bytes) -> None:
        """Write a line that a process has printed."""
        self._write(line)

    def _write(self, line: bytes) -> None:
        # Chunks of PIPE_BUF: a pipe that polls writable takes that much without blocking.
        for start in range(0, len(line), _CHUNK):
            try:
                writable = select.select([], [self._fd], [], 0)[1]
                if not writable:
                    self.dropped += 1
                    return
                os.write(self._fd, line[start : start + _CHUNK])
            except OSError:  # closed, a vanished terminal, a full disk: nobody is left to tell
                self.dropped += 1
                return


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
