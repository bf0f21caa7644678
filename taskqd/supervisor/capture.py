"""What a process prints, when the supervisor reads it: kept for a while, and passed on with the process's name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable

KEPT = 64 * 1024
"""Bytes that are kept of what the processes of one slot printed last."""

LONGEST_LINE = 64 * 1024
"""Bytes of a line after which it is passed on in pieces."""

TAIL = 20
"""Lines of which the event tells that a process has ended."""

_READ = 64 * 1024
_LAST_READS = 16
"""How often that much is read after the process has ended; what it started may go on printing for ever."""

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

PassOn = Callable[[bytes], None]
"""Takes one line with its newline; must not block."""


class Capture:
    """The output of the processes of one slot, one after the other.

    With ``colour`` each line is led by the slot's name in colour; without, by its plain name, unless it is JSON, which
    names its process itself. Reading never waits, and neither does passing on.
    """

    def __init__(self, name: str, pass_on: PassOn, *, colour: bool, width: int = 12) -> None:
        self._pass_on = pass_on
        self._colour = colour
        label = f"{name:<{width}} | ".encode()
        self._label = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[_number(name) % len(_COLOURS)], label) if colour else label
        self._kept = bytearray()
        self._pending = b""
        self._reader: int | None = None
        self.total = 0
        """Bytes that came so far."""

    def open(self) -> int:
        """Return a new descriptor for a process to print to; close it once the process has it."""
        self.finish()
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        asyncio.get_running_loop().add_reader(self._reader, self._read)
        return writer

    def finish(self) -> None:
        """Take what the process has left and read no more: what it started may hold the other end for ever."""
        for _ in range(_LAST_READS):
            if self._reader is None or not self._read():
                break
        self._close()
        if self._pending:
            self._take(b"\n")

    def tail(self) -> str:
        """Return the last lines, without colours."""
        lines = self._kept.decode("utf-8", "replace").splitlines()[-TAIL:]
        return _ESCAPES.sub("", "\n".join(lines))

    def since(self, mark: int) -> str:
        """Return what came since ``total`` was ``mark``, as far as it is kept."""
        new = self.total - mark
        return self._kept[-new:].decode("utf-8", "replace") if new > 0 else ""

    def _read(self) -> bool:
        """Read once; True when there was something."""
        if self._reader is None:
            return False
        try:
            data = os.read(self._reader, _READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close()
            return False
        self._take(data)
        return True

    def _take(self, data: bytes) -> None:
        self.total += len(data)
        self._kept += data
        del self._kept[:-KEPT]
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            self._send(line)
        while len(self._pending) > LONGEST_LINE:
            self._send(self._pending[:LONGEST_LINE])
            self._pending = self._pending[LONGEST_LINE:]

    def _send(self, line: bytes) -> None:
        plain = not self._colour and line.startswith(b"{")
        self._pass_on((b"" if plain else self._label) + line + b"\n")

    def _close(self) -> None:
        if self._reader is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._reader)
            os.close(self._reader)
            self._reader = None


def _number(name: str) -> int:
    """Return a number for a colour: neighbours differ, and a process keeps its own when it is started again."""
    stem, _, index = name.rpartition(".")
    return sum(stem.encode()) + (int(index) if index.isdigit() else 0)
