"""What an actor writes on its slot's connection, what it enqueues, and its job's success: both or neither."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd import JobFailed, TaskQ
from taskqd.worker import report, transactional
from taskqd.worker.engine import Engine
from tests.apps import consume
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.running import running

WAIT = 60
ACTORS = "tests.apps.consume:registry"
CUT = "slot-conn-terminated-transaction-in-flight"


class Books:
    """The ledger of a schema, and the children that its payments enqueued."""

    def __init__(self, conn: asyncpg.Connection, schema: str) -> None:
        self.conn, self.schema = conn, schema

    async def keys(self) -> list[str]:
        """What is written, in order."""
        return [row["key"] for row in await self.conn.fetch(f'select key from "{self.schema}".ledger order by id')]

    async def children(self) -> int:
        """How many children there are."""
        found: int = await self.conn.fetchval(f"select count(*) from \"{self.schema}\".jobs where actor = 'child'")
        return found

    async def slots(self) -> int:
        """Sessions of slot pools now."""
        found: int = await self.conn.fetchval(
            "select count(*) from pg_stat_activity where application_name like $1", f"taskqd/{self.schema}/%/slot"
        )
        return found


@pytest.fixture
async def books(conn: asyncpg.Connection, schema: str) -> Books:
    await conn.execute(
        f'create table "{schema}".ledger (id serial primary key, key text not null, backend int not null)'
    )
    return Books(conn, schema)


class Told:
    """Takes what is logged of transactions."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.events.append(event)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(transactional, "_log", told)
    return told


@pytest.fixture
def here(schema: str, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the actors run in this process."""
    monkeypatch.setenv("TASKQ_SCHEMA_NAME", schema)
    monkeypatch.setenv("EXECUTION_LOG", fleet.env["EXECUTION_LOG"])


@pytest.fixture
async def engine(here: None, dsn: str, schema: str) -> AsyncIterator[Engine]:
    async with running(consume.registry, dsn, schema, max_concurrency=3) as engine:
        yield engine


async def failure(handle: Any) -> Any:
    with pytest.raises(JobFailed) as caught:
        await handle.wait(WAIT)
    return caught.value.row


# -- both -------------------------------------------------------------------------------------------


async def test_writes_children_and_success_are_committed_together(
    engine: Engine, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books
) -> None:
    assert await books.slots() == 4
    handle = await tq.enqueue(consume.pay, Work(key="a", seconds=0.5))
    await fleet.wait_for_executions(1)
    assert (await books.keys(), await books.children()) == ([], 0)
    assert await handle.wait(WAIT) == "a"
    assert (await books.keys(), await books.children()) == (["a"], 1)
    row = await jobs.row(handle.job_id)
    assert (row["status"], row["epoch"], row["lock_expires_at"]) == ("succeeded", 1, None)
    assert row["started_at"] is not None
    (hook,) = await fleet.wait_for_executions(1, "paid", WAIT)
    assert (hook.job, hook.key) == (str(handle.job_id), "succeeded")
    assert engine.completer.succeeded == 1
    await eventually(lambda: engine.held == 0, WAIT)


async def test_each_running_job_has_a_connection_of_its_own(engine: Engine, tq: TaskQ, books: Books) -> None:
    handles = [await tq.enqueue(consume.pay, Work(key=str(n), seconds=0.1)) for n in range(9)]
    await asyncio.gather(*(handle.wait(WAIT) for handle in handles))
    rows = await books.conn.fetch(f'select key, backend from "{books.schema}".ledger')
    assert sorted(row["key"] for row in rows) == [str(n) for n in range(9)]
    assert 2 <= len({row["backend"] for row in rows}) <= 4
    assert await books.children() == 9


async def test_children_wake_workers_once_they_are_committed(
    engine: Engine, tq: TaskQ, books: Books, jobs: JobTable, dsn: str
) -> None:
    async with jobs.listening(dsn) as heard:
        await (await tq.enqueue(consume.pay, Work(key="a"))).wait(WAIT)
        before = len(heard)
        await eventually(lambda: len(heard) > before or len(heard) >= 2, WAIT)


async def test_what_an_attempts_own_writes_as_it_ends_is_part_of_it(engine: Engine, tq: TaskQ, books: Books) -> None:
    await (await tq.enqueue(consume.through, Work(key="a"))).wait(WAIT)
    assert await books.keys() == ["a", "after"]
    row = await failure(await tq.enqueue(consume.through_once, Work(key="b", times=1)))
    assert row.error_message == "not well"
    assert await books.keys() == ["a", "after"]


async def test_a_job_leaves_nothing_in_the_session(engine: Engine, tq: TaskQ, books: Books) -> None:
    seen = [await (await tq.enqueue(consume.sessions, Work())).wait(WAIT) for _ in range(6)]
    assert {name.rpartition("/")[2] for name in seen} == {"slot"}


async def test_an_actor_without_a_hand_in_it_has_no_transaction(engine: Engine, tq: TaskQ, told: Told) -> None:
    assert engine.transactions is not None
    engine.transactions.pool.terminate()
    await (await tq.enqueue(consume.aside, Work())).wait(WAIT)
    await (await tq.enqueue(consume.thread, Work())).wait(WAIT)
    assert told.events == []


# -- neither ----------------------------------------------------------------------------------------


async def test_what_fails_leaves_nothing_and_is_retried(
    engine: Engine, tq: TaskQ, jobs: JobTable, books: Books, told: Told
) -> None:
    handle = await tq.enqueue(consume.pay, Work(key="a", times=2))
    assert await handle.wait(WAIT) == "a"
    assert (await books.keys(), await books.children()) == (["a"], 1)
    assert [one["error_message"] for one in await jobs.attempts(handle.job_id)] == ["no money", "no money"]
    assert told.events == []


@pytest.mark.parametrize("snoozes", [0, 1], ids=["retry-after", "snooze"])
async def test_what_is_put_off_leaves_nothing(
    engine: Engine, fleet: Fleet, tq: TaskQ, books: Books, tmp_path: Path, snoozes: int
) -> None:
    key = str(tmp_path / "first")
    await (await tq.enqueue(consume.snooze, Work(key=key, size=snoozes))).wait(WAIT)
    assert await books.keys() == [key]
    assert len(fleet.executions()) == 2


@pytest.mark.parametrize("swallowing", [0, 1], ids=["returns", "asks-again"])
async def test_who_outruns_the_limit_is_rolled_back_and_the_connection_cut(
    engine: Engine, tq: TaskQ, books: Books, told: Told, swallowing: int
) -> None:
    row = await failure(await tq.enqueue(consume.stubborn, Work(key="a", times=swallowing)))
    assert (row.error_class, row.error_message) == ("TimeoutError", "start_to_close")
    assert told.events == [CUT]
    assert await books.keys() == []
    await (await tq.enqueue(consume.pay, Work(key="b"))).wait(WAIT)
    assert await books.keys() == ["b"]


async def test_a_cancelled_job_is_rolled_back(
    here: None, dsn: str, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books, told: Told
) -> None:
    async with running(consume.registry, dsn, books.schema, cancellation_grace_period=0.2):
        handle = await tq.enqueue(consume.pay, Work(key="a", seconds=600))
        await fleet.wait_for_executions(1)
        await tq.cancel(handle.job_id)
        await eventually(lambda: _is(jobs, handle, "cancelled"), WAIT)
        assert told.events == [CUT]
        assert (await books.keys(), await books.children()) == ([], 0)


async def test_a_stop_rolls_back_and_gives_the_job_to_another(
    here: None, dsn: str, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books, told: Told
) -> None:
    async with running(consume.registry, dsn, books.schema):
        handle = await tq.enqueue(consume.pay, Work(key="a", seconds=2))
        await fleet.wait_for_executions(1)
    assert told.events == [CUT]
    assert await books.keys() == []
    async with running(consume.registry, dsn, books.schema):
        assert await handle.wait(WAIT) == "a"
    assert (await books.keys(), await books.children()) == (["a"], 1)
    assert (await jobs.row(handle.job_id))["interrupt_count"] == 1


async def test_an_actor_that_ends_its_transaction_fails(engine: Engine, tq: TaskQ, books: Books) -> None:
    row = await failure(await tq.enqueue(consume.ends_it, Work(key="a")))
    assert row.error_message == "the actor ended the transaction of its job, which only its return may do"
    assert await books.keys() == []


async def test_an_ignored_error_of_the_database_fails_the_attempt(engine: Engine, tq: TaskQ, books: Books) -> None:
    row = await failure(await tq.enqueue(consume.breaks, Work(key="a")))
    assert row.error_class == "InFailedSQLTransactionError"
    assert await books.keys() == []


async def test_what_the_commit_refuses_fails_the_attempt(
    engine: Engine, tq: TaskQ, jobs: JobTable, books: Books, told: Told
) -> None:
    await books.conn.execute(
        f'alter table "{books.schema}".ledger add unique (key) deferrable initially deferred;'
        f"insert into \"{books.schema}\".ledger (key, backend) values ('a', 0)"
    )
    handle = await tq.enqueue(consume.pay, Work(key="a"))
    attempts = await eventually(lambda: jobs.attempts(handle.job_id), WAIT)
    assert attempts[0]["error_class"] == "UniqueViolationError"
    assert (await books.keys(), await books.children()) == (["a"], 0)
    await books.conn.execute(f'delete from "{books.schema}".ledger')
    assert await handle.wait(WAIT) == "a"
    assert (await books.keys(), await books.children()) == (["a"], 1)
    assert told.events == []


async def test_a_lost_lease_takes_the_writes_back(
    here: None, dsn: str, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books
) -> None:
    """The row is another's by the time that the actor returns, and no beat has told its worker so."""
    async with running(consume.registry, dsn, books.schema, heartbeat_interval=60, lock_lease=600) as engine:
        handle = await tq.enqueue(consume.pay, Work(key="a", seconds=1))
        await fleet.wait_for_executions(1)
        await jobs.update([handle.job_id], epoch="epoch + 1")
        await eventually(lambda: engine.completer.lost == 1, WAIT)
        assert (await books.keys(), await books.children()) == ([], 0)
        assert (await jobs.row(handle.job_id))["status"] == "running"
        assert engine.held == 0


async def test_a_row_that_is_locked_for_a_while_is_waited_for(
    here: None, dsn: str, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books
) -> None:
    async with running(consume.registry, dsn, books.schema, lock_lease=600):
        handle = await tq.enqueue(consume.pay, Work(key="a", seconds=0.3))
        await fleet.wait_for_executions(1)
        other = await asyncpg.connect(dsn, timeout=30)
        try:
            async with other.transaction():
                await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', handle.job_id)
                await fleet.wait_for_executions(1, "end")
                await asyncio.sleep(0.3)
                assert await books.keys() == []
        finally:
            await other.close(timeout=10)
        assert await handle.wait(WAIT) == "a"
        assert len(fleet.executions()) == 1
        assert await books.keys() == ["a"]


async def test_children_of_every_kind_are_part_of_it(engine: Engine, tq: TaskQ, books: Books, jobs: JobTable) -> None:
    handle = await tq.enqueue(consume.fan_out, Work(key="a", times=1))
    await handle.wait(WAIT)
    assert len(await jobs.attempts(handle.job_id)) == 1
    assert (await books.keys(), await books.children()) == (["a"], 11)


# -- the slot pool ----------------------------------------------------------------------------------


async def test_without_a_connection_the_job_is_left_to_its_lease(
    engine: Engine, tq: TaskQ, jobs: JobTable, books: Books, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.transactions is not None
    monkeypatch.setattr(transactional, "ACQUIRE_TIMEOUT", 0.05)
    async with asyncio.TaskGroup() as group:
        freed = asyncio.Event()

        async def hold() -> None:
            async with engine.transactions.pool.acquire():
                await freed.wait()

        for _ in range(4):
            group.create_task(hold())
        await eventually(lambda: engine.transactions.pool.in_use == 4, WAIT)
        handle = await tq.enqueue(consume.pay, Work(key="a"))
        await eventually(lambda: engine.transactions.acquire_failures == 1, WAIT)
        row = await jobs.row(handle.job_id)
        assert (row["status"], row["attempt"]) == ("running", 1)
        assert engine.held == 0
        assert "a job got no connection of its slot" in report.ready(engine, "running", 60).body["reason"]
        assert "taskq_worker_slot_pool_acquire_failures_total 1\n" in report.metrics(engine)
        assert "taskq_worker_slot_pool_connections_in_use 4\n" in report.metrics(engine)
        freed.set()
    assert told.events == ["slot-pool-acquire-failed"]
    await _expire(jobs, handle)
    assert await handle.wait(WAIT) == "a"
    assert await books.keys() == ["a"]
    assert report.ready(engine, "running", 60).ok


async def test_a_new_credential_renews_the_slot_pool_too(engine: Engine, tq: TaskQ, books: Books) -> None:
    sessions = "select pid from pg_stat_activity where application_name like $1"
    name = f"taskqd/{books.schema}/%/slot"
    before = {row["pid"] for row in await books.conn.fetch(sessions, name)}
    results = await engine.credentials.renew()
    assert {"resource": "slot pool", "ok": True, "error": None} in [
        {key: value for key, value in result.items() if key != "ms"} for result in results
    ]
    after = {row["pid"] for row in await books.conn.fetch(sessions, name)}
    assert len(after - before) == 4
    await (await tq.enqueue(consume.pay, Work(key="a"))).wait(WAIT)


# -- a connection that breaks -----------------------------------------------------------------------


async def test_a_connection_cut_in_the_middle_is_a_failed_attempt(
    engine: Engine, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books, told: Told
) -> None:
    handle = await tq.enqueue(consume.pay, Work(key="a", seconds=0.7))
    await fleet.wait_for_executions(1)
    await books.conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name like $1",
        f"taskqd/{books.schema}/%/slot",
    )
    assert await handle.wait(WAIT) == "a"
    assert (await books.keys(), await books.children()) == (["a"], 1)
    assert len(await jobs.attempts(handle.job_id)) == 1
    assert told.events == [CUT]


@pytest.mark.parametrize(("cut_at", "runs"), [("committed", 1), ("settled", 2)])
async def test_a_connection_cut_at_the_commit_counts_once(
    engine: Engine,
    fleet: Fleet,
    tq: TaskQ,
    jobs: JobTable,
    books: Books,
    monkeypatch: pytest.MonkeyPatch,
    cut_at: str,
    runs: int,
) -> None:
    """The worker does not hear what became of its commit: the row tells."""
    monkeypatch.setenv("CUT_AT", cut_at)
    handle = await tq.enqueue(consume.pay, Work(key="a"))
    assert await handle.wait(WAIT) == "a"
    (hook,) = await fleet.wait_for_executions(1, "paid", WAIT)
    assert hook.key == "succeeded"
    assert (await books.keys(), await books.children()) == (["a"], 1)
    assert len(fleet.executions()) == runs
    assert len(await jobs.attempts(handle.job_id)) == runs - 1
    assert (engine.completer.succeeded, engine.completer.lost) == (1, 0)


# -- processes: kill -9 at every step ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "done"), [("begun", False), ("written", False), ("settled", False), ("committed", True)]
)
async def test_a_kill_leaves_both_or_neither(
    here: None, dsn: str, fleet: Fleet, tq: TaskQ, jobs: JobTable, books: Books, step: str, done: bool
) -> None:
    worker = fleet.worker(actors=ACTORS, concurrency=2, env={"KILL_AT": step})
    (told,) = events(worker, "transactional_consume_per_slot")
    assert told["slot_pool_size"] == 3
    handle = await tq.enqueue(consume.pay, Work(key="a"))
    assert worker.wait(WAIT) == -signal.SIGKILL
    await eventually(lambda: _no_slots(books), WAIT)
    row = await jobs.row(handle.job_id)
    assert (row["status"] == "succeeded") == done
    assert (await books.keys(), await books.children()) == ((["a"], 1) if done else ([], 0))
    async with running(consume.registry, dsn, books.schema):
        if not done:
            await _expire(jobs, handle)
        assert await handle.wait(WAIT) == "a"
    assert (await books.keys(), await books.children()) == (["a"], 1)


async def _is(jobs: JobTable, handle: Any, status: str) -> bool:
    return bool((await jobs.row(handle.job_id))["status"] == status)


async def _expire(jobs: JobTable, handle: Any) -> None:
    await jobs.update([handle.job_id], lock_expires_at="clock_timestamp() - interval '1 second'")
    await jobs.tick()


async def _no_slots(books: Books) -> bool:
    return not await books.slots()
