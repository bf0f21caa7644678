"""Every parameter of the public surface is given nonsense: accepted, or refused by name, and nothing is stored then."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from pydantic import BaseModel

import taskqd
from taskqd import ConcurrencyReservation, EnqueueItem, JobFilter, ProviderRegistry, Registry, RetryPolicy, Scope, TaskQ
from taskqd.actors.context import Cancellation, JobContext
from taskqd.actors.progress import Progress
from taskqd.batch import AbortBatchAfter, BatchFilter, wait_for_batch
from taskqd.domain.ids import new_uuid
from taskqd.insights import insights_sql, read_insights
from taskqd.worker.budget import compute_connection_budget
from tests.client.actors import Number, double
from tests.package.nonsense import NONSENSE, complaint, parameters, shown

Count = Callable[[], Awaitable[list[int]]]


@pytest.fixture
async def tq(dsn: str, schema: str) -> AsyncIterator[TaskQ]:
    """An open client."""
    async with TaskQ(dsn=dsn, schema=schema) as client:
        yield client


@pytest.fixture
def stored(conn: asyncpg.Connection, schema: str) -> Count:
    """Count what a call may have stored, and what one may have ended."""
    tables = ("jobs where cancel_requested_at is null and status = 'pending'", "jobs", "schedules", "batches")

    async def count() -> list[int]:
        return [await conn.fetchval(f'select count(*) from "{schema}".{table}') for table in tables]

    return count


async def refused_or_accepted(
    call: Callable[..., Any], base: dict[str, Any], names: list[str], stored: Count | None = None
) -> None:
    """Call with ``base``, each of ``names`` in turn replaced by each nonsense."""
    wrong = []
    for name in names:
        for value in NONSENSE:
            before = await stored() if stored else []
            accepted, problem = await complaint(lambda name=name, value=value: call(**{**base, name: value}), name)
            if problem:
                wrong.append(f"{name} = {shown(value)}: {problem}")
            elif not accepted and stored and await stored() != before:
                wrong.append(f"{name} = {shown(value)}: refused, and yet something was stored")
    assert not wrong, "\n" + "\n".join(wrong)


ELSEWHERE = {
    "ActorRef", "CancelOrigin", "CancelResult", "EnqueueItem", "ErrorReporter", "JobContext", "JobHandle", "JobOrder",
    "JobProgress", "JobRow", "JobStatus", "ProviderRegistry", "ScheduleHandle", "Scope", "cron", "every", "new_uuid",
    "wait_for_batch",
}  # fmt: skip
"""Public names that are given nonsense below, that only we make, or that take nothing."""


def test_no_public_name_is_left_out() -> None:
    given = {each[0] for each in DECLARED} | ELSEWHERE
    errors = {name for name in taskqd.__all__ if _is_error(getattr(taskqd, name)) and name not in given}
    assert set(taskqd.__all__) - errors == given & set(taskqd.__all__)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


# -- declared in code -----------------------------------------------------------------------------


async def _fn(payload: Number) -> None: ...


class Thing(BaseModel):
    pass


DECLARED: list[tuple[str, Callable[..., Any], dict[str, Any], list[str]]] = [
    ("actor", lambda **options: taskqd.actor(**options)(_fn), {}, parameters(taskqd.actor, without=("fn", "unknown"))),
    ("RetryPolicy", RetryPolicy, {}, parameters(RetryPolicy)),
    ("RetryOverride", taskqd.RetryOverride, {}, parameters(taskqd.RetryOverride)),
    ("Snooze", taskqd.Snooze, {}, parameters(taskqd.Snooze)),
    ("RetryAfter", taskqd.RetryAfter, {"delay": 1}, parameters(taskqd.RetryAfter)),
    ("ConcurrencyReservation", ConcurrencyReservation, {"name": "a", "slots": 1}, ["name", "slots"]),
    ("TaskqRuntime", taskqd.TaskqRuntime, {}, parameters(taskqd.TaskqRuntime)),
    (
        "taskq_lifespan",
        lambda **given: taskqd.taskq_lifespan(**{"runtime": taskqd.TaskqRuntime(), **given}),
        {},
        ["runtime", "lifespan"],
    ),
    ("Registry", Registry, {"actors": [double]}, parameters(Registry)),
    ("JobFilter", JobFilter, {}, parameters(JobFilter)),
    ("BatchFilter", BatchFilter, {}, parameters(BatchFilter)),
    ("AbortBatchAfter", AbortBatchAfter, {}, parameters(AbortBatchAfter)),
    ("budget", compute_connection_budget, {}, parameters(compute_connection_budget)),
    ("insights_sql", insights_sql, {"schema": "s"}, parameters(insights_sql)),
    ("TaskQ", TaskQ, {"dsn": "postgresql://localhost/x"}, parameters(TaskQ, without=("pool",))),
    ("TaskQ pool", TaskQ, {}, ["pool"]),
    (
        "register_value",
        lambda **given: ProviderRegistry().register_value(**given),
        {"kind": Thing, "scope": Scope.LOOP, "value": Thing()},
        ["kind", "scope", "value"],
    ),
    (
        "register_factory",
        lambda **given: ProviderRegistry().register_factory(**given),
        {"kind": Thing, "scope": Scope.LOOP, "factory": Thing},
        ["kind", "scope", "factory", "timeout"],
    ),
    (
        "register_class",
        lambda **given: ProviderRegistry().register_class(**given),
        {"kind": Thing, "scope": Scope.LOOP},
        ["kind", "scope", "implementation", "timeout"],
    ),
]


@pytest.mark.parametrize(("call", "base", "names"), [each[1:] for each in DECLARED], ids=[each[0] for each in DECLARED])
async def test_what_code_declares(call: Callable[..., Any], base: dict[str, Any], names: list[str]) -> None:
    await refused_or_accepted(call, base, names)


OPTIONS = [*taskqd.actors.schedules.ScheduleOptions.__annotations__]  # type: ignore[attr-defined]


def _fresh() -> taskqd.ActorRef[Number, None]:
    return taskqd.actor(name="scheduled")(_fn)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda **given: taskqd.cron("0 3 * * *", _fresh(), **given), ["timezone", "dst_strategy", *OPTIONS]),
        (lambda expression: taskqd.cron(expression, _fresh()), ["expression"]),
        (lambda actor: taskqd.cron("0 3 * * *")(actor), ["actor"]),
        (lambda interval: taskqd.every(interval, _fresh()), ["interval"]),
        (lambda **given: taskqd.every(60, _fresh(), **given), OPTIONS),
    ],
    ids=["cron", "cron's expression", "cron's actor", "every's interval", "every"],
)
async def test_what_schedules_code_declares(call: Callable[..., Any], names: list[str]) -> None:
    await refused_or_accepted(call, {}, names)


async def test_what_an_actor_reports() -> None:
    unused: Any = None
    ctx = JobContext(
        job_id=new_uuid(), actor="a", queue="q", attempt=1, fence_token=1, batch_id=None, worker_id=new_uuid(),
        payload=Number(), jobs=unused, log=unused, cancellation=Cancellation(),
        progress=lambda: Progress(None, 0, 65536, lambda: None),
    )  # fmt: skip
    await refused_or_accepted(ctx.progress, {}, ["step", "percent", "detail", "data"])


# -- a client -------------------------------------------------------------------------------------

ITEM: dict[str, Any] = {"actor_ref": double, "payload": Number()}


async def test_enqueue(tq: TaskQ, stored: Count) -> None:
    given = {"actor": double, "payload": Number()}
    await refused_or_accepted(tq.enqueue, given, parameters(tq.enqueue), stored)


async def test_an_item(tq: TaskQ, stored: Count) -> None:
    async def enqueue(**given: Any) -> None:
        await tq.enqueue_batch([EnqueueItem(**given)])

    await refused_or_accepted(enqueue, ITEM, parameters(EnqueueItem), stored)


@pytest.mark.parametrize("method", ["enqueue_batch", "enqueue_batch_streaming", "enqueue_batch_fast"])
async def test_a_batch(tq: TaskQ, stored: Count, method: str) -> None:
    call = getattr(tq, method)
    await refused_or_accepted(call, {"items": [EnqueueItem(**ITEM)]}, parameters(call), stored)


async def test_an_item_of_a_fast_batch(tq: TaskQ, stored: Count) -> None:
    async def enqueue(**given: Any) -> None:
        await tq.enqueue_batch_fast([EnqueueItem(**given)])

    await refused_or_accepted(enqueue, ITEM, parameters(EnqueueItem), stored)


async def test_jobs_that_exist(tq: TaskQ, stored: Count) -> None:
    job = await tq.enqueue(double, Number())
    batch = await tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number())])
    await refused_or_accepted(tq.get, {}, ["job_id"], stored)
    await refused_or_accepted(tq.cancel, {"job_id": new_uuid()}, ["job_id"], stored)
    await refused_or_accepted(tq.retry, {"job_id": job.job_id}, ["job_id"], stored)
    await refused_or_accepted(tq.list, {}, ["which"])
    await refused_or_accepted(lambda **given: tq.list(JobFilter(**given)), {}, parameters(JobFilter))
    await refused_or_accepted(lambda **given: tq.list_batches(BatchFilter(**given)), {}, parameters(BatchFilter))
    await refused_or_accepted(tq.list_batches, {}, ["which"])
    of_one = {"which": JobFilter(actor="x")}
    await refused_or_accepted(tq.cancel_where, of_one, parameters(tq.cancel_where), stored)
    await refused_or_accepted(tq.handle, {"job_id": job.job_id, "actor": double}, ["job_id", "actor"])
    await refused_or_accepted(tq.batch_counts, {"batch_id": batch.batch_id}, ["batch_id", "exclude_job_id"])
    await refused_or_accepted(tq.batch_state, {}, ["batch_id"])
    await refused_or_accepted(tq.batch_jobs, {"batch_id": batch.batch_id}, ["batch_id", "after", "limit"])
    await refused_or_accepted(read_insights, {"database": tq._pool.pool}, ["schema", "window"])
    await tq.cancel(job.job_id)
    await refused_or_accepted(tq.cancel, {"job_id": job.job_id}, ["reason", "connection"], stored)
    await refused_or_accepted(job.cancel, {}, ["reason"], stored)


async def test_waiting(tq: TaskQ, conn: asyncpg.Connection, schema: str) -> None:
    job = await tq.enqueue(double, Number())
    await conn.execute(
        f"""update "{schema}".jobs set status = 'succeeded', result = '{{"n": 0}}', finished_at = clock_timestamp()"""
    )
    await refused_or_accepted(job.wait, {}, ["timeout"])

    async def stream(poll: Any) -> None:
        async for _ in job.progress_stream(poll=poll):
            pass

    await refused_or_accepted(stream, {}, ["poll"])
    empty = {"jobs": tq, "batch_id": new_uuid(), "on_empty": "ok"}
    await refused_or_accepted(
        wait_for_batch, {**empty, "snooze_via_exception": False}, parameters(wait_for_batch, without=("jobs",))
    )


async def test_schedules(tq: TaskQ, stored: Count) -> None:
    await tq.create_schedule("0 3 * * *", double, name="nightly", enabled=False)

    async def create(**given: Any) -> None:
        given.setdefault("name", str(new_uuid()))
        await tq.create_schedule(**given)

    given = {"when": "0 3 * * *", "actor": double}
    await refused_or_accepted(create, given, ["when", "actor", "timezone", "dst_strategy", *OPTIONS], stored)
    await refused_or_accepted(tq.get_schedule, {}, ["name"])
    await refused_or_accepted(tq.list_schedules, {}, ["actor", "enabled"])
    changes = taskqd.client.schedules.CHANGEABLE  # type: ignore[attr-defined]
    await refused_or_accepted(tq.update_schedule, {"name": "nightly"}, ["name", *changes], stored)
    schedule = await tq.get_schedule("nightly")
    await refused_or_accepted(schedule.disable, {}, ["reason"])
    await refused_or_accepted(tq.delete_schedule, {}, ["name"])
