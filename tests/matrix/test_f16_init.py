"""F16: As init of a PID namespace, with orphans by the thousand and a signal that is lost, the supervisor buries
whatever comes to it and misses no end.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest

from taskqd.supervisor import reaper
from taskqd.supervisor.reaper import Reaper
from tests.matrix.conftest import Trial
from tests.matrix.oracle import needs, works
from tests.support import Command, eventually, wait_until

AS_INIT = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
ORPHANS = 1000


@pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])
def test_f16_orphans_without_number_are_buried_and_counted(trial: Trial, preload: str) -> None:
    needs(works(*AS_INIT, "true"), "the right to make a PID namespace")
    with trial(modes={"io": "orphanage,second-life"}, preload=preload) as g:
        assert g.stop() == 0
        g.command = Command([*AS_INIT, *g.command.argv], g.directory, g._env)
        g.wait_for("ready", timeout=60)
        (init,) = psutil.Process(g.command.pid).children()
        wait_until(lambda: reaped(g.ask("/metrics")[1]["text"]) >= ORPHANS, 60)
        assert g.ask("/ready")[0] == 200
        wait_until(lambda: not zombies(init), 50, "no zombie is left, ten times the five seconds that are allowed")
        assert not g.events("child-exit")
        worker_of(init).kill()
        g.wait_for("ready", 2)
        init.terminate()
        assert g.command.wait() == 0


async def test_f16_an_end_whose_signal_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "_SWEEP_INTERVAL", 0.1)
    ended: dict[int, int] = {}
    watching = Reaper()
    watching.start()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
    try:
        for code in (0, 7):
            process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
            watching.watch(process.pid, lambda status, pid=process.pid: ended.update({pid: status}))
            process.returncode = 0  # it is waited for elsewhere
        await eventually(lambda: sorted(ended.values()) == [0, 7], 20)
        assert watching.unknown == 0
    finally:
        watching.stop()


async def test_f16_a_stranger_that_ends_is_buried_and_counted() -> None:
    watching = Reaper()
    watching.start()
    try:
        process = subprocess.Popen(["true"])
        process.returncode = 0
        await eventually(lambda: watching.unknown == 1, 20)
        assert not psutil.pid_exists(process.pid)
    finally:
        watching.stop()


def reaped(text: str) -> int:
    """How many strangers the supervisor says it has buried."""
    (line,) = [line for line in text.splitlines() if line.startswith("taskqd_unknown_reaped_total ")]
    return int(line.split()[1])


def zombies(init: psutil.Process) -> list[psutil.Process]:
    """Every process of the namespace that has ended and was not buried."""
    return [process for process in init.children(recursive=True) if process.status() == psutil.STATUS_ZOMBIE]


def worker_of(init: psutil.Process) -> psutil.Process:
    """The worker, by the number that it has here."""
    (worker,) = [child for child in init.children() if child.name() == "taskqd io.0"]
    return worker
