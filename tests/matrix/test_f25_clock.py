"""F25: The wall clock jumps by an hour, there and back: nothing happens. Deadlines are of another clock, leases of the
database's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.jobs import JobTable
from tests.matrix.conftest import Trial
from tests.matrix.oracle import needs
from tests.supervisor.conftest import ACTORS, Group
from tests.support import eventually, wait_until

LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
HOUR = 3600


@pytest.fixture
def clock(short_dir: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A file that says by how much the wall clock is wrong, and the environment in which it does."""
    needs(LIBRARY is not None, "libfaketime (Debian's package faketime)")
    file = short_dir / "clock"
    file.write_text("+0")
    before = set(Path("/dev/shm").glob("*faketime*"))
    yield (
        file,
        {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "NO_FAKE_STAT": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "TASKQ_SWEEP_INTERVAL": "1",
        },
    )
    for left in set(Path("/dev/shm").glob("*faketime*")) - before:  # of those that were killed
        left.unlink(missing_ok=True)


async def test_f25_an_hour_there_and_back_changes_nothing(
    trial: Trial, clock: tuple[Path, dict[str, str]], jobs: JobTable
) -> None:
    file, env = clock
    tables = {
        "scheduler": "enabled = true",
        "[workers]": "replicas = 2",
        "supervisor": "stable_after = 0\nstall_after = 30",
    }
    with trial(actors=ACTORS, tables=tables, ready=3, **env) as g:
        await work(jobs)
        for jump in (HOUR, -HOUR):
            file.write_text(f"{jump:+d}")
            wait_until(lambda jump=jump: abs(wrong_by(g) - jump) < HOUR / 2, 30, "the clock has jumped")
            beats = {child["name"]: child["beat"]["seq"] for child in g.ask("/status")[1]["children"]}
            await work(jobs)
            wait_until(lambda beats=beats: all_beat_on(g, beats, 2), 60)
            assert g.ask("/ready")[0] == 200
            ready = len(g.events("ready"))
            began = time.monotonic()
            os.kill(g.ask("/status")[1]["children"][1]["pid"], signal.SIGKILL)
            g.wait_for("ready", ready + 1)
            assert time.monotonic() - began < 20
            g.wait_for("jobs-released", 1 if jump > 0 else 2)
        assert len(g.events("child-exit")) == 2, "those that were killed here"
        odd = {"stalled", "kill", "correlated-stall", "verdict", "release-failed"}
        assert not [event for event in g.events() if event["event"] in odd]
        assert max([event["gap_s"] for event in g.events("standstill")], default=0) < HOUR / 2


def wrong_by(g: Group) -> float:
    """How far the supervisor's clock is ahead, by the time that it gives its events."""
    g.command.signal(signal.SIGUSR1)
    count = len(g.events("status"))
    wait_until(lambda: len(g.events("status")) > count or (g.command.signal(signal.SIGUSR1) or False), 30)
    told = datetime.fromisoformat(g.events("status")[-1]["timestamp"])
    return told.timestamp() - time.time()


def all_beat_on(g: Group, before: dict[str, int], count: int) -> bool:
    """Every process has beaten so often since then."""
    now = {child["name"]: child["beat"].get("seq", 0) for child in g.ask("/status")[1]["children"]}
    return all(now[name] >= seq + count for name, seq in before.items())


async def work(jobs: JobTable) -> None:
    """Have some jobs done, one of them in a moment."""
    ids = await jobs.plant(10, actor="'nothing'", max_attempts="50")
    ids += await jobs.plant(
        1, actor="'nothing'", status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 second'"
    )

    async def done() -> bool:
        ended = f"select count(*) from \"{jobs.schema}\".jobs where id = any($1) and status = 'succeeded'"
        return bool(await jobs.conn.fetchval(ended, ids) == len(ids))

    await eventually(done, 60)
