"""A lease is kept for as long as its job runs, or its worker ends before the lease does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from taskqd import ActorRef, TaskQ
from tests.apps import stalls
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable

ACTORS = "tests.apps.stalls:actors"
WAIT = 60
SHORTEST = {
    "TASKQ_HEARTBEAT_INTERVAL": "0.5",
    "TASKQ_HEARTBEAT_COMMAND_TIMEOUT": "1",
    "TASKQ_MAX_HEARTBEAT_FAILURES": "2",
    "TASKQ_LOCK_LEASE": "5.5",
}
"""The shortest lease that these allow."""
STANDALONE = {
    "TASKQ_HEARTBEAT_INTERVAL": "10",
    "TASKQ_HEARTBEAT_COMMAND_TIMEOUT": "2",
    "TASKQ_MAX_HEARTBEAT_FAILURES": "3",
    "TASKQ_LOCK_LEASE": "60",
    "TASKQ_CANCELLATION_GRACE_PERIOD": "30",
    "TASKQ_CLEANUP_GRACE_PERIOD": "10",
    "TASKQ_TERMINATION_GRACE_PERIOD": "85",
}
"""The defaults, but for the watchdog, which is off in every test of a fleet."""
BLOCKERS = [stalls.waits, stalls.computes]


async def no_reaps(
    fleet: Fleet, tq: TaskQ, jobs: JobTable, actor: ActorRef[Work, Any], seconds: float, env: dict[str, str]
) -> None:
    """Block a worker's loop while a scheduler and another worker look for leases that have ended."""
    worker = fleet.worker(actors=ACTORS, env=env)
    beside = await tq.enqueue(stalls.slow_plain, Work(seconds=seconds))
    await fleet.wait_for_executions(1)
    handle = await tq.enqueue(actor, Work(seconds=seconds))
    await fleet.wait_for_executions(2)
    scheduler = fleet.scheduler(env=env)
    fleet.worker(actors="tests.apps.basic:few", env=env)
    for one in (handle, beside):
        await one.wait(seconds + WAIT)
        row = await one.row()
        assert (row.status, row.attempt, row.epoch) == ("succeeded", 1, 1)
        assert await jobs.attempts(one.job_id) == []
        assert await jobs.events(one.job_id) == []
    assert (worker.process.poll(), scheduler.process.poll()) == (None, None)


@pytest.mark.parametrize("actor", BLOCKERS, ids=["a call", "Python code"])
async def test_a_loop_blocked_for_longer_than_the_lease_loses_nothing(
    fleet: Fleet, tq: TaskQ, jobs: JobTable, actor: ActorRef[Work, Any]
) -> None:
    await no_reaps(fleet, tq, jobs, actor, 7.0, SHORTEST)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("actor", BLOCKERS, ids=["a call", "Python code"])
async def test_a_loop_blocked_for_five_minutes_loses_nothing(
    fleet: Fleet, tq: TaskQ, jobs: JobTable, actor: ActorRef[Work, Any]
) -> None:
    await no_reaps(fleet, tq, jobs, actor, 300.0, STANDALONE)


async def test_c_code_that_keeps_the_interpreter_lock_ends_the_worker_before_its_lease(
    fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    worker = fleet.worker(actors=ACTORS, env=SHORTEST)
    handle = await tq.enqueue(stalls.holds, Work(seconds=60))
    await fleet.wait_for_executions(1)
    assert worker.wait(20) == 70
    row = await jobs.row(handle.job_id)
    assert row["status"] == "running"
    assert row["lock_expires_at"] > row["now"], "nobody else can have begun it"
    assert "in holds" in worker.stderr, "the stack names the culprit"


async def test_what_keeps_it_for_less_goes_on(fleet: Fleet, tq: TaskQ) -> None:
    worker = fleet.worker(actors=ACTORS, env=SHORTEST)
    for _ in range(3):
        assert await (await tq.enqueue(stalls.holds, Work(seconds=0.5))).wait(WAIT) == "held"
    assert list(events(worker, "worker-watchdog-trip")) == []
    assert worker.process.poll() is None


GUARD = """
import ctypes, sys, time
from taskqd.worker.attempt import Leases
from taskqd.worker.lease_guard import LeaseGuard

leases = Leases()
guard = LeaseGuard(leases, 1.0)
{steps}
ctypes.PyDLL(None).sleep(2)
"""


def test_the_guard_ends_a_process_that_holds_something_and_hangs() -> None:
    cases = {
        "guard.start(); leases.add(1)": 70,
        "guard.start(); leases.add(1); guard.proven(time.monotonic())": 70,
        "guard.start()": 0,
        "guard.start(); leases.add(1); leases.discard(1); guard.look()": 0,
        "guard.start(); leases.add(1); leases.discard(1); guard.proven(time.monotonic())": 0,
        "guard.start(); leases.add(1); guard.stop()": 0,
        "leases.add(1)": 0,
    }
    running = [subprocess.Popen([sys.executable, "-c", GUARD.format(steps=steps)]) for steps in cases]
    assert dict(zip(cases, [each.wait(60) for each in running], strict=True)) == cases
