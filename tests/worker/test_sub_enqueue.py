"""Jobs that enqueue jobs, with real workers that are killed in between."""

from __future__ import annotations

from uuid import UUID, uuid5

import pytest

from taskqd import BatchAbortedError, EnqueueItem, JobStatus, TaskQ, new_uuid, wait_for_batch
from taskqd.batch import AbortBatchAfter
from tests.apps import batches
from tests.apps.batches import Cursor, Gathered, Order, Piece
from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.support import Command, eventually

APP = "tests.apps.batches:actors"


async def all_succeed(fleet: Fleet, jobs: JobTable, count: int) -> None:
    """Wait until so many jobs have succeeded and none is left; two workers at least are kept alive for that."""
    crew: list[Command] = []

    async def succeeded() -> bool:
        while sum(worker.process.poll() is None for worker in crew) < 2:
            crew.append(fleet.worker(actors=APP, ready=False))
        return (await jobs.counts()) == {"succeeded": count}

    await eventually(succeeded, 120)


async def test_a_chain_goes_on_where_its_worker_was_killed(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    await tq.enqueue(batches.walk, Cursor(end=9, dies_before=3, dies_after=6))
    await all_succeed(fleet, jobs, 10)
    steps = [int(step.key) for step in fleet.executions("step")]
    assert set(steps) == set(range(10))
    assert len(steps) > 10, "the killed steps ran again"


async def test_a_batch_is_made_once_however_often_its_maker_runs(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    orders = [Order(batch=new_uuid(), size=20, dies=step) for step in ("before", "between", "after")]
    for order in orders:
        await tq.enqueue(batches.make, order)
    await all_succeed(fleet, jobs, 3 * 22)
    for order in orders:
        assert (await tq.batch_counts(uuid5(order.batch, "pieces"))) == {"succeeded": 20}
        gathered = {step.job for step in fleet.executions("gathered") if step.key == str(order.batch)}
        (gathering,) = gathered
        assert await tq.handle(UUID(gathering), batches.gather).wait(30) == Gathered(total=20, succeeded=20)
    assert {step.key for step in fleet.executions("piece")} == {str(n) for n in range(20)}


# -- what the ends of a batch's jobs bring about ----------------------------------------------------


async def counted(tq: TaskQ, status: str, **counters: int) -> None:
    """Wait until the only batch is counted so: two settlements at once may leave that to an idle worker."""

    async def right() -> bool:
        (summary,) = await tq.list_batches()
        return summary.status == status and counters == {name: getattr(summary, name) for name in counters}

    await eventually(right, 30)


async def test_the_finalizer_runs_once_when_the_batch_has_ended(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    order = Order(batch=new_uuid(), size=100)
    await tq.enqueue(batches.spread, order)
    await all_succeed(fleet, jobs, 102)
    assert len({finish.job for finish in fleet.executions("finished")}) == 1
    assert fleet.executions("finished")[0].at >= max(step.at for step in fleet.executions("piece")) - 0.05
    await counted(tq, "complete", total=100, succeeded=100)


async def test_every_kind_of_end_is_counted_by_workers(fleet: Fleet, tq: TaskQ) -> None:
    fleet.worker(actors=APP, concurrency=8)
    pieces = [EnqueueItem(actor_ref=batches.weak, payload=Piece(number=n, fails=n % 3 == 0)) for n in range(300)]
    batch = await tq.enqueue_batch(pieces, finalizer=EnqueueItem(actor_ref=batches.piece, payload=Piece(number=-1)))
    assert batch.finalizer is not None
    await batch.finalizer.wait(timeout=60)
    assert (await batch.status()).is_complete
    await counted(tq, "complete", total=300, succeeded=200, failed=100)


async def test_failures_in_a_row_abort_the_batch(fleet: Fleet, tq: TaskQ) -> None:
    fleet.scheduler()
    fleet.worker(actors=APP, concurrency=1)
    last = EnqueueItem(actor_ref=batches.finish, payload=Order(batch=(name := new_uuid()), size=0))
    pieces = [EnqueueItem(actor_ref=batches.weak, payload=Piece(number=n, fails=True)) for n in range(20)]
    pieces.append(EnqueueItem(actor_ref=batches.weak, payload=Piece(number=-1), queue="nobody"))
    batch = await tq.enqueue_batch(
        pieces, batch_id=name, finalizer=last, failure_policy=AbortBatchAfter(consecutive_failures=5)
    )
    assert batch.finalizer is not None

    async def ended() -> bool:
        return (await batch.status()).pending == 0

    await eventually(ended, 60)
    status = await batch.status()
    assert status.failed >= 5, "what was running or claimed may finish"
    assert status.cancelled == 21 - status.failed
    assert await batch.job_handles[-1].status() == JobStatus.CANCELLED
    with pytest.raises(BatchAbortedError):
        await wait_for_batch(tq, name)
    await eventually(lambda: fleet.executions("finished"), 30, "the finalizer runs all the same")


async def test_what_a_transaction_enqueues_is_there_once_it_commits(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker(actors="tests.apps.batches:transactional")
    order = Order(batch=new_uuid(), size=10)
    await tq.enqueue(batches.scatter, order)

    async def all_ended() -> bool:
        return (await jobs.counts()) == {"succeeded": 32}

    await eventually(all_ended, 60)
    assert await tq.batch_counts(order.batch) == {"succeeded": 30}
    assert len({step.job for step in fleet.executions("piece")}) == 30, "the attempt that failed left none"
    assert len({finish.job for finish in fleet.executions("finished")}) == 1
