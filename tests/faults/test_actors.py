"""Actors that take more with them than their own job."""

from __future__ import annotations

from taskqd import TaskQ
from tests.apps import faulty
from tests.apps.basic import Work
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.test_worker_process import failure

ACTORS = "tests.apps.faulty:actors"
WAIT = 60


async def test_one_that_exits_its_process_is_a_crash_and_ends_with_its_attempts(
    fleet: Fleet, tq: TaskQ, jobs: JobTable
) -> None:
    fleet.scheduler()
    handle = await tq.enqueue(faulty.vanishes, Work(key="a"))
    neighbours = [await tq.enqueue(faulty.succeed, Work(key=str(n), seconds=600)) for n in range(2)]
    for attempt in (1, 2):
        worker = fleet.worker(actors=ACTORS, ready=False)
        await eventually(lambda worker=worker: worker.process.poll() is not None, WAIT)
        assert worker.process.returncode == 7
        assert len([run for run in fleet.executions() if run.actor == "vanishes"]) == attempt
    await eventually(lambda: _ended(jobs), WAIT)
    row = await handle.row()
    assert (row.status, row.error_class, row.attempt) == ("crashed", "WorkerCrashed", 2)
    assert [one["outcome"] for one in await jobs.attempts(handle.job_id)] == ["crashed", "crashed"]
    await jobs.update([one.job_id for one in neighbours], payload='\'{"key": "on"}\'')
    fleet.worker(actors=ACTORS)
    assert [await one.wait(WAIT) for one in neighbours] == ["on", "on"], "who was beside it runs again"


async def _ended(jobs: JobTable) -> bool:
    return (await jobs.counts()).get("crashed") == 1


async def test_one_that_returns_ten_megabytes_fails_alone(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(actors=ACTORS, concurrency=2)
    neighbour = await tq.enqueue(faulty.succeed, Work(key="beside", seconds=2.0))
    row = await failure(await tq.enqueue(faulty.big, Work(size=10_000_000)))
    assert (row.error_class, row.attempt) == ("ResultTooLarge", 1)
    assert "10000002 bytes" in row.error_message
    assert await neighbour.wait(WAIT) == "beside"
