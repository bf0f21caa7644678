"""A handle on a job: its status, its row, its result, and the ways in which waiting ends."""

from __future__ import annotations

import asyncio
import time
from uuid import uuid4

import asyncpg
import pytest

from taskqd import JobFailed, JobNotFoundError, JobStatus, TaskQ
from tests.client.actors import Doubled, Number, double, fail
from tests.client.conftest import Finish


async def test_waiting_returns_the_result_as_its_type(tq: TaskQ, finish: Finish) -> None:
    handle = await tq.enqueue(double, Number(n=4))
    waiting = asyncio.create_task(handle.wait(timeout=20))
    await asyncio.sleep(0)
    await finish(handle.job_id, result={"n": 8})
    assert await waiting == Doubled(n=8)
    assert await handle.status() is JobStatus.SUCCEEDED
    assert (await handle.row()).is_terminal


async def test_an_actor_without_a_result_gives_none(tq: TaskQ, finish: Finish) -> None:
    handle = await tq.enqueue(fail, Number())
    await finish(handle.job_id)
    assert await handle.wait(timeout=20) is None


@pytest.mark.parametrize("status", ["failed", "cancelled", "crashed", "abandoned"])
async def test_any_other_end_raises_with_the_row(tq: TaskQ, finish: Finish, status: str) -> None:
    handle = await tq.enqueue(double, Number())
    await finish(handle.job_id, status, error="Boom")
    with pytest.raises(JobFailed) as caught:
        await handle.wait(timeout=20)
    assert str(caught.value) == f"job {handle.job_id} of actor 'double' ended {status}: Boom: Boom"
    assert caught.value.row.status == status


async def test_a_job_without_an_error_class_fails_with_its_status_alone(tq: TaskQ, finish: Finish) -> None:
    handle = await tq.enqueue(double, Number())
    await finish(handle.job_id, "cancelled")
    with pytest.raises(JobFailed, match=r"ended cancelled$"):
        await handle.wait(timeout=20)


@pytest.mark.parametrize("timeout", [0, 0.2])
async def test_the_timeout_ends_the_waiting_not_the_job(tq: TaskQ, timeout: float) -> None:
    handle = await tq.enqueue(double, Number())
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=f"job {handle.job_id} is still pending after {timeout:g} s"):
        await handle.wait(timeout=timeout)
    assert timeout <= time.monotonic() - started < timeout + 3
    assert await handle.status() is JobStatus.PENDING


async def test_a_pruned_job_is_said_to_be_gone(tq: TaskQ, conn: asyncpg.Connection, schema: str) -> None:
    handle = await tq.enqueue(double, Number())
    await conn.execute(f'delete from "{schema}".jobs')
    for ask in (handle.row, handle.status, handle.wait):
        with pytest.raises(JobNotFoundError, match=f"^no job {handle.job_id}$"):
            await ask()


async def test_a_handle_is_made_from_a_known_id(tq: TaskQ, finish: Finish) -> None:
    job_id = (await tq.enqueue(double, Number())).job_id
    await finish(job_id, result={"n": 2})
    handle = tq.handle(job_id, double)
    assert (await handle.wait(timeout=20)).n == 2
    assert repr(handle) == f"JobHandle({job_id}, actor='double')"


async def test_a_handle_on_no_job_says_so(tq: TaskQ) -> None:
    with pytest.raises(JobNotFoundError):
        await tq.handle(uuid4(), double).wait(timeout=20)
