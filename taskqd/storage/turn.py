"""One process of a group at a time: for what each would else do at the same moment."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

TURN_TIMEOUT = 40.0
"""Seconds to wait for the others: what one process may take to open new sessions and end the old ones."""
_POLL = 0.05


class Turn:
    """A turn is a lock on the directory of the group's sockets; the kernel gives it back however its holder ends."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    @classmethod
    def from_environ(cls) -> Turn | None:
        """Return what the processes of this one's group take turns by, or None where there is no group."""
        path = os.environ.get("TASKQD_HEALTH_SOCKET")
        return cls(os.path.dirname(path)) if path and os.environ.get("TASKQD_GROUP") else None

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold the turn. Raises ``ConnectionError`` when it does not come within 40 s."""
        try:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            yield  # somebody has removed the directory: the group goes on without
            return
        try:
            deadline = time.monotonic() + TURN_TIMEOUT
            while not _lock(directory):
                if time.monotonic() >= deadline:
                    raise ConnectionError(f"other processes of the group were still at it after {TURN_TIMEOUT:g} s")
                await asyncio.sleep(_POLL)
            yield
        finally:
            os.close(directory)


def _lock(directory: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
