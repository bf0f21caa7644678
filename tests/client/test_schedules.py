"""Schedules by the client."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import BaseModel

from taskqd import ScheduleDefinitionError, SchemaNotMigratedError, TaskQ, TaskQError, actor


class Report(BaseModel):
    kind: str = "daily"


@actor(name="report")
async def report(payload: Report) -> None: ...


async def test_one_from_its_creation_to_its_end(tq: TaskQ) -> None:
    created = await tq.create_schedule(
        "0 3 * * *", report, name="nightly", timezone="Europe/Berlin", payload=Report(kind="x")
    )
    assert (created.name, created.actor, created.state, created.version) == ("nightly", "report", "active", 1)
    assert created.definition is not None
    assert (created.definition.payload, created.next_fire_at, created.last_error) == ('{"kind": "x"}', None, None)
    await tq.create_schedule(timedelta(minutes=5), report, name="pulse", enabled=False)
    assert [one.name for one in await tq.list_schedules()] == ["nightly", "pulse"]
    assert [one.name for one in await tq.list_schedules(enabled=False)] == ["pulse"]
    assert await tq.list_schedules(actor="other") == []

    changed = await tq.update_schedule("nightly", expression="0 4 * * *", catch_up_window=timedelta(hours=2))
    assert changed.definition is not None
    assert (changed.definition.expression, changed.definition.catch_up_window, changed.version) == (
        "0 4 * * *",
        7200,
        2,
    )
    assert (await tq.update_schedule("nightly", expression="0 4 * * *")).version == 2
    every = await tq.update_schedule("nightly", expression=timedelta(days=14, seconds=7))
    assert every.definition is not None
    assert (every.definition.kind, every.definition.expression) == ("every", "1209607")

    await changed.disable("too loud")
    assert (await tq.get_schedule("nightly")).state == "paused"
    assert await changed.run_now()
    with pytest.raises(TaskQError, match="was run by hand just now"):
        await changed.run_now()
    await changed.enable()
    assert (await tq.get_schedule("nightly")).state == "active"
    await tq.delete_schedule("nightly")
    assert [one.name for one in await tq.list_schedules()] == ["pulse"]
    with pytest.raises(TaskQError, match="retired for good"):
        await tq.update_schedule("nightly", overlap="forbid")
    with pytest.raises(TaskQError, match="exists, or existed"):
        await tq.create_schedule("0 3 * * *", report, name="nightly")


async def test_what_is_refused(tq: TaskQ) -> None:
    with pytest.raises(ScheduleDefinitionError, match="minute = 61 must be 0 to 59"):
        await tq.create_schedule("61 * * * *", report)
    with pytest.raises(ScheduleDefinitionError, match=r"has no option 'nme' \(did you mean 'name'\?\)"):
        await tq.create_schedule("@daily", report, nme="x")  # type: ignore[call-arg]
    await tq.create_schedule("@daily", report)
    with pytest.raises(TaskQError, match=r"no schedule 'reprot' \(did you mean 'report'\?\)"):
        await tq.delete_schedule("reprot")
    with pytest.raises(ScheduleDefinitionError, match=r"changes no 'expresion' \(did you mean 'expression'\?\)"):
        await tq.update_schedule("report", expresion="@hourly")
    with pytest.raises(ScheduleDefinitionError, match="overlap = 'deny' must be allow or forbid"):
        await tq.update_schedule("report", overlap="deny")
    assert (await tq.get_schedule("report")).version == 1


async def test_a_schema_that_is_not_migrated(dsn: str) -> None:
    async with TaskQ(dsn=dsn, schema="nothing_here") as tq:
        with pytest.raises(SchemaNotMigratedError):
            await tq.list_schedules()
        with pytest.raises(SchemaNotMigratedError):
            await tq.create_schedule("@daily", report)
