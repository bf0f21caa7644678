"""The process that a zygote has laid in, as the supervisor sees it: forked and adopted, and waiting for its request."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from taskqd.supervisor.handover import WARM
from taskqd.supervisor.reaper import Reaper, kill_group


@dataclass(frozen=True, slots=True)
class Spare:
    """A process, and the supervisor's end of its link."""

    pid: int
    link: socket.socket


class Spares:
    """Those of one zygote: one that may be used, and others that are ending. Their deaths are nobody's loss."""

    def __init__(self, reaper: Reaper, on_end: Callable[[], None]) -> None:
        self._reaper = reaper
        self._on_end = on_end
        self._living: set[int] = set()
        self._present: Spare | None = None

    @property
    def present(self) -> bool:
        """There is one that may be used, or is about to be warm."""
        return self._present is not None

    @property
    def any(self) -> bool:
        """One lives, be it that it ends."""
        return bool(self._living)

    def add(self, spare: Spare) -> None:
        """Look after a new one, which replaces the one that there is."""
        self.drop()
        spare.link.setblocking(False)
        self._present = spare
        self._living.add(spare.pid)
        self._reaper.watch_adopted(spare.pid, lambda _code: self._ended(spare))
        self._reaper.watch_stops(spare.pid, lambda stopped: self._stopped(spare) if stopped else None)

    def take(self, request: bytes, passed: Sequence[int]) -> Spare | None:
        """Send ``request`` and the descriptors ``passed`` to the one that there is, which is nobody's spare any more.

        Returns it; None where there is none, or it is not warm yet.
        """
        spare = self._present
        if spare is None:
            return None
        try:
            said = spare.link.recv(len(WARM))
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        sent = 0
        if said == WARM:
            with contextlib.suppress(OSError):  # it is ending, which the reaper tells
                sent = socket.send_fds(spare.link, [request], passed)
        if sent != len(request):
            self.drop()
            return None
        self._present = None
        self._living.discard(spare.pid)
        return spare

    def drop(self) -> None:
        """End the one that there is."""
        if self._present is not None:
            self._present.link.close()
            kill_group(self._present.pid)
            self._present = None

    def _ended(self, spare: Spare) -> None:
        self._living.discard(spare.pid)
        if self._present is spare:
            spare.link.close()
            self._present = None
        self._on_end()

    def _stopped(self, spare: Spare) -> None:
        if self._present is spare:
            self.drop()
