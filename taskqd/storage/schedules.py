"""Schedules as they are stored: read, created, changed, steered and fired by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from taskqd.domain.errors import ScheduleChangedError, ScheduleDefinitionError, TaskQError
from taskqd.domain.ids import new_uuid
from taskqd.domain.schedule import RECURRENCE, Schedule, differences
from taskqd.storage.statements import load

RUN_NOW_COOLDOWN = 10.0
"""Seconds between two runs by hand of one schedule."""
Steering = Literal["paused", "resumed", "retired"]


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """A row. ``definition`` None: what is stored is no schedule, and ``problem`` says why."""

    id: UUID
    name: str
    source: str
    version: int
    definition: Schedule | None
    problem: str
    expression: str
    timezone: str
    actor: str
    enabled: bool
    disabled_by: str | None
    retired_at: datetime | None
    next_fire_at: datetime | None
    last_fired_at: datetime | None
    last_job_id: UUID | None
    last_error: str | None
    failures: int
    now: datetime

    @property
    def state(self) -> str:
        """``active``, ``paused``, ``auto-paused`` or ``retired``."""
        if self.retired_at is not None:
            return "retired"
        if self.enabled:
            return "active"
        return "auto-paused" if self.disabled_by == "auto" else "paused"


async def read_schedules(connection: Any, schema: str, name: str | None = None) -> list[StoredSchedule]:
    """Return the schedules by name, retired ones too."""
    return [_stored(record) for record in await connection.fetch(load("schedules", schema).read, name)]


async def known_actors(connection: Any, schema: str) -> list[str]:
    """Return the names of the actors that workers have made known."""
    return [record["actor"] for record in await connection.fetch(load("schedules", schema).actors)]


async def create_schedule(connection: Any, schema: str, wanted: Schedule, source: str) -> bool:
    """Store a schedule unless one has its name; return whether it was stored."""
    created: bool = await connection.fetchval(
        load("schedules", schema).create, new_uuid(), wanted.name, source, *_columns(wanted), wanted.enabled
    )
    return created


async def change_schedule(
    connection: Any, schema: str, stored: StoredSchedule, wanted: Schedule, source: str, why: str
) -> bool:
    """Replace the definition of ``stored``, unless it was changed since it was read; return whether it was replaced."""
    changes = RECURRENCE if stored.definition is None else differences(stored.definition, wanted)
    changed: bool = await connection.fetchval(
        load("schedules", schema).change,
        stored.id,
        stored.version,
        source,
        *_columns(wanted),
        any(name in changes for name in RECURRENCE),
        why,
    )
    return changed


async def register_schedules(connection: Any, schema: str, declared: Sequence[Schedule]) -> dict[str, list[str]]:
    """Store the schedules that code declares and nobody has stored; those that exist stay as they are.

    Returns those that are stored differently, each with what differs.
    """
    differing = {}
    for wanted in declared:
        if await create_schedule(connection, schema, wanted, "decorator"):
            continue
        for stored in await read_schedules(connection, schema, wanted.name):
            if stored.retired_at is not None:
                differing[wanted.name] = ["retired"]
            elif stored.definition is None:
                differing[wanted.name] = ["definition"]
            elif found := differences(stored.definition, wanted):
                differing[wanted.name] = sorted(found)
    return differing


async def steer_schedule(
    connection: Any, schema: str, name: str, steering: Steering, version: int | None, reason: str | None
) -> bool:
    """Pause, resume or retire a schedule that has ``version``, None: whichever; return whether that changed it."""
    changed: bool = await connection.fetchval(load("schedules", schema).steer, name, version, steering, reason)
    return changed


async def run_now(connection: Any, schema: str, name: str) -> str:
    """Fire a schedule by hand, paused or not, beside its slots. Returns ``fired`` or ``suppressed``.

    Raises ``TaskQError`` where there is none of this name, or it was run less than ten seconds ago.
    """
    async with connection.transaction():
        record = await connection.fetchrow(load("schedules", schema).begin_run_now, name, RUN_NOW_COOLDOWN)
        if record is None:
            raise TaskQError(f"no schedule {name!r} that is not retired")
        if record["wait"] is not None and record["wait"] > 0:
            raise TaskQError(f"schedule {name!r} was run by hand just now; wait {record['wait']:.1f} s")
        fired, _ = await fire_slots(connection, schema, record["id"], record["version"], [record["at"]], "run_now")
    return "fired" if fired else "suppressed"


async def fire_slots(
    connection: Any, schema: str, schedule_id: UUID, version: int, slots: Sequence[datetime], action: str
) -> tuple[int, int]:
    """Fire slots by hand, but those that were decided already; return how many made a job, and how many were kept out.

    Raises ``ScheduleChangedError`` where the schedule was changed meanwhile, or a scheduler fires it right now.
    """
    decision = new_uuid()
    async with connection.transaction():
        await connection.execute(load("scheduler", schema).prepare_fire)
        await connection.execute(load("scheduler", schema).guard, [schedule_id])
        record = await connection.fetchrow(
            load("scheduler", schema).fire,
            [schedule_id],
            [decision],
            [action],
            [version],
            [None],
            [0],
            None,
            await connection.fetchval("select clock_timestamp()"),
            [decision] * len(slots),
            list(slots),
            [new_uuid() for _ in slots],
            None,
        )
    if record is None:
        raise ScheduleChangedError("the schedule is being fired or was changed just now; try again")
    return record["fired"], record["suppressed"]


async def decisions_on(connection: Any, schema: str, schedule_id: UUID, limit: int) -> list[dict[str, Any]]:
    """Return what was decided on a schedule, the latest first."""
    records = await connection.fetch(load("schedules", schema).decided, schedule_id, limit)
    return [dict(record) for record in records]


def _columns(wanted: Schedule) -> tuple[Any, ...]:
    return (
        wanted.actor,
        wanted.kind,
        wanted.expression,
        wanted.timezone,
        wanted.dst_strategy,
        wanted.catch_up,
        wanted.catch_up_max,
        wanted.catch_up_window,
        wanted.overlap,
        wanted.smear,
        wanted.payload,
        wanted.payload_factory,
        json.dumps(dict(wanted.options)),
        wanted.identity_key,
    )


def _stored(record: Any) -> StoredSchedule:
    definition, problem = None, ""
    try:
        definition = Schedule(
            name=record["name"],
            actor=record["actor"],
            kind=record["kind"],
            expression=record["expression"],
            timezone=record["timezone"],
            dst_strategy=record["dst_strategy"],
            catch_up=record["catch_up"],
            catch_up_max=record["catch_up_max"],
            catch_up_window=record["catch_up_window"],
            overlap=record["overlap"],
            smear=record["smear"],
            payload=record["payload"],
            payload_factory=record["payload_factory"],
            options=json.loads(record["options"]),
            identity_key=record["identity_key"],
            enabled=record["enabled"],
        )
    except ScheduleDefinitionError as error:
        problem = str(error)
    return StoredSchedule(
        id=record["id"],
        name=record["name"],
        source=record["source"],
        version=record["version"],
        definition=definition,
        problem=problem,
        expression=record["expression"],
        timezone=record["timezone"],
        actor=record["actor"],
        enabled=record["enabled"],
        disabled_by=record["disabled_by"],
        retired_at=record["retired_at"],
        next_fire_at=record["next_fire_at"],
        last_fired_at=record["last_fired_at"],
        last_job_id=record["last_job_id"],
        last_error=record["last_error"],
        failures=record["consecutive_failures"],
        now=record["now"],
    )
