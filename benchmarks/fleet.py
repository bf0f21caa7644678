"""Workers with a heavy application: how soon they are up, replaced and gone, and what each of them needs."""

from __future__ import annotations

import os
import signal
import statistics
import time
from dataclasses import dataclass

from benchmarks.group import at, memory, running

WORKERS = 8
IDLE = 1.0
"""Seconds after which an idle process has done what it does after its start."""
_FILE = """\
actors = "benchmarks.heavy:registry"
scheduler = {{ enabled = false }}
defaults = {{ queues = "bench", max_concurrency = 4, log_level = "WARNING" }}
workers = [{{ name = "io", replicas = {workers}, preload = "{preload}" }}]
"""
_FEARLESS = "stable_after = 0\nburst_limit = 0\n"
"""Of ``[supervisor]``: whoever is killed is started again at once, however often."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Of one start of the group. Seconds, and MiB."""

    spawn: float
    """From the first process that is made until all are ready; of forked ones with the import before."""
    forks: float
    """The same without the import."""
    whole: float
    """From the start of the command until all are ready."""
    memory: float
    """What an idle worker shares with no other process."""
    heal: float
    """From the SIGKILL of a worker until its replacement is ready."""
    stop: float
    """From the SIGTERM of the idle group until it has ended."""


def measure_fleet(dsn: str, preload: str, kills: int) -> Fleet:
    """Start eight workers that are forked (``preload`` = require) or exec'ed (off), and return how that went."""
    with running(dsn, _FILE.format(workers=WORKERS, preload=preload), supervisor=_FEARLESS) as group:
        ready = group.wait_ready(WORKERS)
        last = max(map(at, ready))
        forks = last - min(map(at, group.events("spawn")))
        imported = sum(event["import_s"] for event in group.events("preload-ready"))
        time.sleep(IDLE)
        pids = [event["pid"] for event in ready]
        private = statistics.median(memory(pid, "Private_") for pid in pids)
        heals = []
        for number, victim in enumerate(pids[:kills]):
            time.sleep(IDLE)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            heals.append(at(group.wait_ready(WORKERS + number + 1)[-1]) - killed)
        time.sleep(0.5)
        stop = group.stop()
        return Fleet(forks + imported, forks, last - group.began, private, statistics.median(heals), stop)
