"""What becomes of a due schedule: its slots, jobs, decisions and cursor, and who may write them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.maintenance import firing as firing_module
from taskqd.maintenance.deciding import Claimed, decide, smear_of
from taskqd.maintenance.firing import FireCounts, Firing, FiringLoop
from taskqd.storage.statements import load
from tests.jobs import JobTable
from tests.scheduler.schedules import ScheduleTable, fire, never
from tests.support import eventually

MINUTE = timedelta(minutes=1)
AGO = "clock_timestamp() - interval '{}'".format
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def claimed(**columns: Any) -> Claimed:
    values = {
        "id": new_uuid(),
        "name": "report",
        "version": 1,
        "kind": "every",
        "expression": "60",
        "timezone": "UTC",
        "dst_strategy": "skip",
        "catch_up": "fire_once",
        "catch_up_max": 100,
        "catch_up_window": None,
        "smear": None,
        "next_fire_at": NOON,
        "as_of": NOON,
        "failures": 0,
        "guarded": False,
    }
    return Claimed(**{**values, **columns})


# -- what is decided ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "slots", "skipped", "cursor"),
    [
        ({}, [0], 0, 1),
        ({"as_of": NOON + 10.5 * MINUTE}, [10], 10, 11),
        ({"as_of": NOON + 10.5 * MINUTE, "catch_up": "skip"}, [10], 10, 11),
        ({"as_of": NOON + 10.5 * MINUTE, "catch_up": "skip", "expression": "600"}, [10], 1, 20),
        ({"as_of": NOON + 15 * MINUTE, "catch_up": "skip", "expression": "600"}, [], 2, 20),
        ({"as_of": NOON + 15 * MINUTE, "expression": "600"}, [10], 1, 20),
        ({"as_of": NOON + 15 * MINUTE, "expression": "600", "catch_up_window": MINUTE}, [], 2, 20),
        ({"as_of": NOON + 3 * MINUTE, "catch_up": "fire_all"}, [0, 1, 2, 3], 0, 4),
        ({"as_of": NOON + 3 * MINUTE, "catch_up": "fire_all", "catch_up_max": 2}, [0, 1], 0, 2),
        ({"as_of": NOON + 10 * MINUTE, "catch_up": "fire_all", "catch_up_window": 2 * MINUTE}, [8, 9, 10], 8, 11),
        ({"as_of": NOON + 10 * MINUTE, "catch_up": "fire_all", "catch_up_window": 2.5 * MINUTE}, [8, 9, 10], 8, 11),
        ({"next_fire_at": None}, [], 0, 1),
        ({"kind": "cron", "expression": "*/5 * * * *", "as_of": NOON + 12 * MINUTE}, [10], 2, 15),
    ],
)
def test_what_is_decided(columns: dict[str, Any], slots: list[float], skipped: int, cursor: float) -> None:
    decision = decide(claimed(**columns))
    assert decision.slots == [NOON + n * MINUTE for n in slots]
    assert decision.skipped == skipped
    assert decision.cursor_to == NOON + cursor * MINUTE


def test_what_is_passed_over_is_counted_within_bounds() -> None:
    decision = decide(claimed(expression="1", as_of=NOON + timedelta(days=30), catch_up_window=MINUTE))
    assert decision.skipped == 9_999
    assert decision.slots == [NOON + timedelta(days=30)]


def test_smeared_schedules_of_one_moment_spread_and_keep_their_lattice() -> None:
    ids = [new_uuid() for _ in range(100)]
    shifts = {smear_of(one, timedelta(seconds=60)) for one in ids}
    assert len(shifts) > 40
    assert max(shifts) < MINUTE
    one = claimed(kind="cron", expression="0 * * * *", smear=timedelta(seconds=60), next_fire_at=None)
    shift = smear_of(one.id, one.smear)
    first = decide(one).cursor_to
    # Before its own noon it is still due at noon.
    assert first == NOON + shift + (timedelta(hours=1) if shift == timedelta(0) else timedelta(0))
    again = decide(
        claimed(id=one.id, kind="cron", expression="0 * * * *", smear=one.smear, next_fire_at=first, as_of=first)
    )
    assert again.slots == [first]
    assert again.cursor_to == first + timedelta(hours=1)


def test_smeared_intervals_spread_from_their_first_slot_on() -> None:
    smear = timedelta(seconds=3600)
    some = [claimed(expression="60", smear=smear, next_fire_at=None) for _ in range(50)]
    first = {one.id: decide(one).cursor_to for one in some}
    assert len(set(first.values())) > 40
    for one in some:
        assert first[one.id] == NOON + MINUTE + smear_of(one.id, smear)
        again = decide(claimed(id=one.id, smear=smear, next_fire_at=first[one.id], as_of=first[one.id] + 2.5 * MINUTE))
        assert (again.slots, again.cursor_to) == ([first[one.id] + 2 * MINUTE], first[one.id] + 3 * MINUTE)


# -- one fire -----------------------------------------------------------------------------------------


async def test_a_new_schedule_only_finds_its_next_slot(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant()
    counts = await fire(firing)
    row = await schedules.row()
    assert (counts.claimed, counts.fired) == (1, 0)
    assert timedelta(0) < row["next_fire_at"] - row["now"] <= MINUTE
    assert [one["action"] for one in await schedules.decisions()] == ["initialized"]
    assert await schedules.jobs() == []


async def test_a_fire_is_a_job_a_slot_a_decision_and_a_cursor(
    schedules: ScheduleTable, firing: Firing, jobs: JobTable, dsn: str
) -> None:
    schedule = await schedules.plant(due=AGO("10 seconds"), payload='{"key": "x"}')
    due = (await schedules.row())["next_fire_at"]
    async with jobs.listening(dsn) as heard:
        assert (await fire(firing)).fired == 1
        await eventually(lambda: heard)
    (job,) = await schedules.jobs()
    assert (job["status"], job["actor"], job["queue"], job["payload"]) == (
        "pending",
        "succeed",
        "default",
        '{"key": "x"}',
    )
    assert job["scheduled_at"] == due
    about = job["meta"]["taskq_schedule"]
    assert (about["id"], about["name"], about["version"]) == (str(schedule), "report", 1)
    assert datetime.fromisoformat(about["due_at"]) == due
    assert 10 <= about["late_seconds"] < 300
    (decision,) = await schedules.decisions()
    assert (decision["action"], decision["fired"], decision["suppressed"], decision["skipped"]) == ("fired", 1, 0, 0)
    assert (decision["cursor_from"], decision["cursor_to"]) == (due, due + MINUTE)
    assert await schedules.outcomes() == {"fired": 1}
    row = await schedules.row()
    assert (row["next_fire_at"], row["last_fired_at"], row["last_job_id"]) == (due + MINUTE, due, job["id"])
    assert row["claim_token"] is None
    assert (await fire(firing)).claimed == 0


async def test_what_an_actor_stored_reaches_its_jobs(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.conn.execute(
        f"""
        insert into "{schedules.schema}".actor_config (actor, queue, max_attempts, retry_kind, retry_backoff,
            retry_base, retry_cap, retry_jitter, time_budget, priority)
        values ('succeed', 'moved', 7, 'indefinite', 'fixed', 3, 30, 0.5, interval '1 hour', 9)
        """
    )
    await schedules.plant(due=AGO("1 second"))
    await schedules.plant(
        "own",
        due=AGO("1 second"),
        options={
            "queue": "q",
            "priority": -4,
            "tags": ["nightly", "a-b"],
            "start_to_close": 5,
            "schedule_to_close": 60,
            "max_attempts": 2,
            "metadata": {"team": "x"},
        },
    )
    await fire(firing)
    jobs = {job["meta"]["taskq_schedule"]["name"]: job for job in await schedules.jobs()}
    plain, own = jobs["report"], jobs["own"]
    assert (plain["queue"], plain["route"], plain["priority"], plain["max_attempts"]) == ("moved", "moved", 9, 7)
    assert (plain["retry_kind"], plain["retry_backoff"], plain["retry_base"], plain["retry_cap"]) == (
        "indefinite",
        "fixed",
        3,
        30,
    )
    assert timedelta(minutes=59) < plain["schedule_to_close"] - plain["created_at"] < timedelta(minutes=61)
    assert (own["queue"], own["route"], own["priority"], own["max_attempts"]) == ("q", "q", -4, 2)
    assert (own["tags"], own["start_to_close"], own["meta"]["team"]) == (["nightly", "a-b"], timedelta(seconds=5), "x")
    assert timedelta(seconds=50) < own["schedule_to_close"] - own["created_at"] < timedelta(seconds=70)


async def test_all_that_was_missed_fires_in_order_and_once(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(
        due="'2026-01-01'",
        kind="cron",
        expression="0 * * * *",
        catch_up="fire_all",
        catch_up_max=7,
        catch_up_window=None,
    )
    await schedules.update("report", next_fire_at="date_trunc('hour', clock_timestamp()) - interval '29 hours'")
    first = (await schedules.row())["next_fire_at"]
    claims = 0
    while (counts := await fire(firing)).claimed:
        claims += counts.claimed
    slots = await schedules.slots()
    assert slots[:30] == [first + timedelta(hours=n) for n in range(30)]
    assert len(await schedules.jobs()) == len(slots)
    assert claims >= 5


# -- what keeps a slot's job out ------------------------------------------------------------------------


async def test_overlap_forbidden(schedules: ScheduleTable, firing: Firing, jobs: JobTable) -> None:
    await schedules.plant(due=AGO("150 seconds"), overlap="forbid", catch_up="fire_all")
    assert (await fire(firing)).suppressed == 2
    assert await schedules.outcomes() == {"fired": 1, "overlapped": 2}
    (job,) = await schedules.jobs()
    await schedules.update("report", next_fire_at=AGO("1 second"))
    assert (await fire(firing)).suppressed == 1
    await jobs.update([job["id"]], status="'succeeded'", finished_at="clock_timestamp()")
    await schedules.update("report", next_fire_at=AGO("1 second"))
    assert (await fire(firing)).fired == 1
    row = await schedules.row()
    assert (row["enabled"], row["consecutive_failures"]) == (True, 0)


async def test_overlap_allowed(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("150 seconds"), catch_up="fire_all")
    assert (await fire(firing)).fired == 3


async def test_a_singleton_keeps_it_out_and_that_is_no_failure(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("150 seconds"), catch_up="fire_all", options={"singleton": True})
    await schedules.plant("other", due=AGO("1 second"))
    counts = await fire(firing)
    assert (counts.fired, counts.suppressed, counts.failed) == (2, 2, 0)
    assert await schedules.outcomes() == {"fired": 2, "suppressed": 2}
    assert (await schedules.row())["consecutive_failures"] == 0


async def test_the_same_identity_within_its_window_keeps_it_out(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("1 second"), identity_key="tenant", options={"unique_for": 3600})
    assert (await fire(firing)).fired == 1
    await schedules.update("report", next_fire_at=AGO("1 second"))
    assert (await fire(firing)).suppressed == 1
    await schedules.conn.execute(f"update \"{schedules.schema}\".jobs set created_at = created_at - interval '2 hours'")
    await schedules.update("report", next_fire_at=AGO("1 second"))
    assert (await fire(firing)).fired == 1
    await schedules.conn.execute(f"update \"{schedules.schema}\".jobs set status = 'succeeded'")
    await schedules.update("report", next_fire_at=AGO("1 second"))
    assert (await fire(firing)).fired == 1
    await schedules.conn.execute(f"update \"{schedules.schema}\".jobs set status = 'succeeded'")
    everything = '{"unique_for": 3600, "unique_states": ["pending", "succeeded"]}'
    await schedules.update("report", next_fire_at=AGO("1 second"), options=f"'{everything}'")
    assert (await fire(firing)).suppressed == 1


async def test_an_actor_with_as_many_queued_jobs_as_it_may_have_gets_no_more(
    schedules: ScheduleTable, firing: Firing, jobs: JobTable
) -> None:
    await schedules.conn.execute(
        f"""
        insert into "{schedules.schema}".actor_config (actor, queue, max_attempts, retry_kind, retry_backoff,
            retry_base, retry_cap, retry_jitter, max_pending)
        values ('succeed', 'q', 3, 'transient', 'fixed', 1, 1, 0, 3)
        """
    )
    await jobs.plant(1, capped="true")
    await schedules.plant("a", due=AGO("3 minutes 10 seconds"), catch_up="fire_all")
    await schedules.plant("b", due=AGO("1 second"), actor="other")
    counts = await fire(firing)
    assert (counts.fired, counts.suppressed, counts.failed) == (3, 2, 0)
    assert [job["capped"] for job in await schedules.jobs() if job["actor"] == "succeed"] == [True] * 3
    assert await schedules.outcomes() == {"fired": 3, "suppressed": 2}


async def test_a_fire_waits_for_an_enqueue_of_the_same_identity(
    schedules: ScheduleTable, firing: Firing, dsn: str
) -> None:
    await schedules.plant(due=AGO("1 second"), identity_key="tenant", options={"unique_for": 3600})
    other = await asyncpg.connect(dsn, timeout=30)
    async with other.transaction():
        await other.fetch(
            f'select * from "{schedules.schema}".unique_holders($1, $2, $3, $4, 5000)',
            ["succeed"],
            ["tenant"],
            [3600.0],
            ["pending"],
        )
        await JobTable(other, schedules.schema).plant(identity_key="'tenant'")
        firing_now = asyncio.create_task(fire(firing))
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"

        async def waits() -> bool:
            return bool(await schedules.conn.fetchval(waiting))

        await eventually(waits)
    counts = await firing_now
    await other.close(timeout=10)
    assert (counts.fired, counts.suppressed) == (0, 1)


# -- fences ---------------------------------------------------------------------------------------------


async def held(firing: Firing, token: Any, lease: float = 60.0) -> list[asyncpg.Record]:
    """Claim without firing."""
    return await firing._pool.fetch(firing._sql.claim_schedules, 500, firing._owner, token, lease)


async def write(firing: Firing, records: list[asyncpg.Record], token: Any) -> list[asyncpg.Record]:
    """Fire what was claimed."""
    return await firing._write([decide(Claimed(*record)) for record in records], token)


async def test_a_claimed_one_is_left_to_who_claimed_it(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("1 second"))
    token = new_uuid()
    records = await held(firing, token)
    assert (await fire(firing)).claimed == 0
    assert len(await write(firing, records, token)) == 1
    assert await schedules.outcomes() == {"fired": 1}


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"claim_expires_at": AGO("1 second")},
        {"version": "version + 1"},
        {"enabled": "false"},
        {"retired_at": "clock_timestamp()"},
        {"claim_token": "gen_random_uuid()"},
        {"claim_token": "null"},
    ],
)
async def test_a_claim_that_has_lapsed_fires_nothing(
    schedules: ScheduleTable, firing: Firing, meanwhile: dict[str, str]
) -> None:
    await schedules.plant(due=AGO("1 second"))
    token = new_uuid()
    records = await held(firing, token)
    await schedules.update("report", **meanwhile)
    assert await write(firing, records, token) == []
    assert await schedules.jobs() == []
    assert await schedules.decisions() == []


async def test_who_slept_on_an_expired_claim_finds_the_slot_fired(
    schedules: ScheduleTable, firing: Firing, pool: Any
) -> None:
    await schedules.plant(due=AGO("1 second"))
    token = new_uuid()
    records = await held(firing, token, 0.0)
    other = Firing(pool, schedules.schema, new_uuid(), statement_timeout=10)
    assert (await fire(other)).fired == 1
    assert await write(firing, records, token) == []
    assert await schedules.outcomes() == {"fired": 1}


async def test_the_same_slot_cannot_fire_twice(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("1 second"), catch_up="fire_all", catch_up_window=None)
    due = (await schedules.row())["next_fire_at"]
    await fire(firing)
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set next_fire_at = $1', due)
    assert (await fire(firing)).fired == 0
    assert len(await schedules.jobs()) == 1
    with pytest.raises(asyncpg.UniqueViolationError):
        await schedules.conn.execute(
            f'insert into "{schedules.schema}".schedule_occurrences'
            f' select * from "{schedules.schema}".schedule_occurrences'
        )


async def test_who_waits_for_the_row_past_the_claim_does_not_fire(schedules: ScheduleTable, firing: Firing) -> None:
    """Rows that somebody holds are not waited for at all."""
    await schedules.plant(due=AGO("1 second"))
    token = new_uuid()
    records = await held(firing, token)
    async with schedules.conn.transaction():
        await schedules.conn.execute(f'select from "{schedules.schema}".schedules for update')
        async with asyncio.timeout(10):
            assert await write(firing, records, token) == []
    assert await schedules.jobs() == []


# -- failures -------------------------------------------------------------------------------------------


async def test_a_broken_schedule_does_not_hold_others_up_and_is_paused_at_last(
    schedules: ScheduleTable, firing: Firing
) -> None:
    await schedules.plant_many(20, AGO("1 second"))
    await schedules.update("s-7", kind="'cron'", expression="'61 * * * *'")
    await schedules.update("s-8", timezone="'Mars/Olympus'")
    counts = await fire(firing)
    assert (counts.fired, counts.failed) == (18, 2)
    row = await schedules.row("s-7")
    assert "minute = 61 must be 0 to 59" in row["last_error"]
    assert timedelta(seconds=20) < row["retry_not_before"] - row["now"] <= timedelta(seconds=30)
    assert (row["consecutive_failures"], row["enabled"], row["claim_token"]) == (1, True, None)
    assert (await fire(firing)).claimed == 0
    for strikes in (2, 3):
        await schedules.update("s-7", retry_not_before="null")
        assert (await fire(firing)).failed == 1
        assert (await schedules.row("s-7"))["consecutive_failures"] == strikes
    row = await schedules.row("s-7")
    assert (row["enabled"], row["disabled_by"], row["version"]) == (False, "auto", 2)
    assert [one["action"] for one in await schedules.decisions("s-7")] == ["error", "error", "auto_paused"]
    await schedules.update("s-7", retry_not_before="null")
    assert (await fire(firing)).claimed == 0


async def test_values_that_break_the_statement_fail_one_schedule(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant_many(20, AGO("1 second"))
    await schedules.update("s-7", options='\'{"priority": "high"}\'')
    counts = await fire(firing)
    assert (counts.fired, counts.failed) == (19, 1)
    assert (await schedules.row("s-7"))["consecutive_failures"] == 1


async def test_trouble_of_the_database_strikes_nobody(
    schedules: ScheduleTable, firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    await schedules.plant_many(20, AGO("1 second"))

    async def cancelled(*_: object) -> None:
        raise asyncpg.QueryCanceledError("statement timeout")

    with monkeypatch.context() as patch:
        patch.setattr(firing, "_write", cancelled)
        with pytest.raises(asyncpg.QueryCanceledError):
            await fire(firing)
    # What it had claimed is free at once.
    assert (await fire(firing)).fired == 20
    assert (await schedules.row("s-3"))["consecutive_failures"] == 0


async def test_a_good_fire_forgets_failures(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("1 second"))
    await schedules.update("report", consecutive_failures=2, retry_not_before=AGO("1 second"))
    await fire(firing)
    row = await schedules.row()
    assert (row["consecutive_failures"], row["retry_not_before"]) == (0, None)


# -- bounds and stops -----------------------------------------------------------------------------------


async def test_a_stop_between_two_transactions_gives_the_rest_back(
    schedules: ScheduleTable, firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing_module, "FIRE_SLOTS", 5)
    await schedules.plant_many(20, AGO("1 second"))
    asked = iter([False, False, False, True, True])
    counts, done = await firing.fire_due(lambda: next(asked))
    assert (counts.claimed, counts.fired, done) == (20, 10, True)
    free = f'select count(*) from "{schedules.schema}".schedules where claim_token is null'
    assert await schedules.conn.fetchval(free) == 20
    assert (await fire(firing)).fired == 10


async def test_schedules_far_behind_fire_in_parts(
    schedules: ScheduleTable, firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each decision that counts thousands of slots takes a while; what is decided fires before the next."""
    monkeypatch.setattr(firing_module, "DECIDING_SLICE", 0.0)
    await schedules.plant_many(5, AGO("30 days"), kind="cron", expression="* * * * *")
    sizes = []
    written = firing._write

    async def write(decisions: Any, token: Any) -> Any:
        sizes.append(len(decisions))
        return await written(decisions, token)

    monkeypatch.setattr(firing, "_write", write)
    counts = await fire(firing)
    assert (counts.fired, counts.skipped, sizes) == (5, 5 * 9_999, [1] * 5)
    monkeypatch.setattr(firing_module, "CLAIM_LEASE", -1.0)
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set next_fire_at = {AGO("1 second")}')
    assert await firing.fire_due(never, 0.0) == (FireCounts(claimed=5), False)
    assert (await schedules.row("s-1"))["claim_token"] is None


async def test_more_than_a_batch_is_drained(
    schedules: ScheduleTable, firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing_module, "CLAIM_BATCH", 7)
    await schedules.plant_many(50, AGO("1 second"))
    assert (await fire(firing)).fired == 50
    assert firing.total.fired == 50


async def test_one_round_ends_when_its_time_does(
    schedules: ScheduleTable, firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing_module, "CLAIM_BATCH", 7)
    await schedules.plant_many(50, AGO("1 second"))
    assert await firing.fire_due(never, 0.0) == (FireCounts(claimed=7, fired=7), False)


async def test_two_at_once_share_the_work_and_repeat_none(
    schedules: ScheduleTable, firing: Firing, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing_module, "CLAIM_BATCH", 7)
    await schedules.plant_many(100, AGO("25 minutes"), expression="600", catch_up="fire_all", catch_up_max=2)
    other = Firing(pool, schedules.schema, new_uuid(), statement_timeout=10)

    async def until_none_is_due(one: Firing) -> None:
        while (await one.fire_due(never))[0].claimed:
            pass

    await asyncio.gather(until_none_is_due(firing), until_none_is_due(other))
    assert firing.total.fired > 0
    assert other.total.fired > 0

    async def all_are_fired() -> bool:  # a claim that lapsed on a busy machine is free again when it has expired
        await until_none_is_due(firing)
        return firing.total.fired + other.total.fired == 300

    await eventually(all_are_fired, 120)
    assert await schedules.outcomes() == {"fired": 300}
    assert len(await schedules.jobs()) == 300


async def test_old_decisions_go_with_their_slots(schedules: ScheduleTable, firing: Firing) -> None:
    await schedules.plant(due=AGO("1 second"))
    await schedules.plant("other", due=AGO("1 second"))
    await fire(firing)
    await schedules.conn.execute(
        f"""
        update "{schedules.schema}".schedule_decisions d set decided_at = clock_timestamp() - interval '91 days'
        from "{schedules.schema}".schedules s where s.id = d.schedule_id and s.name = 'report'
        """
    )
    prune = load("retention", schedules.schema).prune_decisions
    assert await schedules.conn.fetchval(prune, 100, 90 * 86400.0) == 2  # it was created, too
    assert (await schedules.slots(), len(await schedules.slots("other"))) == ([], 1)


async def test_how_schedules_fare(schedules: ScheduleTable, firing: Firing) -> None:
    await firing.read_health()
    assert (firing.auto_paused, firing.oldest_due) == (0, 0)
    await schedules.plant("new")
    await schedules.plant("due", due=AGO("1 hour"))
    await schedules.plant("paused", due=AGO("1 day"))
    await schedules.update("paused", enabled="false", disabled_by="'auto'")
    await firing.read_health()
    assert firing.auto_paused == 1
    assert 3600 <= firing.oldest_due < 4000


async def test_when_the_next_one_is_due(schedules: ScheduleTable, firing: Firing) -> None:
    assert await firing.next_due() is None
    await schedules.plant("a", due="clock_timestamp() + interval '1 hour'")
    await schedules.plant("b", due="clock_timestamp() + interval '50 minutes'")
    for name, column in (("claimed", "claim_expires_at"), ("failed", "retry_not_before")):
        await schedules.plant(name, due=AGO("1 second"))
        await schedules.update(name, **{column: "clock_timestamp() + interval '1 hour'"})
    seconds = await firing.next_due()
    assert seconds is not None
    assert 2900 < seconds <= 3000
    await schedules.plant("missed", due=AGO("1 second"))
    seconds = await firing.next_due()
    assert seconds is not None
    assert seconds < -1


async def test_one_that_becomes_due_right_after_a_look_waits_for_no_cadence(
    schedules: ScheduleTable, firing: Firing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskqd.maintenance.firing.CADENCE", 600.0)
    look = firing.fire_due

    async def and_then(stopping: Callable[[], bool]) -> tuple[FireCounts, bool]:
        done = await look(stopping)
        await schedules.plant(due="clock_timestamp()")
        monkeypatch.setattr(firing, "fire_due", look)
        return done

    monkeypatch.setattr(firing, "fire_due", and_then)
    loop = FiringLoop(firing, may_begin=lambda: True, on_failure=lambda *_: None).loop
    loop.start()
    try:
        await eventually(lambda: firing.total.fired == 1, 60)
    finally:
        await loop.stop()
