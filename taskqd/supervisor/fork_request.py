"""The one fork that is asked for."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from taskqd.supervisor.child import Child


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """For which child, and the supervisor's ends of what the new process gets."""

    child: Child
    link: socket.socket
    dump: int | None
    deadline: float

    def drop(self) -> None:
        """Let go of it: a process that was made nevertheless finds its link closed, and ends."""
        self.link.close()
        if self.dump is not None:
            os.close(self.dump)
