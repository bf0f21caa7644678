"""``cron`` and ``every`` on actors."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from taskqd import ActorRef, RegistryError, ScheduleDefinitionError, actor, cron, every
from taskqd.actors.schedules import declared_schedules


class Report(BaseModel):
    kind: str = "daily"
    size: int = 1


class Strict(BaseModel):
    number: int


def make() -> Report:
    return Report()


def make_for(slot: datetime) -> Report:
    return Report(kind=str(slot))


def make_of(a: int, b: int) -> Report:
    return Report(size=a + b)


def an_actor(name: str = "report", **options: Any) -> ActorRef[Any, Any]:
    @actor(name=name, **options)
    async def report(payload: Report) -> None: ...

    return report


def test_a_decorator_and_a_call_declare_the_same() -> None:
    decorated = cron("0 3 * * *", timezone="Europe/Berlin")(an_actor())
    called = an_actor()
    assert cron("0 3 * * *", called, timezone="Europe/Berlin") is called
    assert decorated.schedules == called.schedules
    (declared,) = decorated.schedules
    definition = declared.definition
    assert (definition.name, definition.actor, definition.kind, definition.expression) == (
        "report",
        "report",
        "cron",
        "0 3 * * *",
    )
    assert json.loads(definition.payload or "") == {"kind": "daily", "size": 1}
    assert (definition.catch_up, definition.catch_up_window, definition.overlap) == ("fire_once", 3600.0, "allow")
    assert definition.options == {}


def test_where_all_are_to_fire_none_is_too_late() -> None:
    ref = cron("@daily", catch_up="fire_all")(an_actor())
    cron("@daily", ref, name="near", catch_up="fire_all", catch_up_window=timedelta(hours=2))
    assert [one.definition.catch_up_window for one in ref.schedules] == [None, 7200.0]


def test_intervals() -> None:
    ref = an_actor()
    every(timedelta(minutes=5), ref)
    every(1.5, ref, name="fast")
    assert [one.definition.expression for one in ref.schedules] == ["300", "1.5"]


def test_options_and_what_the_actor_declares_itself() -> None:
    ref = an_actor(singleton=True)
    cron(
        "@daily",
        ref,
        payload={"kind": "full"},
        tags=["nightly"],
        priority=3,
        queue="q",
        start_to_close=timedelta(minutes=5),
        catch_up_window=None,
        smear=timedelta(seconds=30),
        enabled=False,
    )
    (declared,) = ref.schedules
    assert declared.definition.options == {
        "queue": "q",
        "priority": 3,
        "tags": ["nightly"],
        "start_to_close": 300.0,
        "singleton": True,
    }
    assert (declared.definition.catch_up_window, declared.definition.smear, declared.definition.enabled) == (
        None,
        30.0,
        False,
    )


def test_a_payload_factory_goes_by_its_name() -> None:
    ref = cron("@daily", payload_factory=make)(an_actor())
    (declared,) = ref.schedules
    assert declared.factory is make
    assert declared.definition.payload_factory == f"{__name__}:make"
    assert declared.definition.payload is None
    cron("@hourly", ref, name="hourly", payload_factory=make_for)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"payload": {"size": "many"}}, "schedule 'report': payload of actor 'report' is invalid: size"),
        ({"payload": {}, "payload_factory": make}, "payload and payload_factory exclude each other"),
        ({"payload_factory": lambda: Report()}, "must be a named function of a module"),
        ({"payload_factory": make_of}, "payload_factory make_of must take nothing, or the slot it is for"),
        ({"timezone": "Europe/Berlim"}, "(did you mean 'Europe/Berlin'?)"),
        ({"dst_strategy": "once"}, "must be skip, firstof or allof"),
        ({"time_zone": "UTC"}, "cron() has no option 'time_zone' (did you mean 'timezone'?)"),
        (
            {"catch_up": "fire_al"},
            "catch_up = 'fire_al' must be fire_once or fire_all or skip (did you mean 'fire_all'?)",
        ),
        ({"catch_up_max": 0}, "catch_up_max = 0 must be a whole number from 1 to 1000"),
        ({"catch_up_window": 3600}, "catch_up_window = 3600 must be a timedelta"),
        ({"smear": timedelta(hours=2)}, "smear = 7200.0 must be 1 to 3600 seconds"),
        ({"overlap": "deny"}, "overlap = 'deny' must be allow or forbid"),
        ({"priority": 99_999}, "priority = 99999 must be a whole number from -32768 to 32767"),
        ({"queue": "a:b"}, "queue = 'a:b' must be 1 to 200 letters"),
        ({"tags": ["a b"]}, "tags = ['a b'] must be 1 to 50 words"),
        ({"max_attempts": 0}, "max_attempts = 0 must be"),
        ({"metadata": {"taskq_schedule": 1}}, "without the key 'taskq_schedule'"),
        ({"name": ""}, "name = '' must be text of 1 to 200 bytes"),
        ({"name": "ü" * 101}, "must be text of 1 to 200 bytes"),
    ],
)
def test_a_bad_declaration_is_told_at_import(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleDefinitionError) as caught:
        cron("@daily", an_actor(), **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_payload_is_needed_where_the_model_has_no_default() -> None:
    @actor(name="strict")
    async def strict(payload: Strict) -> None: ...

    with pytest.raises(
        ScheduleDefinitionError, match="schedule 'strict': payload of actor 'strict' is invalid: number"
    ):
        cron("@daily", strict)


def test_it_goes_above_the_actor() -> None:
    with pytest.raises(ScheduleDefinitionError, match="write it above @actor"):
        cron("@daily")(make)  # type: ignore[type-var]


def test_intervals_are_bounded() -> None:
    with pytest.raises(
        ScheduleDefinitionError, match=r"interval = 0.1 must be a timedelta or seconds, 1 s to 365 days"
    ):
        every(0.1, an_actor())
    with pytest.raises(ScheduleDefinitionError, match="must be a timedelta or seconds"):
        every("5m", an_actor())  # type: ignore[arg-type]


def test_names_are_unique() -> None:
    ref = cron("@daily", an_actor())
    with pytest.raises(ScheduleDefinitionError, match="two schedules are named 'report'"):
        cron("@hourly", ref)
    other = cron("@hourly", an_actor("other"), name="report")
    with pytest.raises(RegistryError, match="two schedules are named 'report'"):
        declared_schedules([ref, other])
