"""Limits in whole workers: never passed by any number of processes, live when changed, and in nobody's way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from taskqd import EnqueueItem, TaskQ
from tests.apps import limited
from tests.apps.basic import Work
from tests.fleet import Execution, Fleet
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.test_producer import Harness

ACTORS = "tests.apps.limited:actors"
QUICK = {"TASKQ_NOTIFY_POLL_INTERVAL": "5"}


def most_at_once(fleet: Fleet, actors: Sequence[str], *, by_key: bool = False) -> int:
    """The most executions of these actors, of one key each if asked, that ran at the same time."""
    marks: list[tuple[float, int, Execution]] = []
    for change, event in ((1, "start"), (-1, "end")):
        marks += [(run.at, change, run) for run in fleet.executions(event) if run.actor in actors]
    marks.sort(key=lambda mark: mark[:2])
    running: Counter[str] = Counter()
    most = 0
    for _, change, run in marks:
        running[run.key if by_key else ""] += change
        most = max(most, max(running.values()))
    return most


async def begun_at_rest(fleet: Fleet) -> int:
    """How many executions have begun, once none began for a while."""
    seen = [-1, -1, -1]

    async def rests() -> bool:
        seen.append(len(fleet.executions()))
        await asyncio.sleep(0.5)
        return seen[-1] == seen[-4]

    await eventually(rests, 60)
    return seen[-1]


def items(ref: Any, count: int, seconds: float = 0.02, **options: Any) -> list[EnqueueItem]:
    """Jobs of one actor."""
    return [EnqueueItem(actor_ref=ref, payload=Work(key=str(n), seconds=seconds), **options) for n in range(count)]


async def test_no_number_of_workers_passes_a_limit(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    for _ in range(2):
        fleet.worker(actors=ACTORS, concurrency=8, env=QUICK)
    await tq.enqueue_batch(items(limited.free, 40))
    await tq.enqueue_batch(items(limited.one, 20))
    await tq.enqueue_batch(items(limited.left, 20) + items(limited.right, 20))
    await fleet.wait_for_executions(100, "end", 60)
    assert most_at_once(fleet, ["one"]) == 1
    assert most_at_once(fleet, ["left", "right"]) <= 2
    assert most_at_once(fleet, ["free"]) > 2
    await eventually(lambda: _succeeded(jobs, 100))
    assert set((await jobs.held()).values()) == {0}


async def _succeeded(jobs: JobTable, count: int) -> bool:
    return await jobs.counts() == {"succeeded": count}


async def test_the_slot_of_a_killed_worker_comes_back(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    first = fleet.worker(actors=ACTORS, env=QUICK)
    await tq.enqueue(limited.one, Work(seconds=600))
    await fleet.wait_for_executions(1)
    first.process.kill()
    await tq.enqueue(limited.one, Work(key="next", seconds=0.01), priority=5)
    fleet.worker(actors=ACTORS, env=QUICK)
    fleet.scheduler()
    await eventually(lambda: any(run.key == "next" for run in fleet.executions("end")), 60)
    running = await fleet.wait_for_executions(3)
    assert {run.key for run in running} == {"", "next"}
    assert await jobs.held() == {"a:one": 1, "r:shared": 0}


async def test_one_job_of_an_identity_runs_at_a_time_in_its_order(fleet: Fleet, tq: TaskQ) -> None:
    for _ in range(2):
        fleet.worker(actors=ACTORS, concurrency=8, env=QUICK)
    batch = [
        EnqueueItem(actor_ref=limited.free, payload=Work(key=key, seconds=0.01), identity_key=key)
        for _ in range(10)
        for key in "abcd"
    ]
    handle = await tq.enqueue_batch(batch)
    await fleet.wait_for_executions(40, "end", 60)
    assert most_at_once(fleet, ["free"], by_key=True) == 1
    for key in "abcd":
        expected = [
            str(one.job_id) for one, item in zip(handle.job_handles, batch, strict=True) if item.identity_key == key
        ]
        assert [run.job for run in fleet.executions() if run.key == key] == expected


async def test_a_limit_that_is_changed_is_live_within_seconds(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker(actors=ACTORS, concurrency=8, env=QUICK)
    await tq.enqueue_batch(items(limited.free, 200, 0.2))
    await fleet.wait_for_executions(8)
    table = f'"{jobs.schema}".actor_config'
    await jobs.conn.execute(f"update {table} set max_concurrent = 0 where actor = 'free'")

    done = await begun_at_rest(fleet)
    assert done < 200
    await jobs.conn.execute(f"update {table} set max_concurrent = 2 where actor = 'free'")
    await fleet.wait_for_executions(done + 4, timeout=50)
    later = fleet.executions()[done:]
    ends = {run.job: run.at for run in fleet.executions("end")}
    overlapping = [sum(a.at <= b.at < ends.get(a.job, b.at + 1) for a in later) for b in later]
    assert max(overlapping) <= 2
    await jobs.conn.execute(f"update {table} set max_concurrent = null where actor = 'free'")
    await fleet.wait_for_executions(200, "end", 100)


async def test_a_paused_queue_rests_and_a_resumed_one_goes_on(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    fleet.worker(actors=ACTORS, queues="default,other", env=QUICK)
    await jobs.conn.execute(f"insert into \"{jobs.schema}\".queues (name, paused_at) values ('default', now())")
    await asyncio.sleep(0)
    marker = await tq.enqueue(limited.free, Work(key="marker"))

    async def seen_paused() -> bool:
        probe = await tq.enqueue(limited.free, Work(key="probe"))
        other = await tq.enqueue(limited.free, Work(key="other"), queue="other")
        await other.wait(30)
        return await probe.status() == "pending"

    await eventually(seen_paused, 50)
    before = len([run for run in fleet.executions() if run.key != "other"])
    assert (await jobs.counts())["pending"] >= 1
    await jobs.conn.execute(f'update "{jobs.schema}".queues set paused_at = null')
    await marker.wait(30)
    await eventually(lambda: _none_pending(jobs), 30)
    assert len([run for run in fleet.executions() if run.key != "other"]) > before


async def _none_pending(jobs: JobTable) -> bool:
    return set(await jobs.counts()) == {"succeeded"}


async def test_a_saturated_actor_is_in_nobodys_way(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.store_actor("plain", max_concurrent=0)
    await jobs.plant(5000, actor="'plain'", lane="'a:plain'", priority="9")
    others = set(await jobs.plant(3000))
    async with Harness(pool, schema, ["default"], size=8) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: len(harness.taken) == 3000, 60)
    await taker
    assert {one.job_id for one in harness.taken} == others


async def test_a_limited_actor_keeps_its_pace_beside_a_full_queue(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.store_actor("plain", max_concurrent=1)
    await jobs.plant(20_000)
    await jobs.plant(5, actor="'plain'", lane="'a:plain'")
    async with Harness(pool, schema, ["default"], size=4) as harness:
        taker = asyncio.ensure_future(harness.take(0.001))
        for number in range(1, 6):
            limited_runs = await eventually(
                lambda wanted=number: runs if len(runs := _runs(harness, "plain")) == wanted else None, 30
            )
            last = limited_runs[-1]
            await jobs.succeed(last.job_id, epoch=last.epoch)
            harness.producer.freed(last)
        assert len(harness.taken) < 20_000, "the limited ones waited for the end of all others"
    await taker


def _runs(harness: Harness, actor: str) -> list[Any]:
    return [one for one in harness.taken if one.ref.name == actor]


async def test_jobs_in_the_wrong_lane_are_found_and_held_to_their_limit(jobs: JobTable, pool: Any, schema: str) -> None:
    """They were enqueued by a transaction that had not seen the limit."""
    await jobs.store_actor("plain", max_concurrent=2)
    await jobs.plant(10, actor="'plain'")
    await jobs.plant(10)
    async with Harness(pool, schema, ["default"], size=30) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: len(harness.taken) >= 12, 30)
        await eventually(lambda: _moved(jobs), 30)
        assert len(_runs(harness, "plain")) == 2
    await taker
    assert (await jobs.held())["a:plain"] == 2


async def _moved(jobs: JobTable) -> bool:
    return not await jobs.conn.fetchval(
        f"select count(*) from \"{jobs.schema}\".jobs where actor = 'plain' and lane = ''"
    )


async def test_a_queue_that_is_told_to_take_turns_does(fleet: Fleet, tq: TaskQ, jobs: JobTable) -> None:
    await jobs.conn.execute(f"insert into \"{jobs.schema}\".queues (name, mode) values ('default', 'round_robin')")
    whale = [
        EnqueueItem(actor_ref=limited.free, payload=Work(key="whale", seconds=0.05), fairness_key="whale")
        for _ in range(300)
    ]
    await tq.enqueue_batch(whale)
    small = [
        EnqueueItem(actor_ref=limited.free, payload=Work(key="small", seconds=0.05), fairness_key="small")
        for _ in range(5)
    ]
    await tq.enqueue_batch(small)
    fleet.worker(actors=ACTORS, concurrency=4, env=QUICK)
    await eventually(lambda: sum(run.key == "small" for run in fleet.executions("end")) == 5, 60)
    assert sum(run.key == "whale" for run in fleet.executions()) < 150


async def test_jobs_with_a_key_are_found_when_their_actor_is_limited(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.conn.execute(f"insert into \"{schema}\".queues (name, mode) values ('default', 'round_robin')")
    await jobs.plant(4, actor="'plain'", fairness_key="'x'", lane="'f:x'")
    await jobs.plant(4, fairness_key="'x'", lane="'f:x'")
    await jobs.store_actor("plain", max_concurrent=2)
    async with Harness(pool, schema, ["default"], size=30) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: len(harness.taken) == 6, 60)
        assert len(_runs(harness, "plain")) == 2
    await taker


async def test_no_lane_starves_another_for_as_long_as_its_backlog_lasts(jobs: JobTable, pool: Any, schema: str) -> None:
    """An old identity of one actor, and an urgent one, behind many of another."""
    serial = {"serial": "true", "identity_key": "gen_random_uuid()::text"}
    (urgent,) = await jobs.plant(1, **serial | {"actor": "'plain'", "lane": "e'i:plain\\x1fz'"}, priority="9")
    (low,) = await jobs.plant(1, **serial | {"actor": "'plain'", "lane": "e'i:plain\\x1fa'"}, priority="-9")
    await jobs.conn.execute(
        f"""insert into "{schema}".jobs (id, queue, route, actor, payload, identity_key, serial, lane)
            select gen_random_uuid(), 'default', 'default', 'succeed', '{{}}', n::text, true,
                e'i:succeed\\x1f' || lpad(n::text, 5, '0')
            from generate_series(1, 3000) n"""
    )
    await jobs.plant(3000)
    async with Harness(pool, schema, ["default"], size=2) as harness:
        taker = asyncio.ensure_future(harness.take(0.001))
        await eventually(lambda: {urgent, low} <= {one.job_id for one in harness.taken}, 60)
        assert len(harness.taken) < 3000
    await taker


async def test_many_strangers_hide_nothing(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.conn.execute(
        f"""insert into "{schema}".jobs (id, queue, route, actor, payload, lane)
            select gen_random_uuid(), 'default', 'default', 'stranger ' || n, '{{}}', 'a:stranger ' || n
            from generate_series(1, 1500) n"""
    )
    (mine,) = await jobs.plant(1, serial="true", identity_key="'x'", lane="e'i:succeed\\x1fx'")
    async with Harness(pool, schema, ["default"]) as harness:
        taker = asyncio.ensure_future(harness.take(0.0))
        await eventually(lambda: [one.job_id for one in harness.taken] == [mine], 30)
    await taker
