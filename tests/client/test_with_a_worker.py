"""The client against a real worker process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest

from taskqd import EnqueueItem, JobFailed, TaskQ, wait_for_batch
from tests.client.actors import Doubled, Number, double, fail
from tests.support import Command


@pytest.fixture
def worker(start: Callable[..., Command], child_env: dict[str, str], short_dir: Path) -> Command:
    """A worker that serves the queue of these actors."""
    env = child_env | {"TASKQ_HEALTH_SOCKET_PATH": str(short_dir / "health.sock")}
    return start("worker", "--actors", "tests.client.actors:registry", "--queues", "numbers", env=env)


async def test_a_committed_job_runs_and_its_result_arrives(
    worker: Command, tq: TaskQ, conn: asyncpg.Connection
) -> None:
    async with conn.transaction():
        handle = await tq.enqueue(double, Number(n=21), connection=conn)
    assert await handle.wait(timeout=60) == Doubled(n=42), worker.stderr


async def test_a_failure_arrives_with_its_class_and_message(worker: Command, tq: TaskQ) -> None:
    handle = await tq.enqueue(fail, Number(n=7))
    with pytest.raises(JobFailed, match="ended failed: ValueError: no good: 7") as caught:
        await handle.wait(timeout=60)
    assert "raise ValueError" in caught.value.row.error_traceback


async def test_the_end_of_the_job_frees_a_key_that_is_unique_while_active(worker: Command, tq: TaskQ) -> None:
    first = await tq.enqueue(double, Number(n=1), idempotency_key="k", unique_while="active")
    kept = await tq.enqueue(double, Number(n=1), idempotency_key="stays")
    await first.wait(timeout=60)
    await kept.wait(timeout=60)
    second = await tq.enqueue(double, Number(n=2), idempotency_key="k", unique_while="active")
    again = await tq.enqueue(double, Number(n=2), idempotency_key="stays")
    assert (second.was_existing, again.was_existing) == (False, True)
    assert await second.wait(timeout=60) == Doubled(n=4)
    assert await again.wait(timeout=60) == Doubled(n=2)


async def test_a_batch_is_waited_for(worker: Command, tq: TaskQ) -> None:
    batch = await tq.enqueue_batch(
        [EnqueueItem(actor_ref=double if n % 5 else fail, payload=Number(n=n)) for n in range(50)]
    )
    status = await wait_for_batch(tq, batch.batch_id, snooze_interval=1, snooze_via_exception=False, timeout=60)
    assert (status.total, status.succeeded, status.failed) == (50, 40, 10)
