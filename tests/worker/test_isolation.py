"""Actors in processes of their own: whatever they do, the worker goes on, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import psutil
import pytest

from taskqd import JobHandle, TaskQ
from taskqd.client.rows import JobRow
from tests.apps import isolated
from tests.apps.basic import Work
from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.support import Command, eventually, wait_until

WAIT = 60
ACTORS = "tests.apps.isolated:actors"
PATIENT = {"TASKQ_CANCELLATION_GRACE_PERIOD": "0.5", "TASKQ_CLEANUP_GRACE_PERIOD": "0.5"}


def start(fleet: Fleet, *, concurrency: int = 4, **env: str) -> Command:
    """Start a worker of the isolated actors."""
    return fleet.worker(actors=ACTORS, concurrency=concurrency, env=PATIENT | env)


def named(worker: Command, name: str) -> list[psutil.Process]:
    """The living processes of a worker with this name."""
    found = []
    for child in worker.children():
        try:
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def gone(*pids: int) -> bool:
    """True once none of these processes runs."""
    return not any(isolated.is_alive(pid) for pid in pids)


@pytest.fixture
async def left_behind(fleet: Fleet) -> AsyncIterator[None]:
    """Kill what a failed test has left behind."""
    yield
    for line in fleet.executions("started"):
        for pid in map(int, line.key.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


# -- what works inside ------------------------------------------------------------------------------


async def test_each_attempt_has_a_process_of_its_own(fleet: Fleet, tq: TaskQ) -> None:
    worker = start(fleet)
    keys = [f"k{n}" for n in range(4)]
    handles = [await tq.enqueue(actor, Work(key=key)) for key in keys for actor in (isolated.echo, isolated.plain)]
    assert [await handle.wait(WAIT) for handle in handles] == [key for key in keys for _ in range(2)]
    pids = {one.pid for one in fleet.executions()}
    assert len(pids) == 8
    assert worker.pid not in pids
    assert gone(*pids)
    wait_until(lambda: {event["key"] for event in events(worker, "echoed")} == set(keys), what="its log lines")


async def test_what_it_raises_is_recorded_as_in_the_worker(fleet: Fleet, tq: TaskQ) -> None:
    start(fleet)
    handles = {key: await tq.enqueue(isolated.fails, Work(key=key)) for key in ("runtime", "key", "snooze", "retry")}
    assert await handles["runtime"].wait(WAIT) == "recovered"
    assert (await handles["runtime"].row()).attempt == 2
    row = await settled(handles["key"])
    assert (row.status, row.attempt, row.error_class) == ("failed", 1, "KeyError")
    assert "in fails" in (row.error_traceback or "")
    assert (await settled(handles["snooze"], "scheduled")).attempt == 0
    assert (await settled(handles["retry"], "scheduled")).attempt == 1


async def test_results_progress_jobs_and_hooks_pass_through_the_worker(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    start(fleet, TASKQ_RESULT_MAX_BYTES="200000")
    fits = await tq.enqueue(isolated.large, Work(size=150_000))
    too_large = await tq.enqueue(isolated.large, Work(size=250_000))
    reports = await tq.enqueue(isolated.reports, Work(times=6))
    parent = await tq.enqueue(isolated.parent, Work())
    await tq.enqueue(isolated.exits, Work(key="well"))
    await tq.enqueue(isolated.exits, Work(times=3))
    assert len(await fits.wait(WAIT)) == 150_000
    row = await settled(too_large)
    assert (row.status, row.error_class) == ("failed", "ResultTooLarge")
    assert await parent.wait(WAIT) == [5, 10]
    copied = await jobs.conn.fetch(
        f"select payload->>'key' as key from \"{jobs.schema}\".jobs where payload->>'key' ~ 'copied'"
    )
    assert sorted(row["key"] for row in copied) == [f"copied\t{n} ü" for n in range(3)]
    assert await reports.wait(WAIT) == "from 4", "an attempt that died goes on from what the last one had reported"
    (told,) = await fleet.wait_for_executions(1, "on_success", WAIT)
    assert told.key == "well"
    (told,) = await fleet.wait_for_executions(1, "on_retry_exhausted", WAIT)
    assert told.key == "ActorProcessDied: the actor's process ended with exit code 3 before its actor did"
    roles = await jobs.conn.fetch(
        "select distinct split_part(application_name, '/', 4) as role from pg_stat_activity "
        "where application_name like $1",
        f"taskqd/{jobs.schema}/%",
    )
    assert {record["role"] for record in roles} <= {"dispatch", "worker", "heartbeat", "notify", "client", "web"}


async def test_what_it_depends_on_is_made_in_its_process(fleet: Fleet, tq: TaskQ) -> None:
    worker = start(fleet)
    for actor in (isolated.depends, isolated.depends_plain):
        assert await (await tq.enqueue(actor, Work())).wait(WAIT) is True
    assert len(fleet.executions("closed")) == 2
    row = await settled(await tq.enqueue(isolated.depends_on_nothing_that_works, Work()))
    assert (row.status, row.error_class) == ("failed", "ProviderFailed")
    assert "no such thing" in (row.error_message or "")
    assert worker.process.poll() is None


async def test_programs_that_other_actors_run_are_left_to_them(fleet: Fleet, tq: TaskQ) -> None:
    worker = start(fleet, concurrency=8)
    handles = [await tq.enqueue(isolated.not_isolated, Work()) for _ in range(4)]
    others = [await tq.enqueue(isolated.exits, Work(times=9)) for _ in range(4)]
    for handle in handles:
        assert await handle.wait(WAIT) == f"7 8 {worker.pid}"
    for other in others:
        assert (await settled(other)).error_class == "ActorProcessDied"


# -- what ends it -----------------------------------------------------------------------------------


async def test_a_death_is_recorded_as_what_it_was(fleet: Fleet, tq: TaskQ) -> None:
    """It ends its process, reads what is not there, holds too much memory, sends what is no message."""
    worker = start(fleet, concurrency=12)
    neighbour = await tq.enqueue(isolated.polite, Work())
    await fleet.wait_for_executions(1)
    exits = await tq.enqueue(isolated.exits, Work(times=3))
    recovers = await tq.enqueue(isolated.segfaults, Work(times=1))
    segfaults = await tq.enqueue(isolated.segfaults, Work(times=2))
    fits = await tq.enqueue(isolated.eats, Work(size=20, seconds=1.0))
    eats = [await tq.enqueue(isolated.eats, Work(key=key, size=400, seconds=60)) for key in ("", "program")]
    garbage = [await tq.enqueue(isolated.garbage, Work(key=key)) for key in ("length", "json", "op", "shape")]

    row = await settled(exits)
    assert (row.status, row.error_class) == ("failed", "ActorProcessDied")
    assert row.error_message == "the actor's process ended with exit code 3 before its actor did"
    assert await recovers.wait(WAIT) == "alive", "an ordinary failure: it has another attempt"
    row = await settled(segfaults)
    assert (row.status, row.attempt, row.error_class) == ("failed", 2, "ActorProcessDied")
    assert row.error_message == "the actor's process was killed by SIGSEGV"
    assert "in string_at" in worker.stderr, "the log shows where"
    assert await fits.wait(WAIT) == 20 * isolated.MIB
    for handle in eats:
        row = await settled(handle)
        assert (row.status, row.error_class) == ("failed", "MemoryLimitExceeded")
        assert "the limit is 96 MiB" in (row.error_message or "")
    for handle in garbage:
        row = await settled(handle)
        assert (row.status, row.error_class) == ("failed", "ActorProcessDied")
        assert "no message" in (row.error_message or "")

    assert (await neighbour.row()).status == "running"
    assert worker.process.poll() is None
    assert gone(*(one.pid for one in fleet.executions() if one.actor != "iso_polite"))


async def test_start_to_close_kills(fleet: Fleet, tq: TaskQ) -> None:
    """Asleep in C with the interpreter lock, on its own event loop, as a plain function, and as it should be."""
    worker = start(fleet, TASKQ_CLEANUP_GRACE_PERIOD="3")
    actors = (isolated.sleeps_in_c, isolated.blocks, isolated.eats, isolated.tidy)
    limit = timedelta(seconds=2)
    handles = [await tq.enqueue(actor, Work(seconds=300), start_to_close=limit) for actor in actors]
    for handle in handles:
        row = await settled(handle)
        assert (row.status, row.error_class, row.error_message) == ("failed", "TimeoutError", "start_to_close")
    assert gone(*(one.pid for one in fleet.executions()))
    assert {one.actor for one in fleet.executions("cancelled timeout")} == {"iso_tidy"}, "it may clean up"
    assert worker.process.poll() is None


async def test_a_cancelled_job_that_does_not_end_is_killed(fleet: Fleet, tq: TaskQ) -> None:
    worker = start(fleet, concurrency=5)
    actors = (isolated.stubborn, isolated.sleeps_in_c, isolated.blocks, isolated.tidy)
    handles = [await tq.enqueue(actor, Work(seconds=300, times=300)) for actor in actors]
    executions = await fleet.wait_for_executions(4)
    neighbour = await tq.enqueue(isolated.tidy, Work(key="neighbour", seconds=300))
    await fleet.wait_for_executions(5)
    for handle in handles:
        await handle.cancel()
    for handle in handles:
        row = await settled(handle)
        assert (row.status, row.attempt) == ("cancelled", 1)
    assert gone(*(one.pid for one in executions))
    assert (await neighbour.row()).status == "running"
    assert worker.process.poll() is None


async def test_it_hears_of_a_cancellation_and_of_the_stop(fleet: Fleet, tq: TaskQ) -> None:
    """A shutdown grace long enough to hear, on a busy machine too."""
    worker = start(fleet, TASKQ_CANCELLATION_GRACE_PERIOD="15", TASKQ_LOCK_LEASE="20")
    cancelled, stopped = [await tq.enqueue(isolated.polite, Work()) for _ in range(2)]
    await fleet.wait_for_executions(2)
    await cancelled.cancel()
    assert await cancelled.wait(WAIT) == "operator"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert await stopped.wait(1) == "shutdown"


@pytest.mark.usefixtures("left_behind")
async def test_what_it_has_started_ends_with_it(fleet: Fleet, tq: TaskQ) -> None:
    start(fleet)
    neighbour = await tq.enqueue(isolated.forks, Work(key="neighbour", seconds=300))
    await fleet.wait_for_executions(1)
    timed_out = await tq.enqueue(isolated.forks, Work(seconds=300), start_to_close=timedelta(seconds=2))
    dies = await tq.enqueue(isolated.forks, Work(key="dies"))
    returns = await tq.enqueue(isolated.forks, Work(key="returns"))
    for handle in (timed_out, dies, returns):
        await settled(handle)
        started = isolated.started_by(handle.job_id, fleet.env["EXECUTION_LOG"])
        assert gone(*started), "told as ended once nothing is left"
    assert len(started) == 3
    others = isolated.started_by(neighbour.job_id, fleet.env["EXECUTION_LOG"])
    assert len(others) == 3
    assert all(map(isolated.is_alive, others)), "a sibling is not touched"


# -- the end of the worker --------------------------------------------------------------------------


@pytest.mark.usefixtures("left_behind")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_nothing_outlives_the_worker(fleet: Fleet, tq: TaskQ, jobs: JobTable, number: signal.Signals) -> None:
    worker = start(fleet)
    handles = [
        await tq.enqueue(actor, Work(seconds=300))
        for actor in (isolated.forks, isolated.stubborn, isolated.sleeps_in_c, isolated.blocks)
    ]
    executions = await fleet.wait_for_executions(4)
    zygote, *more = named(worker, "taskqd isolator")
    assert not more
    started = [int(pid) for line in fleet.executions("started") for pid in line.key.split()]
    assert len(started) == 3
    all_of_them = (zygote.pid, *started, *(one.pid for one in executions))
    worker.signal(number)
    code = worker.wait()
    if number is signal.SIGKILL:
        wait_until(lambda: gone(*all_of_them))
    else:
        assert code == 0
        rows = [await handle.row() for handle in handles]
        assert [(row.status, row.attempt, row.interrupt_count) for row in rows] == [("pending", 1, 1)] * 4
        assert await jobs.conn.fetchval(f'select count(*) from "{jobs.schema}".workers') == 0
        assert gone(*all_of_them)


async def test_an_idle_worker_is_gone_at_once(fleet: Fleet) -> None:
    worker = start(fleet)
    (zygote,) = named(worker, "taskqd isolator")
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 5.0
    assert gone(zygote.pid)


@pytest.mark.usefixtures("left_behind")
async def test_a_worker_that_lost_its_zygote_makes_room_for_a_fresh_one(fleet: Fleet, tq: TaskQ) -> None:
    worker = start(fleet)
    handle = await tq.enqueue(isolated.plain, Work(seconds=60))
    (execution,) = await fleet.wait_for_executions(1)
    named(worker, "taskqd isolator")[0].kill()
    assert worker.wait() == 75
    assert gone(execution.pid)
    row = await handle.row()
    assert (row.status, row.attempt) == ("pending", 1)
    assert next(events(worker, "isolation-zygote-ended"))["level"] == "critical"


@pytest.mark.usefixtures("left_behind")
@pytest.mark.parametrize("name", ["taskqd isolator", "taskqd warden"])
async def test_a_kill_of_either_keeper_leaves_nothing(fleet: Fleet, tq: TaskQ, name: str) -> None:
    """Not even what gave itself a session and was left by its parent."""
    worker = start(fleet)
    handle = await tq.enqueue(isolated.forks, Work(seconds=300))
    (execution,) = await fleet.wait_for_executions(1)
    started = isolated.started_by(handle.job_id, fleet.env["EXECUTION_LOG"])
    assert len(started) == 3
    keepers = [*named(worker, "taskqd isolator"), *named(worker, "taskqd warden")]
    named(worker, name)[0].kill()
    assert worker.wait() == 75
    row = await handle.row()
    assert (row.status, row.attempt) == ("pending", 1)
    assert gone(execution.pid, *started, *(keeper.pid for keeper in keepers))


@pytest.mark.usefixtures("left_behind")
async def test_a_worker_takes_a_keeper_that_hangs_with_it(fleet: Fleet, tq: TaskQ) -> None:
    worker = start(fleet)
    handle = await tq.enqueue(isolated.forks, Work(seconds=300))
    (execution,) = await fleet.wait_for_executions(1)
    started = isolated.started_by(handle.job_id, fleet.env["EXECUTION_LOG"])
    (zygote,) = named(worker, "taskqd isolator")
    zygote.suspend()
    worker.signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: gone(zygote.pid, execution.pid, *started))


async def test_a_worker_without_isolated_actors_has_no_zygote(fleet: Fleet) -> None:
    assert named(fleet.worker(), "taskqd isolator") == []


# -- where the worker itself cannot be forked -------------------------------------------------------


async def test_actors_whose_import_starts_a_thread_refuse(fleet: Fleet) -> None:
    (fleet.directory / "threaded.py").write_text(THREADED)
    worker = fleet.worker(actors="threaded:actors", ready=False, env=PATIENT)
    assert worker.wait() == 78
    assert "thread 'exporter'" in worker.stderr


async def test_numeric_libraries_are_imported_again_with_one_thread(fleet: Fleet, tq: TaskQ) -> None:
    """Here stands a thread that is started unless a variable says one thread."""
    (fleet.directory / "threaded.py").write_text(
        THREADED.replace("if True", "if os.environ.get('OMP_NUM_THREADS') != '1'")
    )
    worker = fleet.worker(actors="threaded:actors", env=PATIENT)
    assert await (await tq.enqueue(isolated.echo, Work(key="a"))).wait(WAIT) == "a"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


THREADED = """
import os, threading
from tests.apps.isolated import actors
if True:
    threading.Thread(target=threading.Event().wait, name="exporter", daemon=True).start()
"""


async def settled(handle: JobHandle[Any], *statuses: str) -> JobRow:
    """Wait until the job is in one of these statuses, by default an end, and return its row."""

    async def found() -> JobRow | None:
        row = await handle.row()
        return row if row.status in statuses or (not statuses and row.is_terminal) else None

    row = await eventually(found, WAIT)
    assert row is not None
    return row
