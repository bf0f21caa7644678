"""What a process logs about its health socket, which somebody may remove."""

from __future__ import annotations

from taskqd.observe.logs import get_logger

_log = get_logger("taskqd.health")


def tell_place(why: str) -> None:
    """Log that the socket was made again, or, with ``why``, that it cannot be."""
    if why:
        _log.warning("health-socket-lost", why=why)
    else:
        _log.warning("health-socket-restored")
