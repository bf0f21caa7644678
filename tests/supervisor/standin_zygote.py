"""A zygote of stand-ins: the real fork server, whose children become what ``standin.py`` is.

``python standin_zygote.py NAME=MODE,MODE…``; the name ``zygote`` is its own.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from taskqd.supervisor.fork_server import ForkServer

fork = os.fork


def refuse() -> int:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def first_time(name: str) -> bool:
    """True for the first of the processes that ask."""
    if os.path.exists(name):
        return False
    open(name, "w").close()
    return True


def die_once_forked() -> int:
    """Fork, and die before anybody can be told: the new process is nobody's."""
    os.fork = fork
    made = fork()
    if made:
        os.kill(os.getpid(), signal.SIGKILL)
    return made


def main() -> int:
    modes = {name: mode.split(",") for name, _, mode in (word.partition("=") for word in sys.argv[1:])}

    link = int(os.environ["TASKQD_CONTROL_FD"])

    def prepare() -> None:
        sys.path.insert(0, str(Path(__file__).parent))
        import standin  # noqa: F401

        own = modes.get("zygote", [])
        if "thread" in own:
            threading.Thread(target=time.sleep, args=(1000,), name="exporter", daemon=True).start()
        if "socket" in own:
            sys.listener = socket.create_server(("127.0.0.1", 0))  # type: ignore[attr-defined]
        if "hangs-in-fork" in own and first_time("hung"):
            os.fork = lambda: (open("forking", "w").close(), time.sleep(1000))
        if "dies-in-fork" in own and first_time("died"):
            os.fork = die_once_forked
        if "cannot-fork" in own:
            os.fork = refuse
        if "slow" in own:
            time.sleep(1000)
        if "babbles" in own and not os.path.exists("babbled"):
            open("babbled", "w").close()
            os.write(link, b"\x00garbage\n")
        if "heavy" in own:
            sys.hoard = bytearray(b"x") * (200 * 2**20)  # type: ignore[attr-defined]
        if "dies" in own:
            os._exit(9)
        if "broken" in own:
            raise ImportError("no module named 'gone'")

    ForkServer(prepare).serve()
    sys.argv[1:] = modes.get(os.environ["TASKQD_NAME"], [])
    return int(sys.modules["standin"].main())


if __name__ == "__main__":
    sys.exit(main())
