"""Telling systemd how the group is: ready, reloading, stopping, alive.

One datagram a message, to the socket that ``NOTIFY_SOCKET`` names. Without it nothing is sent. A message that
cannot be sent is dropped: nobody's work waits for the service manager.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping

STATUS_INTERVAL = 1.0
"""Seconds between two changes of the status line."""

_EXTEND_STEP = 1.0
"""Seconds by which the end of a boot must have moved to be worth a message."""

_STATUS_LIMIT = 500


class Notifier:
    """What the supervisor tells. Its rounds call :meth:`round`, and events the rest.

    The watchdog is fed from the rounds alone, so that a supervisor whose loop stands still is not taken for a
    living one.
    """

    def __init__(self, address: str, watchdog: float | None = None) -> None:
        """Send to ``address`` (a path, or ``@name``; ``""``: to nobody), and feed a watchdog of that many seconds."""
        self._address = b"\0" + os.fsencode(address[1:]) if address.startswith("@") else os.fsencode(address)
        self._feed_every = None if watchdog is None else watchdog / 2
        self.patience = math.inf if watchdog is None else watchdog / 4
        """How many seconds may lie between two rounds for the watchdog's sake."""
        self._fed_at = float("-inf")
        self._socket: socket.socket | None = None
        self._ready = self._stopping = self._reloading = False
        self._status = ""
        self._status_at = float("-inf")
        self._extended_to = float("-inf")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Notifier:
        """Return the notifier of a process with this environment; ``WATCHDOG_PID`` must be this process's, if set."""
        watchdog = None
        with contextlib.suppress(ValueError):
            meant = int(environ.get("WATCHDOG_PID", os.getpid())) == os.getpid()
            microseconds = int(environ.get("WATCHDOG_USEC", "0"))
            watchdog = microseconds / 1e6 if meant and microseconds > 0 else None
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog)

    def round(self, status: str, *, ready: bool) -> None:
        """Report one round of the supervisor: ``status`` for a person; ``ready`` counts from its first time on."""
        now = time.monotonic()
        if self._feed_every is not None and now >= self._fed_at + self._feed_every:
            self._fed_at = now
            self._send("WATCHDOG=1")
        if ready and not self._ready and not self._stopping:
            self._ready = True
            self._tell("READY=1", status)
        elif not self._reloading and status != self._status and now >= self._status_at + STATUS_INTERVAL:
            self._tell("", status)

    def boot_until(self, moment: float) -> None:
        """The boot goes on and may take until ``moment`` (monotonic seconds): ask for that much time."""
        if self._ready or self._stopping or moment < self._extended_to + _EXTEND_STEP:
            return
        self._extended_to = moment
        self._send(f"EXTEND_TIMEOUT_USEC={max(int((moment - time.monotonic()) * 1e6), 1)}")

    def stopping(self, status: str) -> None:
        """The group begins to stop."""
        self._stopping = True
        self._tell("STOPPING=1", status)

    def reloading(self, status: str) -> None:
        """A reload begins; :meth:`reloaded` must follow, however it ends. Before the group was ready it is no news."""
        if not self._ready:
            return
        self._reloading = True
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}", status)

    def reloaded(self, status: str) -> None:
        """The reload has ended, well or not."""
        ended, self._reloading = self._reloading, False
        if ended and not self._stopping:
            self._tell("READY=1", status)

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, state: str, status: str) -> None:
        self._status, self._status_at = status, time.monotonic()
        line = " ".join(status.split())[:_STATUS_LIMIT]
        self._send(f"{state}\nSTATUS={line}" if state else f"STATUS={line}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError):
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            self._socket.sendto(message.encode("utf-8", "replace"), self._address)
