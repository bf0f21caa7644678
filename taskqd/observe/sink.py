"""Where a process's log lines go: a file descriptor that may stop taking them, and must not stop the process."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

LINE_LIMIT = 4096
"""Bytes of the longest line, its newline included: so much a pipe takes from many writers without mixing them."""

CAPACITY = 2048
"""Lines that may wait for the descriptor."""


class Sink:
    """Writes lines to ``fd`` from a thread of its own, each with one call.

    Whoever logs never waits: when ``capacity`` lines wait already, the new one is dropped and counted, and
    ``on_drop(count)`` gives the line that says so once there is room again. Works on in a forked process, which
    does not repeat the lines of its parent.
    """

    def __init__(self, fd: int, *, capacity: int = CAPACITY, on_drop: Callable[[int], bytes] | None = None) -> None:
        self._fd = fd
        self._capacity = capacity
        self._on_drop = on_drop
        self.dropped = 0
        """Lines that were lost since the start."""
        self._begin()

    def put(self, line: bytes) -> None:
        """Write ``line``, with its newline, soon."""
        if self._pid != os.getpid():
            self._begin()
        with self._changed:
            if len(self._lines) >= self._capacity:
                self._lose(1)
                return
            self._lines.append(line)
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; False when that takes longer than ``timeout`` seconds."""
        if self._pid != os.getpid():
            return True
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._lines or self._writing:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return not (self._lines or self._writing)
        return True

    def _begin(self) -> None:
        """Start afresh: in a forked process neither the thread nor the state of the lock can be relied on."""
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._writing = False
        self._unsaid = 0
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="taskqd-log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or the system has no more threads
            while self._lines:
                self._write(self._lines.popleft(), wait=0.0)
        else:
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                self._writing = True
                lines = [self._lines.popleft()]
                if self._unsaid and self._on_drop is not None:
                    lines.insert(0, self._on_drop(self._unsaid))
                    self._unsaid = 0
            for line in lines:
                self._write(line, wait=None)

    def _write(self, line: bytes, *, wait: float | None) -> None:
        """Write one line whole. ``wait``: seconds for the descriptor to take it, None for ever."""
        while line:
            try:
                if wait is not None and not select.select([], [self._fd], [], wait)[1]:
                    self._lose(1)
                    return
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # somebody has made the shared descriptor non-blocking
                select.select([], [self._fd], [], 1.0)
            except (OSError, ValueError):  # closed, its reader is gone, a full disk: nobody is left to tell
                self._lose(1)
                return

    def _lose(self, count: int) -> None:
        with self._changed:
            self.dropped += count
            self._unsaid += count
