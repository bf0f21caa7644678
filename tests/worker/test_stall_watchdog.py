"""What the watchdog ends a process for, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PARTS = """
import asyncio, time
from taskqd.domain.background import BackgroundLoop
from taskqd.observe import logs
from taskqd.worker.watchdog import Watchdog

logs.configure("json", "INFO")

async def main():
    async def step():
        return None
    loop = BackgroundLoop("part", step, cadence=60, on_failure=print)
    loop.start()
    ended = lambda: "the part was cancelled" if loop.has_ended else ""
    watchdog = Watchdog(budget=30, warn=20, check_interval=0.1, ended=ended)
    watchdog.start()
    await asyncio.sleep(0.5)
    {then}
    await asyncio.sleep({seconds})

asyncio.run(main())
"""


def run(then: str, seconds: float) -> subprocess.CompletedProcess[str]:
    code = PARTS.format(then=then, seconds=seconds)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)


def test_a_part_that_has_ended_ends_the_process() -> None:
    done = run("loop._task.cancel()", 60)
    assert done.returncode == 70
    assert '"detector": "part-ended"' in done.stderr
    assert "the part was cancelled" in done.stderr


def test_a_part_that_was_stopped_does_not() -> None:
    assert run("await loop.stop()", 0.5).returncode == 0


def test_a_shutdown_that_overruns_ends_the_process() -> None:
    done = run("watchdog.set_deadline(time.monotonic() + 0.2)", 60)
    assert done.returncode == 70
    assert '"detector": "shutdown-deadline"' in done.stderr
