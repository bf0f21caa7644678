"""Putting back what somebody removes of a running group's files: directories, lock, record, socket.

Cleaners of temporary directories do that, and people. Without its lock a group could be started a second time, and
without its socket nobody could ask it anything until it is restarted.
"""

from __future__ import annotations

import os

from taskqd.domain.background import BackgroundLoop
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.record import Record
from taskqd.supervisor.runtime import GroupFiles

_LOOK_INTERVAL = 2.0
_LONGEST_PAUSE = 5.0


class Upkeep:
    """Looks after ``files`` and ``record`` from :meth:`start` to :meth:`stop`, and says what it had to do.

    The socket is looked after by its server, which has this object to tell.
    """

    def __init__(self, files: GroupFiles, record: Record, journal: Journal) -> None:
        self._files = files
        self._record = record
        self._journal = journal
        self._fault = ""
        self._loop = BackgroundLoop(
            "upkeep",
            self._look,
            cadence=_LOOK_INTERVAL,
            on_failure=lambda _name, error, _streak: self._cannot(str(error)),
            backoff=_LOOK_INTERVAL,
            backoff_cap=_LONGEST_PAUSE,
        )

    def start(self) -> None:
        """Begin. Call it with the group's lock held."""
        self._loop.start()

    async def stop(self) -> None:
        """Look after nothing more."""
        await self._loop.stop()

    def told(self, why: str) -> None:
        """The group's socket was made again, or cannot be for the reason ``why``."""
        if not os.path.isdir(self._files.directory):
            return  # that is told, and put right, with the next look
        if why:
            self._journal.tell("files-lost", "error", why=why)
        else:
            self._journal.tell("files-restored", "warning", what=self._files.socket)

    async def _look(self) -> None:
        if self._files.restore():
            self._record.write()
            self._journal.tell("files-restored", "warning", what=self._files.directory)
        self._fault = ""

    def _cannot(self, why: str) -> None:
        if why != self._fault:
            self._fault = why
            self._journal.tell("files-lost", "error", why=why)
