"""Isolated actors in the workers of a group: their processes end with the worker, and before its jobs run again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from taskqd import TaskQ
from tests.apps import isolated
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.support import Command, wait_until

WAIT = 60
FILE = """\
actors = "tests.apps.isolated:actors"
[supervisor]
runtime_dir = "run"
preload = "{preload}"
[scheduler]
enabled = false
[[workers]]
name = "io"
replicas = 2
max_concurrency = 2
cancellation_grace_period = 1
cleanup_grace_period = 1
"""


@pytest.fixture(params=["require", "off"], ids=["forked workers", "exec'ed workers"])
def group(
    request: pytest.FixtureRequest, start: Callable[..., Command], child_env: dict[str, str], fleet: Fleet
) -> Iterator[Command]:
    """A group of two workers."""
    (fleet.directory / "group.toml").write_text(FILE.format(preload=request.param))
    env = {**child_env, "EXECUTION_LOG": fleet.env["EXECUTION_LOG"]}
    command = start("run", "group.toml", env=env)
    wait_until(lambda: len(list(events(command, "ready"))) >= 2, WAIT, command.stderr)
    try:
        yield command
    finally:
        for pid in everything(fleet):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def everything(fleet: Fleet) -> list[int]:
    """What isolated actors have started, and they themselves."""
    started = [int(pid) for line in fleet.executions("started") for pid in line.key.split()]
    return sorted({*started, *(one.pid for one in fleet.executions())})


def left(fleet: Fleet) -> list[int]:
    """What of that is alive."""
    return [pid for pid in everything(fleet) if isolated.is_alive(pid)]


async def test_a_killed_worker_s_jobs_run_again_once_nothing_of_them_is_left(
    group: Command, fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    handle = await tq.enqueue(isolated.forks, Work(seconds=300))
    (first,) = await fleet.wait_for_executions(1, timeout=WAIT)
    worker = psutil.Process(first.pid).parents()[2]  # its zygote and that one's warden are between
    worker.kill()
    await fleet.wait_for_executions(2, timeout=WAIT)
    assert fleet.executions("alive") == []
    assert [(one["outcome"], one["cause"]) for one in await jobs.attempts(handle.job_id)] == [
        ("crashed", "worker_dead")
    ]
    assert len(everything(fleet)) == 6
    assert len(left(fleet)) == 3
    group.signal(signal.SIGKILL)
    wait_until(lambda: not left(fleet))


async def test_a_group_that_stops_leaves_nothing(group: Command, fleet: Fleet, tq: TaskQ) -> None:
    handles = [await tq.enqueue(actor, Work(seconds=300)) for actor in (isolated.forks, isolated.stubborn)]
    await fleet.wait_for_executions(2, timeout=WAIT)
    assert len(everything(fleet)) == 4
    group.signal(signal.SIGTERM)
    assert group.wait(WAIT) == 0, group.stderr
    assert left(fleet) == []
    for handle in handles:
        row = await handle.row()
        assert (row.status, row.attempt, row.interrupt_count) == ("pending", 1, 1)
