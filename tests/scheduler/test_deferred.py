"""Schedules that code declares: created at a worker's boot, and their payloads made when their jobs first run."""

from __future__ import annotations

import json
from datetime import timedelta

from tests.fleet import Fleet, events
from tests.jobs import JobTable
from tests.scheduler.schedules import ScheduleTable
from tests.support import eventually

ACTORS = "tests.apps.scheduled:actors"
NOW = "date_trunc('milliseconds', clock_timestamp())"


async def test_a_worker_creates_what_its_actors_declare_and_changes_nothing(
    fleet: Fleet, schedules: ScheduleTable
) -> None:
    first = fleet.worker(actors=ACTORS)
    stored = await schedules.stored("nightly")
    assert stored.definition is not None
    assert (stored.source, stored.definition.expression, stored.definition.timezone) == (
        "decorator",
        "0 3 * * *",
        "Europe/Berlin",
    )
    assert list(events(first, "schedule-differs")) == []
    await schedules.update("nightly", expression="'0 4 * * *'", version="7")
    second = fleet.worker(actors=ACTORS)
    (told,) = events(second, "schedule-differs")
    assert (told["schedule"], told["differs"]) == ("nightly", ["expression"])
    assert (await schedules.row("nightly"))["version"] == 7


async def test_payloads_are_made_when_their_jobs_run(fleet: Fleet, schedules: ScheduleTable, jobs: JobTable) -> None:
    fleet.worker(actors=ACTORS)
    await schedules.update("made", next_fire_at=NOW)
    await schedules.update("later", next_fire_at=NOW)
    fleet.scheduler()

    async def both_ended() -> bool:
        return await jobs.counts() == {"succeeded": 2}

    await eventually(both_ended, 30)
    made = {job["meta"]["taskq_schedule"]["name"]: job for job in await schedules.jobs()}
    slot = made["made"]["scheduled_at"].isoformat()
    assert json.loads(made["made"]["payload"]) == {"key": "made", "slot": slot}
    assert json.loads(made["made"]["result"]) == slot
    assert json.loads(made["later"]["payload"]) == {"key": "later", "slot": ""}
    assert {job["payload_state"] for job in made.values()} == {"stored"}


async def test_factories_that_fail_fail_their_jobs_and_pause_their_schedules_and_nothing_else_is_late(
    fleet: Fleet, schedules: ScheduleTable, jobs: JobTable
) -> None:
    await schedules.plant_many(1000, "clock_timestamp() + interval '1 hour'", actor="elsewhere")
    fleet.worker(actors=ACTORS)
    for name in ("raises", "hangs", "nonsense"):
        await schedules.update(
            name,
            next_fire_at="clock_timestamp() - interval '2 hours 1 second'",
            catch_up="'fire_all'",
            catch_up_window="null",
        )
    fleet.scheduler()
    due = await schedules.conn.fetchval("select clock_timestamp()")
    await schedules.conn.execute(
        f"update \"{schedules.schema}\".schedules set next_fire_at = $1 where name like 's-%'", due
    )

    async def all_paused() -> bool:
        rows = [await schedules.row(name) for name in ("raises", "hangs", "nonsense")]
        return all(row["disabled_by"] == "auto" for row in rows)

    await eventually(all_paused, 60)
    for name, said in (
        ("raises", "RuntimeError: no such tenant"),
        ("hangs", "took longer than 5 s"),
        ("nonsense", "payload of actor 'report' is invalid"),
    ):
        row = await schedules.row(name)
        assert said in row["last_error"]
        assert (row["enabled"], row["consecutive_failures"]) == (False, 3)

    async def all_failed() -> bool:
        return (await jobs.counts()).get("failed") == 9

    await eventually(all_failed, 30)
    failed = [job for job in await schedules.jobs() if job["status"] == "failed"]
    assert {(job["error_class"], job["attempt"]) for job in failed} == {("PayloadFactoryError", 1)}
    healthy = [job for job in await schedules.jobs() if job["actor"] == "elsewhere"]
    assert len(healthy) == 1000
    assert max(job["created_at"] for job in healthy) - due < timedelta(seconds=10)
    assert (await schedules.row("s-7"))["consecutive_failures"] == 0


async def test_a_payload_is_made_once(fleet: Fleet, schedules: ScheduleTable, jobs: JobTable) -> None:
    """The second attempt runs with what the first one stored."""
    fleet.worker(actors=ACTORS)
    stored = '\'{"key": "mine"}\''
    (job,) = await jobs.plant(actor="'report'", payload=stored, metadata="'{\"taskq_schedule\": {}}'")

    async def ended() -> bool:
        return bool((await jobs.row(job))["status"] == "succeeded")

    await eventually(ended, 20)
    assert [one.key for one in fleet.executions()] == ["mine"]


async def test_null_that_somebody_enqueued_is_no_payload_to_be_made(fleet: Fleet, jobs: JobTable) -> None:
    fleet.worker(actors=ACTORS)
    (job,) = await jobs.plant(actor="'report'", payload="'null'")

    async def failed() -> bool:
        return bool((await jobs.row(job))["error_class"] == "PayloadValidationError")

    await eventually(failed, 20)
