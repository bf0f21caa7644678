"""What single guards of the claiming and settling statements are for, where no other test tells."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from tests.jobs import JobTable
from tests.worker.test_lanes import CAPPED, FAIR, IN_LANE, SERIAL, serial

PAST, AHEAD = "clock_timestamp() - interval '1 hour'", "clock_timestamp() + interval '1 hour'"
UNITS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "limited": (CAPPED, IN_LANE),
    "identity": (SERIAL, serial("x")),
    "turns": (FAIR, {"fairness_key": "'k'", "lane": "'f:k'"}),
}


@pytest.fixture(params=UNITS)
async def lane(jobs: JobTable, request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, str]]:
    """A unit of a claim, and the columns of jobs in its lane."""
    await jobs.gate("a:succeed", 9)
    return UNITS[request.param]


async def claimed(jobs: JobTable, unit: dict[str, Any], room: int = 10, **options: Any) -> list[UUID]:
    """Claim through one unit and answer the ids."""
    return [job["id"] for job in (await jobs.claim_lanes(new_uuid(), room, unit, **options))[0]]


@pytest.mark.parametrize(
    "columns",
    [{"scheduled_at": AHEAD}, {"schedule_to_close": PAST}, {"route": "'other'"}, {"status": "'succeeded'"}],
    ids=["early", "late", "elsewhere", "ended"],
)
async def test_what_a_claim_from_a_lane_leaves_alone(
    jobs: JobTable, lane: tuple[dict[str, Any], dict[str, str]], columns: dict[str, str]
) -> None:
    unit, at = lane
    await jobs.plant(1, **{**at, **columns})
    before = await jobs.image()
    assert await claimed(jobs, unit) == []
    assert await jobs.image() == before
    (job,) = await jobs.plant(1, **{**at, "schedule_to_close": AHEAD})
    assert await claimed(jobs, unit) == [job]


async def test_a_lane_is_served_in_its_order(jobs: JobTable, lane: tuple[dict[str, Any], dict[str, str]]) -> None:
    unit, at = lane
    late, early, urgent = [(await jobs.plant(1, **at, **more))[0] for more in ({}, {}, {"priority": "3"})]
    await jobs.update([early], scheduled_at=PAST)
    order = []
    for _ in range(3):
        order += await claimed(jobs, unit, 1)
        await jobs.succeed(order[-1])
    assert order == [urgent, early, late]


@pytest.mark.parametrize("kind", ["plain", "limited", "identity"])
async def test_the_order_does_not_hang_on_the_plan(jobs: JobTable, kind: str) -> None:
    await jobs.gate("a:succeed", 9)
    unit, at = UNITS.get(kind, ({}, {}))
    for scan in ("indexscan", "indexonlyscan", "bitmapscan"):
        await jobs.conn.execute(f"set enable_{scan} = off")
    for minutes in (1, 3, 2):
        await jobs.plant(1, **at, scheduled_at=f"clock_timestamp() - interval '{minutes} minutes'")
    (job,) = await claimed(jobs, unit, 1) if unit else [row["id"] for row in await jobs.claim(new_uuid())]
    row = await jobs.row(job)
    assert (row["now"] - row["scheduled_at"]).total_seconds() > 150


async def test_claimers_of_a_lane_pass_what_others_hold(
    jobs: JobTable, lane: tuple[dict[str, Any], dict[str, str]], other: asyncpg.Connection
) -> None:
    unit, at = lane
    first, *others = await jobs.plant(3, **at)
    async with other.transaction():
        await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', first)
        assert await claimed(jobs, unit) == ([] if unit is SERIAL else others)


async def test_turns_give_no_more_than_there_is_room_for(jobs: JobTable) -> None:
    for key in "abc":
        await jobs.plant(2, fairness_key=f"'{key}'", lane=f"'f:{key}'")
    assert len(await claimed(jobs, FAIR, 2)) == 2


async def test_of_lanes_in_turns_only_known_actors_jobs_are_taken(jobs: JobTable) -> None:
    await jobs.plant(1, actor="'stranger'", fairness_key="'k'", lane="'f:k'")
    assert await claimed(jobs, FAIR) == []
    (job,) = await jobs.plant(1, fairness_key="'k'", lane="'f:k'")
    assert await claimed(jobs, FAIR) == [job]


async def test_a_limited_lane_is_asked_for_by_who_knows_its_actor(jobs: JobTable) -> None:
    await jobs.gate("a:succeed", 9)
    (job,) = await jobs.plant(1, **IN_LANE)
    assert await claimed(jobs, CAPPED, known=()) == [job]


async def test_units_end_with_the_room_of_the_claim(jobs: JobTable) -> None:
    await jobs.gate("a:succeed", 9)
    await jobs.plant(5, **IN_LANE)
    for identity in "abc":
        await jobs.plant(1, **serial(identity))
    jobs_claimed, notes = await jobs.claim_lanes(new_uuid(), 4, SERIAL, CAPPED)
    assert (len(jobs_claimed), len(notes)) == (4, 2)
    assert await jobs.held() == {"a:succeed": 1}
    jobs_claimed, notes = await jobs.claim_lanes(new_uuid(), 2, CAPPED, SERIAL)
    assert (len(jobs_claimed), len(notes)) == (2, 1)


async def test_only_the_gates_that_are_passed_count(jobs: JobTable) -> None:
    await jobs.gate("a:other", 3)
    await jobs.gate("a:succeed", 3)
    await jobs.plant(2, **IN_LANE)
    ids = await claimed(jobs, CAPPED)
    assert await jobs.held() == {"a:other": 0, "a:succeed": 2}
    await jobs.conn.execute(f'update "{jobs.schema}".gates set held = 3 where bucket = $1', "a:other")
    await jobs.succeed(*ids)
    assert await jobs.held() == {"a:other": 3, "a:succeed": 0}


async def test_a_job_without_an_identity_in_the_lane_of_one_is_in_nobodys_way(jobs: JobTable) -> None:
    columns = serial("x")
    (stray,) = await jobs.plant(1, lane=columns["lane"])
    await jobs.update([stray], status="'running'")
    (job,) = await jobs.plant(1, **columns)
    assert await claimed(jobs, SERIAL) == [job]


async def test_a_claim_locks_no_more_than_it_takes(jobs: JobTable, other: asyncpg.Connection) -> None:
    ids = await jobs.plant(5)
    async with other.transaction():
        taken = await jobs.claim(new_uuid(), 2, routes=("default", "default"), conn=other)
        assert [job["id"] for job in taken] == ids[:2]
        assert [job["id"] for job in await jobs.claim(new_uuid(), 5)] == ids[2:]


async def test_the_beat_of_an_earlier_attempt_does_not_count_against_the_next(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker, heartbeat_timeout="interval '30 minutes'")
    await jobs.conn.fetch(jobs.worker_sql.renew, [job], [1], [0.1], 60.0, 58.0)
    await jobs.conn.fetchrow(jobs.worker_sql.settle_snoozed, [job], [1], [0.1], [0.0])
    await jobs.update([job], last_heartbeat_at=PAST)
    assert len(await jobs.claim(worker)) == 1
    assert await jobs.conn.fetchval(f'select "{jobs.schema}".reap(10)') == 0


HEADS = {
    "plain": ({}, ("", 0)),
    "less urgent": ({"priority": "-1"}, ("", -1)),
    "limited": ({"lane": "'a:succeed'"}, ("a:succeed", 0)),
    "less urgent limited": ({"lane": "'a:zz'", "priority": "-7"}, ("a:zz", -7)),
}


async def heads(jobs: JobTable) -> list[tuple[str, int]]:
    """Where pending rows begin, as a worker of ``succeed`` sees it."""
    found = await jobs.conn.fetch(jobs.worker_sql.heads, ["default"], ["succeed"])
    return [(row["lane"], row["priority"]) for row in found]


@pytest.mark.parametrize("kind", HEADS)
async def test_what_is_no_head(jobs: JobTable, kind: str) -> None:
    """Neither what has ended, nor what waits elsewhere."""
    columns = HEADS[kind][0]
    for lane, priority in (("", -9), ("a:aa", 0), ("a:zzz", 0)):
        await jobs.plant(1, route="'other'", lane=f"'{lane}'", priority=str(priority))
    expected = []
    for one, (has, is_head) in HEADS.items():
        await jobs.plant(1, **has, status="'pending'" if one != kind else "'succeeded'")
        await jobs.plant(1, **has, route="'other'")
        expected += [is_head] if one != kind else []
    found = [
        (row["lane"], row["priority"]) for row in await jobs.conn.fetch(jobs.worker_sql.heads, ["default"], ["succeed"])
    ]
    assert found == expected
    await jobs.plant(1, **columns)
    found = [
        (row["lane"], row["priority"]) for row in await jobs.conn.fetch(jobs.worker_sql.heads, ["default"], ["succeed"])
    ]
    assert found == [is_head for _, is_head in HEADS.values()]


@pytest.mark.parametrize(
    "columns",
    [{"status": "'running'"}, {"route": "'other'"}, {"lane": "'f:k'"}, {"actor": "'known'"}],
    ids=["running", "elsewhere", "in a lane", "another's"],
)
async def test_what_does_not_change_its_lane(jobs: JobTable, columns: dict[str, str]) -> None:
    await jobs.plant(1, **columns)
    before = await jobs.image()
    assert await jobs.conn.fetchval(jobs.worker_sql.relane, "default", ["succeed"], ["succeed", "known"]) == 0
    assert await jobs.image() == before


async def test_rows_that_others_hold_change_their_lane_when_they_let_go(
    jobs: JobTable, other: asyncpg.Connection
) -> None:
    ids = await jobs.plant(3)
    relane = (jobs.worker_sql.relane, "default", ["succeed"], ["succeed"])
    async with other.transaction():
        await other.execute(f'select from "{jobs.schema}".jobs where id = $1 for update', ids[1])
        assert await jobs.conn.fetchval(*relane) == 2
    assert await jobs.conn.fetchval(*relane) == 1


async def test_our_own_rows_are_no_strangers(jobs: JobTable) -> None:
    await jobs.plant(990)
    await jobs.plant(20, actor="'stranger'")
    assert await jobs.conn.fetchval(jobs.worker_sql.relane, "default", [], ["succeed"]) == 0


# -- attempts that are over -------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "not cancelled"])
async def test_an_attempt_that_no_cancel_is_after_is_not_forced(jobs: JobTable, ended: bool) -> None:
    (job,) = await jobs.running(await jobs.register())
    if ended:
        await jobs.update([job], cancel_requested_at="clock_timestamp()", cancel_phase="1")
        await jobs.succeed(job)
    before = await jobs.image()
    await jobs.conn.execute(jobs.worker_sql.force_cancel, job, 1)
    assert await jobs.image() == before


async def test_a_worker_does_not_hear_of_a_cancelled_job_that_has_ended(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker)
    await jobs.update([job], cancel_requested_at="clock_timestamp()", cancel_phase="1")
    assert len(await jobs.conn.fetch(jobs.worker_sql.cancelled, worker)) == 1
    await jobs.succeed(job)
    assert await jobs.conn.fetch(jobs.worker_sql.cancelled, worker) == []


async def test_a_report_of_progress_that_comes_after_the_end_is_dropped(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    await jobs.succeed(job)
    before = await jobs.image()
    await jobs.conn.execute(jobs.worker_sql.store_progress, [job], [1], [7], ['"late"'])
    assert await jobs.image() == before


async def test_a_start_that_was_stamped_is_not_written_again(jobs: JobTable) -> None:
    (job,) = await jobs.running(await jobs.register())
    beat = (jobs.worker_sql.renew, [job], [1], [2.0], 60.0, 1.0)
    await jobs.conn.fetch(*beat)
    before = await jobs.image()
    await jobs.conn.fetch(*beat)
    assert await jobs.image() == before


async def test_what_another_attempt_holds_is_not_held_by_this_one(jobs: JobTable) -> None:
    worker = await jobs.register()
    (job,) = await jobs.running(worker)
    await jobs.conn.fetchrow(jobs.worker_sql.settle_released, [job], [1], [0.1], ["worker_shutdown"])
    assert len(await jobs.claim(worker)) == 1
    (state,) = await jobs.conn.fetch(jobs.worker_sql.settle_state, [job], [1])
    assert (state["held"], state["same_epoch"], state["outcome"]) == (False, False, "interrupted")
