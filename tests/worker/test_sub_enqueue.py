"""Jobs that enqueue jobs, with real workers that are killed in between."""

from __future__ import annotations

from uuid import uuid5

import pytest

from taskqd import TaskQ, new_uuid
from tests.apps import batches
from tests.apps.batches import Cursor, Gathered, Order
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.support import eventually

APP = "tests.apps.batches:actors"


async def test_a_chain_goes_on_where_its_worker_was_killed(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    for _ in range(3):
        fleet.worker(actors=APP, ready=False)
    await tq.enqueue(batches.walk, Cursor(end=9, dies_before=3, dies_after=6))

    async def walked() -> bool:
        return (await jobs.counts()) == {"succeeded": 10}

    await eventually(walked, 90)
    steps = [int(step.key) for step in fleet.executions("step")]
    assert sorted(set(steps)) == list(range(10))
    assert sorted(steps) == sorted([*range(10), 3, 6]), "the killed steps ran once more, no other did"


@pytest.mark.parametrize("dies", ["before", "between", "after"])
async def test_a_batch_is_made_once_however_often_its_maker_runs(
    fleet: Fleet, tq: TaskQ, jobs: JobTable, dies: str
) -> None:
    for _ in range(2):
        fleet.worker(actors=APP, ready=False)
    order = Order(batch=new_uuid(), size=20, dies=dies)
    await tq.enqueue(batches.make, order)

    async def all_ended() -> bool:
        return (await jobs.counts()) == {"succeeded": 22}

    await eventually(all_ended, 90)
    assert (await tq.batch_counts(uuid5(order.batch, "pieces"))) == {"succeeded": 20}
    assert len(fleet.executions("gathered")) == 1
    assert {step.key for step in fleet.executions("piece")} == {str(n) for n in range(20)}
    (record,) = await jobs.conn.fetch(f"select id from \"{jobs.schema}\".jobs where actor = 'gather'")
    assert await tq.handle(record["id"], batches.gather).wait(timeout=30) == Gathered(total=20, succeeded=20)
