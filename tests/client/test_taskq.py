"""``TaskQ`` itself: opening, closing, whose pool it is, and how misuse is explained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from taskqd import (
    ConfigError,
    DatabaseAuthError,
    DatabaseUnavailableError,
    EnqueueItem,
    JobNotFoundError,
    JobStatus,
    SchemaNotMigratedError,
    TaskQ,
    new_uuid,
)
from taskqd.client import taskq as module
from taskqd.maintenance.retention import Retention
from taskqd.settings import load_settings
from taskqd.storage.migrate import migrate_up
from tests.client.actors import Number, double
from tests.client.conftest import Finish, Wakes
from tests.support import eventually


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({}, "TaskQ takes exactly one of dsn= and pool="),
        ({"dsn": "postgresql://x", "pool": object()}, "TaskQ takes exactly one of dsn= and pool="),
        ({"dsn": "postgresql://x", "min_pool_size": 0}, "min_pool_size = 0 must be a whole number between 1 and 100"),
        ({"dsn": "postgresql://x", "min_pool_size": 6}, "min_pool_size = 6 and max_pool_size = 5 must satisfy"),
        ({"dsn": "postgresql://x", "max_pool_size": 101}, "max_pool_size = 101 must be"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        TaskQ(**arguments)


def test_a_wrong_schema_name_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"schema name 'my-jobs' is invalid.*did you mean 'my_jobs'"):
        TaskQ(dsn="postgresql://x", schema="my-jobs")


def test_the_schema_defaults_to_the_environment_then_to_taskq(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TaskQ(dsn="postgresql://x").schema == "taskq"
    monkeypatch.setenv("TASKQ_SCHEMA_NAME", "other")
    assert TaskQ(dsn="postgresql://x").schema == "other"
    assert TaskQ(dsn="postgresql://x", schema="mine").schema == "mine"


async def test_a_client_that_is_not_open_says_so_for_everything(dsn: str, schema: str) -> None:
    tq = TaskQ(dsn=dsn, schema=schema)
    uses = [
        lambda: tq.enqueue(double, Number()),
        lambda: tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number())]),
        lambda: tq.get(new_uuid()),
        lambda: tq.handle(new_uuid(), double).wait(),
        lambda: tq.batch_counts(new_uuid()),
        lambda: tq.batch_jobs(new_uuid()),
    ]

    async def refused_everywhere() -> None:
        for use in uses:
            with pytest.raises(RuntimeError, match=r"the TaskQ is not open; use 'async with TaskQ\(...\) as tq'"):
                await use()

    await refused_everywhere()
    async with tq:
        await tq.enqueue(double, Number())
    await refused_everywhere()


async def test_opening_and_closing_twice_is_fine_and_it_opens_again(dsn: str, schema: str) -> None:
    tq = TaskQ(dsn=dsn, schema=schema)
    assert await tq.open() is tq
    assert await tq.open() is tq
    await tq.close()
    await tq.close()
    async with tq:
        assert await (await tq.enqueue(double, Number())).status() is JobStatus.PENDING


async def test_the_clients_own_connections_are_named_bounded_and_closed(
    dsn: str, schema: str, conn: asyncpg.Connection
) -> None:
    async def sessions() -> int:
        return int(
            await conn.fetchval(
                "select count(*) from pg_stat_activity where application_name = $1", f"taskqd/{schema}//client"
            )
        )

    async with TaskQ(dsn=dsn, schema=schema, max_pool_size=2) as tq:
        for _ in range(5):
            await tq.enqueue(double, Number())
        assert 1 <= await sessions() <= 2

    async def gone() -> bool:
        return await sessions() == 0

    await eventually(gone)


async def test_a_given_pool_stays_open(dsn: str, schema: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        async with TaskQ(pool=pool, schema=schema) as tq:
            handle = await tq.enqueue(double, Number())
            batch = await tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number())])
            assert await handle.status() is JobStatus.PENDING
            assert (await batch.status()).pending == 1
        assert await pool.fetchval("select 1") == 1


async def test_closing_does_not_wait_for_ever_for_a_connection_in_use(
    dsn: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.3)
    tq = await TaskQ(dsn=dsn, schema=schema).open()
    held = await tq._pool.acquire()
    started = time.monotonic()
    await tq.close()
    assert time.monotonic() - started < 5
    with pytest.raises(asyncpg.InterfaceError):
        await held.execute("select 1")


# -- the database -----------------------------------------------------------------------------------


async def test_no_server_is_said_to_be_unreachable() -> None:
    with pytest.raises(DatabaseUnavailableError, match="is not reachable: no server listens on that socket"):
        await TaskQ(dsn="postgresql://nobody:s3cret@/db?host=/tmp/no-such-directory").open()


async def test_a_refused_login_does_not_show_the_password(dsn: str) -> None:
    with pytest.raises(DatabaseAuthError) as caught:
        await TaskQ(dsn=dsn.replace("postgres@", "no_such_role:s3cret@")).open()
    assert "no_such_role" in str(caught.value)
    assert "s3cret" not in str(caught.value)


async def test_an_unmigrated_schema_is_explained_by_every_call(dsn: str, conn: asyncpg.Connection) -> None:
    await conn.execute("create schema if not exists not_ours")
    try:
        for schema in ("not_ours", "not_there"):
            async with TaskQ(dsn=dsn, schema=schema) as tq:
                for use in (
                    lambda tq=tq: tq.enqueue(double, Number()),
                    lambda tq=tq: tq.enqueue_batch([EnqueueItem(actor_ref=double, payload=Number())]),
                    lambda tq=tq: tq.get(new_uuid()),
                    lambda tq=tq: tq.handle(new_uuid(), double).status(),
                    lambda tq=tq: tq.batch_counts(new_uuid()),
                    lambda tq=tq: tq.batch_jobs(new_uuid()),
                ):
                    with pytest.raises(SchemaNotMigratedError) as caught:
                        await use()
                    assert str(caught.value) == (
                        f"schema '{schema}' holds no taskqd tables; run 'taskqd migrate up --schema {schema}', "
                        "or name the schema that the workers use"
                    )
    finally:
        await conn.execute("drop schema not_ours")


async def test_two_schemas_of_one_database_do_not_touch(dsn: str, schema: str, conn: asyncpg.Connection) -> None:
    other = f"{schema}_b"
    await migrate_up(conn, other)
    try:
        async with TaskQ(dsn=dsn, schema=schema) as here, TaskQ(dsn=dsn, schema=other) as there:
            one = await here.enqueue(double, Number(n=1), idempotency_key="k")
            two = await there.enqueue(double, Number(n=2), idempotency_key="k")
            assert not two.was_existing
            assert await here.get(two.job_id) is None
            assert await there.get(one.job_id) is None
            assert (await two.row()).payload == {"n": 2}
    finally:
        await conn.execute(f'drop schema "{other}" cascade')


async def test_a_wake_up_is_heard_in_its_own_schema_alone(
    dsn: str, schema: str, conn: asyncpg.Connection, wakes: Wakes
) -> None:
    other = f"{schema}_b"
    await migrate_up(conn, other)
    try:
        async with TaskQ(dsn=dsn, schema=other) as there:
            await there.enqueue(double, Number())
        assert wakes.seen == 0
        async with TaskQ(dsn=dsn, schema=schema) as here:
            await here.enqueue(double, Number())
        await eventually(lambda: wakes.seen == 1)
    finally:
        await conn.execute(f'drop schema "{other}" cascade')


# -- whose event loop, whose process ----------------------------------------------------------------


def test_another_event_loop_is_told_to_open_a_client_of_its_own(dsn: str, schema: str) -> None:
    tq = TaskQ(dsn=dsn, schema=schema)

    async def use() -> None:
        await tq.enqueue(double, Number())

    async def use_elsewhere() -> None:
        async with tq:
            for run in (use, tq.open, tq.close):
                with pytest.raises(RuntimeError, match="on another event loop"):
                    await asyncio.to_thread(asyncio.run, run())
            await use()

    asyncio.run(use_elsewhere())


def test_a_client_whose_event_loop_is_gone_can_be_opened_again(dsn: str, schema: str) -> None:
    tq = TaskQ(dsn=dsn, schema=schema)

    async def use() -> None:
        await tq.open()
        await tq.enqueue(double, Number())

    asyncio.run(use())
    asyncio.run(use())
    asyncio.run(tq.close())
    asyncio.run(tq.close())


async def test_a_forked_process_opens_a_client_of_its_own(
    tq: TaskQ, count: Callable[[], Awaitable[int]], conn: asyncpg.Connection
) -> None:
    await tq.enqueue(double, Number())

    async def in_the_child() -> str:
        try:
            await tq.enqueue(double, Number())
        except RuntimeError as error:
            async with tq:
                await tq.enqueue(double, Number())
            return str(error)
        return "it used the connections of its parent"

    reader, writer = os.pipe()
    child = os.fork()
    if not child:  # nothing of the parent's test may go on here
        with contextlib.suppress(BaseException):
            asyncio.events._set_running_loop(None)
            os.write(writer, asyncio.run(in_the_child()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = await asyncio.wait_for(asyncio.to_thread(stream.read), 30)
    await asyncio.to_thread(os.waitpid, child, 0)
    assert b"before a fork" in answer
    await tq.enqueue(double, Number())
    assert await count() == 3


async def test_two_tasks_may_open_one_client(dsn: str, schema: str, conn: asyncpg.Connection) -> None:
    tq = TaskQ(dsn=dsn, schema=schema)
    await asyncio.gather(*(tq.open() for _ in range(5)))
    await tq.enqueue(double, Number())
    await tq.close()
    name = f"taskqd/{schema}//client"

    async def nobody_is_left() -> bool:
        return not await conn.fetchval("select count(*) from pg_stat_activity where application_name = $1", name)

    await eventually(nobody_is_left)


async def test_an_archived_job_is_found_and_told_as_one(tq: TaskQ, finish: Finish, conn: asyncpg.Connection) -> None:
    job = await tq.enqueue(double, Number(n=2), tags=["kept"])
    await finish(job.job_id, result={"n": 4})
    before = await tq.get(job.job_id)
    assert before is not None
    assert before.archived_at is None
    await conn.execute(f"""update "{tq.schema}".jobs set finished_at = clock_timestamp() - interval '99 days'""")
    retention = Retention(tq._pool.pool, tq.schema, load_settings({}, environ={}))
    assert await retention.run(lambda: False)
    row = await tq.get(job.job_id)
    assert row is not None
    assert row.archived_at is not None
    assert replace(row, archived_at=None, finished_at=before.finished_at) == before
    with pytest.raises(JobNotFoundError):
        await job.status()
