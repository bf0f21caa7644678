"""Lanes and gates: limits that are never passed, turns, and one job of an identity at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.worker.lane_claims import NO_CLAIM
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.test_producer import Harness

CAPPED = {"kind": "lane", "lane": "a:succeed", "gates": ["a:succeed"]}
SERIAL = {"kind": "serial", "actor": "succeed"}
FAIR = {"kind": "fair", "first": [""]}
IN_LANE = {"lane": "'a:succeed'"}


async def capped(jobs: JobTable, cap: int, count: int = 10) -> list[UUID]:
    """Jobs of a capped actor, in its lane."""
    await jobs.gate("a:succeed", cap)
    return await jobs.plant(count, **IN_LANE)


def serial(identity: str) -> dict[str, str]:
    """The columns of a job of an identity."""
    return {"identity_key": f"'{identity}'", "serial": "true", "lane": f"e'i:succeed\\x1f{identity}'"}


async def settled(jobs: JobTable, conn: asyncpg.Connection, ids: list[UUID]) -> None:
    """Settle first attempts, again while another claimer looks at their rows."""
    while ids:
        done = await jobs.succeed(*ids, conn=conn)
        ids = [job for job in ids if job not in (done or [])]


# -- gates ------------------------------------------------------------------------------------------


async def test_a_limit_lets_through_as_many_as_it_says_and_counts_them(jobs: JobTable) -> None:
    ids = await capped(jobs, 3)
    worker = new_uuid()
    claimed, notes = await jobs.claim_lanes(worker, 10, CAPPED)
    assert [job["id"] for job in claimed] == ids[:3]
    assert notes == [("full", None)]
    assert await jobs.held() == {"a:succeed": 3}
    row = await jobs.row(ids[0])
    assert (row["status"], row["epoch"], row["attempt"], row["worker_id"]) == ("running", 1, 1, worker)
    assert await jobs.claim_lanes(new_uuid(), 10, CAPPED) == ([], [("full", None)])


async def test_who_fills_a_limit_is_told_that_it_is_full(jobs: JobTable) -> None:
    await capped(jobs, 3)
    for room, note in (2, "more"), (1, "full"):
        _, notes = await jobs.claim_lanes(new_uuid(), room, CAPPED)
        assert notes == [(note, None)]


async def test_a_limit_of_nothing_runs_nothing(jobs: JobTable) -> None:
    await capped(jobs, 0)
    assert await jobs.claim_lanes(new_uuid(), 10, CAPPED) == ([], [("full", None)])
    assert await jobs.held() == {"a:succeed": 0}


async def test_a_gate_that_was_never_set_lets_nothing_through(jobs: JobTable) -> None:
    await jobs.plant(2, **IN_LANE)
    assert await jobs.claim_lanes(new_uuid(), 10, CAPPED) == ([], [("full", None)])


async def test_of_several_gates_the_fullest_decides_and_every_one_counts(jobs: JobTable) -> None:
    await jobs.gate("q:default", 2)
    await jobs.gate("r:shared", 9)  # gates are gone through in their order: the fullest is neither first nor last
    await capped(jobs, 5)
    unit = CAPPED | {"gates": ["a:succeed", "r:shared", "q:default"]}
    claimed, _ = await jobs.claim_lanes(new_uuid(), 10, unit)
    assert len(claimed) == 2
    assert await jobs.held() == {"a:succeed": 2, "q:default": 2, "r:shared": 2}


async def test_units_of_one_claim_share_a_gate(jobs: JobTable) -> None:
    await jobs.gate("r:shared", 3)
    await jobs.plant(2, actor="'one'", lane="'a:one'")
    await jobs.plant(2, actor="'two'", lane="'a:two'")
    units = [{"kind": "lane", "lane": f"a:{name}", "gates": ["r:shared"]} for name in ("one", "two")]
    claimed, notes = await jobs.claim_lanes(new_uuid(), 10, *units)
    assert Counter(job["actor"] for job in claimed) == {"one": 2, "two": 1}
    assert [note for note, _ in notes] == ["short", "full"]
    assert await jobs.held() == {"r:shared": 3}


async def test_a_claimer_never_waits_for_a_gate(jobs: JobTable, dsn: str) -> None:
    await capped(jobs, 3)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{jobs.schema}".gates for update')
            claimed, notes = await asyncio.wait_for(jobs.claim_lanes(new_uuid(), 10, CAPPED), 10)
        assert (claimed, notes) == ([], [("contended", None)])
    finally:
        await other.close()
    assert len((await jobs.claim_lanes(new_uuid(), 10, CAPPED))[0]) == 3


async def test_a_claim_that_breaks_off_leaves_no_trace(jobs: JobTable) -> None:
    await capped(jobs, 3)
    before = await jobs.image()
    transaction = jobs.conn.transaction()
    await transaction.start()
    assert len((await jobs.claim_lanes(new_uuid(), 10, CAPPED))[0]) == 3
    await transaction.rollback()
    assert await jobs.image() == before
    assert await jobs.held() == {"a:succeed": 0}


ENDS: dict[str, tuple[Any, ...]] = {
    "settle_succeeded": ([0.1] * 3, [None] * 3, *NO_CLAIM),
    "settle_failed": (
        [0.1] * 3,
        ["E"] * 3,
        [""] * 3,
        [None] * 3,
        ["transient", "non_retryable", "transient"],
        [0.0, 0.0, 9.0],
        [None] * 3,
    ),
    "settle_snoozed": ([0.1] * 3, [0.0, 0.0, 9.0]),
    "settle_released": ([0.1, None, 0.1], ["worker_shutdown"] * 3),
    "settle_abandoned": ([0.1] * 3,),
}


@pytest.mark.parametrize("end", ENDS)
async def test_every_end_of_an_attempt_gives_its_gates_back_once(jobs: JobTable, end: str) -> None:
    await jobs.gate("r:shared", 4)
    await capped(jobs, 4)
    unit = CAPPED | {"gates": ["a:succeed", "r:shared"]}
    claimed, _ = await jobs.claim_lanes(new_uuid(), 10, unit)
    pairs = ([job["id"] for job in claimed][:3], [job["epoch"] for job in claimed][:3])
    for _ in range(2):  # a replay gives nothing back
        await jobs.conn.fetch(jobs.worker_sql[end], *pairs, *ENDS[end])
        assert await jobs.held() == {"a:succeed": 1, "r:shared": 1}
    rows = [await jobs.row(job) for job in pairs[0]]
    assert {row["held_gates"] for row in rows} == {None}


async def test_a_stale_writer_gives_nothing_back(jobs: JobTable) -> None:
    (job,) = await capped(jobs, 1, 1)
    await jobs.claim_lanes(new_uuid(), 1, CAPPED)
    for end, arguments in ENDS.items():
        await jobs.conn.fetch(jobs.worker_sql[end], [job], [0], *(column and column[:1] for column in arguments))
        assert await jobs.held() == {"a:succeed": 1}, end


async def test_a_crash_gives_its_gates_back(jobs: JobTable) -> None:
    await capped(jobs, 3)
    worker = await jobs.register()
    claimed, _ = await jobs.claim_lanes(worker, 10, CAPPED)
    await jobs.update([claimed[0]["id"]], lock_expires_at="clock_timestamp() - interval '1 second'")
    assert (await jobs.tick())["reaped"] == 1
    assert await jobs.held() == {"a:succeed": 2}
    await jobs.conn.execute(f'select "{jobs.schema}".release($1, 100)', [worker])
    assert await jobs.held() == {"a:succeed": 0}


async def test_a_lowered_limit_admits_nobody_until_enough_have_ended(jobs: JobTable) -> None:
    await capped(jobs, 5)
    claimed, _ = await jobs.claim_lanes(new_uuid(), 10, CAPPED)
    await jobs.gate("a:succeed", 2)
    for left, job in zip((4, 3, 2), claimed, strict=False):
        await jobs.succeed(job["id"])
        assert await jobs.claim_lanes(new_uuid(), 10, CAPPED) == ([], [("full", None)])
        assert await jobs.held() == {"a:succeed": left}
    await jobs.succeed(claimed[3]["id"])
    assert len((await jobs.claim_lanes(new_uuid(), 10, CAPPED))[0]) == 1


async def test_a_count_that_is_wrong_is_repaired_and_a_right_one_left_alone(jobs: JobTable) -> None:
    await jobs.gate("r:idle", 4)
    await capped(jobs, 4)
    await jobs.claim_lanes(new_uuid(), 2, CAPPED)
    await jobs.conn.execute(f'update "{jobs.schema}".gates set held = held + 2')
    assert (await jobs.tick())["gates_repaired"] == 2
    assert await jobs.held() == {"a:succeed": 2, "r:idle": 0}
    assert (await jobs.tick())["gates_repaired"] == 0


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("settle", ["one by one", "together", "with the next claim"])
async def test_claimers_at_once_never_pass_a_limit(jobs: JobTable, dsn: str, settle: str, count: int) -> None:
    slots = 3
    await capped(jobs, slots, count)
    running: set[UUID] = set()
    most = 0
    done: list[UUID] = []

    def begun(claimed: list[asyncpg.Record]) -> list[UUID]:
        nonlocal most
        ids = [job["id"] for job in claimed]
        running.update(ids)
        most = max(most, len(running))
        return ids

    async def claimer(conn: asyncpg.Connection) -> None:
        while len(done) < count:
            claimed, _ = await jobs.claim_lanes(new_uuid(), 5, CAPPED, conn=conn)
            ids = begun(claimed)
            await asyncio.sleep(0)
            while ids and settle == "with the next claim":
                last = ids.pop()
                running.discard(last)
                done.append(last)
                applied, claimed, _ = await jobs.relay((last, 1), new_uuid(), 5, CAPPED, conn=conn)
                assert applied
                ids += begun(claimed)
            for part in [[job] for job in ids] if settle == "one by one" else [ids] * bool(ids):
                running.difference_update(part)  # before the settlement: others may claim as it commits
                done.extend(part)
                await settled(jobs, conn, part)

    connections = [await asyncpg.connect(dsn) for _ in range(8)]
    try:
        async with asyncio.timeout(300):
            await asyncio.gather(*map(claimer, connections))
    finally:
        for connection in connections:
            await connection.close()
    assert len(done) == len(set(done)) == count
    assert most <= slots
    assert await jobs.held() == {"a:succeed": 0}
    assert await jobs.counts() == {"succeeded": count}


# -- identities -------------------------------------------------------------------------------------


async def test_one_job_of_an_identity_runs_at_a_time_in_order(jobs: JobTable) -> None:
    ids = await jobs.plant(3, **serial("x"))
    for expected in ids:
        claimed, _ = await jobs.claim_lanes(new_uuid(), 10, SERIAL)
        assert [job["id"] for job in claimed] == [expected]
        assert (await jobs.claim_lanes(new_uuid(), 10, SERIAL))[0] == []
        await jobs.succeed(expected)
    assert await jobs.counts() == {"succeeded": 3}


async def test_identities_do_not_wait_for_each_other(jobs: JobTable) -> None:
    firsts = [(await jobs.plant(2, **serial(identity)))[0] for identity in "abc"]
    claimed, notes = await jobs.claim_lanes(new_uuid(), 10, SERIAL)
    assert [job["id"] for job in claimed] == firsts
    assert notes == [("short", None)]


async def test_a_locked_head_is_not_passed_within_its_identity(jobs: JobTable, dsn: str) -> None:
    first, _ = await jobs.plant(2, **serial("x"))
    (other,) = await jobs.plant(1, **serial("y"))
    conn = await asyncpg.connect(dsn)
    try:
        async with conn.transaction():
            await conn.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', first)
            claimed, _ = await jobs.claim_lanes(new_uuid(), 10, SERIAL)
        assert [job["id"] for job in claimed] == [other]
    finally:
        await conn.close()


async def test_the_arbiter_refuses_a_second_run_of_an_identity(jobs: JobTable) -> None:
    first, second = await jobs.plant(2, **serial("x"))
    await jobs.claim_lanes(new_uuid(), 1, SERIAL)
    with pytest.raises(asyncpg.UniqueViolationError):
        await jobs.update([second], status="'running'")
    assert (await jobs.row(first))["status"] == "running"


async def test_urgent_identities_go_first_then_the_oldest(jobs: JobTable) -> None:
    (old,) = await jobs.plant(1, **serial("z"), scheduled_at="now() - interval '1 hour'")
    (young,) = await jobs.plant(1, **serial("a"))
    (urgent,) = await jobs.plant(1, **serial("m"), priority="9")
    order = [(await jobs.claim_lanes(new_uuid(), 1, SERIAL))[0][0]["id"] for _ in range(3)]
    assert order == [urgent, old, young]


async def test_a_claim_of_identities_takes_nothing_else(jobs: JobTable) -> None:
    await jobs.plant(1, lane="'f:x'", actor="'stranger'")
    await jobs.plant(1, lane="e'i:succeed\\x1fy'", identity_key="'y'", actor="'stranger'")
    unit = SERIAL | {"first": ["f:x", "i:succeed\x1fy"]}
    assert await jobs.claim_lanes(new_uuid(), 9, unit) == ([], [("short", None)])


async def test_a_walk_over_many_identities_says_where_it_stopped(jobs: JobTable) -> None:
    await jobs.conn.execute(
        f"""insert into "{jobs.schema}".jobs (id, queue, route, actor, payload, identity_key, serial, lane)
            select gen_random_uuid(), 'default', 'default', 'succeed', '{{}}', n::text, true,
                e'i:succeed\\x1f' || lpad(n::text, 5, '0')
            from generate_series(1, 1000) n"""
    )
    seen: list[str] = []
    after = None
    while True:
        claimed, ((_, after),) = await jobs.claim_lanes(new_uuid(), 100, SERIAL | {"after": after})
        seen += [job["lane"] for job in claimed]
        if after is None:
            break
        # a walk looks further than it takes: what it passed over is found from the beginning
    left, _ = await jobs.claim_lanes(new_uuid(), 1000, SERIAL)
    assert len(set(seen)) == len(seen) >= 300
    assert len(seen) + len(left) == 1000


@pytest.mark.parametrize("settle", ["together", "with the next claim"])
async def test_claimers_at_once_never_run_two_of_an_identity(jobs: JobTable, dsn: str, settle: str) -> None:
    identities, each = 20, 15
    for identity in range(identities):
        await jobs.plant(each, **serial(str(identity)))
    running: set[str] = set()
    order: dict[str, list[UUID]] = {}
    met = 0

    def begun(claimed: list[asyncpg.Record]) -> list[asyncpg.Record]:
        for job in claimed:
            assert job["lane"] not in running
            running.add(job["lane"])
            order.setdefault(job["lane"], []).append(job["id"])
        return claimed

    async def settled_with_a_claim(conn: asyncpg.Connection, mine: list[asyncpg.Record]) -> None:
        nonlocal met
        while mine:
            last = mine.pop()
            running.discard(last["lane"])
            try:
                applied, claimed, _ = await jobs.relay((last["id"], 1), new_uuid(), 4, SERIAL, conn=conn)
                mine += begun(claimed)
            except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
                met += 1
                applied = False
            if not applied:  # another claimer looked at its row, or was at its identity
                await settled(jobs, conn, [last["id"]])

    async def claimer(conn: asyncpg.Connection) -> None:
        nonlocal met
        while sum(map(len, order.values())) < identities * each:
            try:
                claimed, _ = await jobs.claim_lanes(new_uuid(), 4, SERIAL, conn=conn)
            except (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError):
                met += 1
                continue
            begun(claimed)
            await asyncio.sleep(0)
            if settle == "with the next claim":
                await settled_with_a_claim(conn, claimed)
            else:
                running.difference_update(job["lane"] for job in claimed)
                await settled(jobs, conn, [job["id"] for job in claimed])

    connections = [await asyncpg.connect(dsn) for _ in range(8)]
    try:
        async with asyncio.timeout(300):
            await asyncio.gather(*map(claimer, connections))
    finally:
        for connection in connections:
            await connection.close()
    assert all(done == sorted(done) and len(done) == each for done in order.values())
    assert met < identities * each / 3, "claimers meet too often to be of use to each other"


# -- turns ------------------------------------------------------------------------------------------


async def test_fairness_keys_take_turns_and_jobs_without_one_are_one_more(jobs: JobTable) -> None:
    await jobs.plant(500, fairness_key="'whale'", lane="'f:whale'")
    await jobs.plant(5, fairness_key="'small'", lane="'f:small'")
    await jobs.plant(5)
    claimed, notes = await jobs.claim_lanes(new_uuid(), 12, FAIR)
    assert Counter(job["lane"] for job in claimed) == {"": 4, "f:small": 4, "f:whale": 4}
    assert notes == [("more", None)]


async def test_urgent_jobs_go_first_within_a_key(jobs: JobTable) -> None:
    await jobs.plant(3, fairness_key="'k'", lane="'f:k'")
    (urgent,) = await jobs.plant(1, fairness_key="'k'", lane="'f:k'", priority="9")
    claimed, _ = await jobs.claim_lanes(new_uuid(), 1, {"kind": "fair"})
    assert [job["id"] for job in claimed] == [urgent]


async def test_every_key_is_served_before_any_is_served_again(jobs: JobTable, pool: Any) -> None:
    for key in range(200):
        await jobs.plant(3, fairness_key=f"'{key:03}'", lane=f"'f:{key:03}'")
    async with Harness(pool, jobs.schema, ["default"], size=8) as harness:
        taker = asyncio.ensure_future(harness.take(0.003))
        await eventually(lambda: len(harness.taken) >= 600, 60)
    await taker
    turns = [Counter(one.lane for one in harness.taken[start : start + 200]) for start in (0, 200, 400)]
    assert max(map(max, (turn.values() for turn in turns))) <= 2, "the walk starts anew where it began, once a turn"
    assert all(len(turn) > 180 for turn in turns)


# -- enqueue and hand-backs -------------------------------------------------------------------------


async def test_rows_that_a_change_left_in_the_plain_lane_move_to_their_own(jobs: JobTable) -> None:
    await jobs.plant(5)
    await jobs.plant(5, actor="'other'")
    moved = await jobs.conn.fetchval(jobs.worker_sql.relane, "default", ["succeed"], ["succeed", "other"])
    assert moved == 5
    lanes = await jobs.conn.fetch(f'select actor, lane from "{jobs.schema}".jobs')
    assert {tuple(row) for row in lanes} == {("succeed", "a:succeed"), ("other", "")}


async def test_limited_jobs_leave_the_lanes_of_fairness_keys(jobs: JobTable) -> None:
    for key in range(250):
        await jobs.plant(2, fairness_key=f"'{key:03}'", lane=f"'f:{key:03}'", actor="'other'")
    await jobs.plant(5, fairness_key="'249'", lane="'f:249'", priority="1")
    first = await jobs.conn.fetchrow(jobs.worker_sql.relane_fair, "default", ["succeed"], None)
    assert tuple(first) == (0, "f:199")
    second = await jobs.conn.fetchrow(jobs.worker_sql.relane_fair, "default", ["succeed"], "f:199")
    assert tuple(second) == (5, None)
    lanes = await jobs.conn.fetch(f"select distinct lane from \"{jobs.schema}\".jobs where actor = 'succeed'")
    assert [row["lane"] for row in lanes] == ["a:succeed"]


async def test_strangers_get_a_lane_of_their_own_once_they_stand_in_the_way(jobs: JobTable) -> None:
    await jobs.plant(999, actor="'stranger'")
    assert await jobs.conn.fetchval(jobs.worker_sql.relane, "default", [], ["succeed"]) == 0
    await jobs.plant(1, actor="'stranger'")
    await jobs.plant(1)
    assert await jobs.conn.fetchval(jobs.worker_sql.relane, "default", [], ["succeed"]) == 1000
    assert len(await jobs.claim(new_uuid(), 10)) == 1


async def test_heads_name_every_other_lane_once_with_its_most_urgent_priority(jobs: JobTable) -> None:
    await jobs.plant(3, lane="'a:succeed'")
    await jobs.plant(1, lane="'a:succeed'", priority="4")
    for key in ("k1", "k2"):
        await jobs.plant(2, fairness_key=f"'{key}'", lane=f"'f:{key}'")
    for identity in ("x", "y"):
        await jobs.plant(2, **serial(identity))
        await jobs.plant(1, actor="'succeed:2'", serial="true", lane=f"e'i:succeed:2\\x1f{identity}'")
    heads = await jobs.conn.fetch(jobs.worker_sql.heads, ["default"], ["succeed", "succeed:2"])
    assert [(head["lane"], head["priority"], head["actor"]) for head in heads] == [
        ("a:succeed", 4, "succeed"),
        ("f:k1", 0, "succeed"),
        ("i:succeed\x1fx", 0, "succeed"),
        ("i:succeed:2\x1fx", 0, "succeed:2"),
    ]


async def test_the_operator_sets_a_gate_by_storing_a_limit(jobs: JobTable, dsn: str) -> None:
    async with jobs.listening(dsn) as heard:
        await jobs.store_actor(max_concurrent=7)
        await jobs.conn.execute(f"insert into \"{jobs.schema}\".queues (name, max_concurrent) values ('default', 9)")
        await eventually(lambda: len(heard) >= 2)
    caps = await jobs.conn.fetch(f'select bucket, cap from "{jobs.schema}".gates order by bucket')
    assert [tuple(row) for row in caps] == [("a:succeed", 7), ("q:default", 9)]
    await jobs.conn.execute(f'update "{jobs.schema}".actor_config set max_concurrent = 2')
    caps = await jobs.conn.fetch(f'select cap from "{jobs.schema}".gates order by bucket')
    assert [row["cap"] for row in caps] == [2, 9]
