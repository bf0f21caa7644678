"""Supervisors of others, with eight processes of an application with the same imports, on sockets of their own."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet import IDLE, WORKERS
from benchmarks.footprint import share_of_processor
from benchmarks.group import PATIENCE, ROOT, is_gone, memory, until
from benchmarks.orphans import kill_and_wait

WATCHED = 4.5
"""Seconds in which a peer may notice that a process is blocked."""
LEFT = 2.0
"""Seconds in which its orphans may end."""
_BIN = Path(sys.executable).parent
_APP = "benchmarks.peer_app"
_PROGRAM = f"{sys.executable} -m {_APP}"
_FILES = {
    "supervisord": f"""\
[supervisord]
nodaemon = true
logfile = /dev/null
logfile_maxbytes = 0
pidfile = pid
[program:io]
command = {_PROGRAM}
process_name = %(process_num)s
numprocs = {WORKERS}
stdout_logfile = NONE
stderr_logfile = NONE
""",
    "circus": f"""\
[circus]
endpoint = ipc://control
pubsub_endpoint = ipc://events
[watcher:io]
cmd = {_PROGRAM}
numprocesses = {WORKERS}
copy_env = true
""",
}
COMMANDS: Mapping[str, list[str]] = {
    "gunicorn": f"gunicorn --preload -c python:{_APP} -b unix:sock -w {WORKERS} {_APP}:wsgi".split(),
    "granian": f"granian --interface asgi --uds sock --workers {WORKERS} --respawn-failed-workers {_APP}:asgi".split(),
    "uvicorn": f"uvicorn --uds sock --workers {WORKERS} {_APP}:asgi".split(),
    "supervisord": ["supervisord", "-c", "file"],
    "circus": ["circusd", "file"],
}


@dataclass(frozen=True, slots=True)
class Peer:
    """Of one start of a peer. Seconds, and MiB, as in ``Fleet``."""

    whole: float
    heal: float
    memory: float
    stop: float


@dataclass(frozen=True, slots=True)
class Care:
    """How a peer looks after its processes, and what it needs itself: MiB, and a share of a processor."""

    memory: float
    share: float
    silence: float | None
    """Seconds until a blocked process was noticed; None when it was not within ``WATCHED``."""
    orphans: int
    """Processes that were left ``LEFT`` seconds after the SIGKILL of their supervisor."""


class Running:
    """A peer with its processes."""

    def __init__(self, name: str, directory: Path) -> None:
        self._ready = directory / "ready"
        if name in _FILES:
            (directory / "file").write_text(_FILES[name])
        self.began = time.time()
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(_BIN / COMMANDS[name][0]), *COMMANDS[name][1:]],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), "READY": str(self._ready)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def ready(self) -> list[tuple[int, float]]:
        """Return the number and the time of every process that can work, in this order."""
        lines = self._ready.read_text().splitlines() if self._ready.exists() else []
        return [(int(pid), float(when)) for pid, when in map(str.split, lines)]

    def wait_ready(self, count: int) -> list[tuple[int, float]]:
        """Return the first ``count`` of these when there are so many."""
        if not until(lambda: len(self.ready()) >= count, lambda: self.process.poll() is not None):
            raise SystemExit(f"a peer did not come up:\n{self._log.read_text()[-3000:]}")
        return self.ready()[:count]


@contextmanager
def _running(name: str) -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="tq", dir="/tmp") as directory:
        peer = Running(name, Path(directory))
        try:
            yield peer
        finally:
            if peer.process.poll() is None:
                peer.process.kill()
                peer.process.wait()
            for pid, _ in peer.ready():
                if not is_gone(pid):
                    os.kill(pid, signal.SIGKILL)


def measure_peer(name: str) -> Peer:
    """Start it, kill one of its processes, stop it."""
    with _running(name) as peer:
        ready = peer.wait_ready(WORKERS)
        time.sleep(IDLE)
        private = statistics.median(memory(pid, "Private_") for pid, _ in ready)
        killed = time.time()
        os.kill(ready[0][0], signal.SIGKILL)
        heal = peer.wait_ready(WORKERS + 1)[-1][1] - killed
        time.sleep(0.5)
        began = time.monotonic()
        peer.process.send_signal(signal.SIGTERM)
        peer.process.wait(PATIENCE)
        return Peer(max(when for _, when in ready) - peer.began, heal, private, time.monotonic() - began)


def measure_care(name: str) -> Care:
    """Start it, block one of its processes, kill it, and see what is left."""
    with _running(name) as peer:
        pids = [pid for pid, _ in peer.wait_ready(WORKERS)]
        time.sleep(IDLE)
        pss, share = memory(peer.process.pid, "Pss"), share_of_processor(peer.process.pid)
        began = time.monotonic()
        os.kill(pids[0], signal.SIGUSR2)
        noticed = until(lambda: is_gone(pids[0]), lambda: False, WATCHED)
        silence = time.monotonic() - began
        kill_and_wait(peer.process.pid, pids, LEFT)
        orphans = sum(not is_gone(pid) for pid in pids)
        return Care(pss, share, silence if noticed else None, orphans)
