"""Schedules from code that runs: what ``taskqd schedule`` does, for services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Unpack

from taskqd.actors.actor import ActorRef
from taskqd.actors.schedules import ScheduleOptions, declare_schedule, interval_text
from taskqd.client.unmigrated import explain_unmigrated
from taskqd.domain.arguments import check_flag, check_reason, check_text
from taskqd.domain.errors import ScheduleChangedError, ScheduleDefinitionError, TaskQError
from taskqd.domain.names import nearest
from taskqd.domain.recurrence import DstStrategy
from taskqd.domain.schedule import Schedule
from taskqd.storage.schedules import (
    StoredSchedule,
    change_schedule,
    create_schedule,
    read_schedules,
    run_now,
    steer_schedule,
)

CHANGEABLE = (
    "expression",
    "timezone",
    "dst_strategy",
    "catch_up",
    "catch_up_max",
    "catch_up_window",
    "overlap",
    "smear",
    "identity_key",
)
"""What :meth:`ScheduleCalls.update_schedule` changes."""
RACES = 3
"""How often somebody may change a schedule between our look at it and our change before we give up."""


class ScheduleHandle:
    """A schedule, as it was read."""

    def __init__(self, stored: StoredSchedule, calls: ScheduleCalls) -> None:
        self._stored = stored
        self._calls = calls

    def __repr__(self) -> str:
        return f"ScheduleHandle({self.name!r}, {self.state})"

    @property
    def name(self) -> str:
        """Its name."""
        return self._stored.name

    @property
    def actor(self) -> str:
        """The name of the actor that it runs."""
        return self._stored.actor

    @property
    def state(self) -> str:
        """``active``, ``paused``, ``auto-paused`` or ``retired``."""
        return self._stored.state

    @property
    def definition(self) -> Schedule | None:
        """What it is; None where what is stored is no schedule."""
        return self._stored.definition

    @property
    def version(self) -> int:
        """Raised by each change."""
        return self._stored.version

    @property
    def next_fire_at(self) -> datetime | None:
        """Its next slot; None until a scheduler has found it."""
        return self._stored.next_fire_at

    @property
    def last_error(self) -> str | None:
        """Why it, or the payload of its job, failed last."""
        return self._stored.last_error

    async def enable(self) -> None:
        """Let it fire again, from its next slot on; its failures are forgotten."""
        await self._calls._steer(self.name, "resumed")

    async def disable(self, reason: str | None = None) -> None:
        """Let it fire no more until it is enabled."""
        await self._calls._steer(self.name, "paused", reason)

    async def delete(self) -> None:
        """See :meth:`ScheduleCalls.delete_schedule`."""
        await self._calls.delete_schedule(self.name)

    async def run_now(self) -> bool:
        """Fire it once, now; False when another job kept its own out. Raises ``TaskQError`` within ten seconds of the
        last time."""
        return await self._calls._run_now(self.name)


class ScheduleCalls:
    """What a :class:`TaskQ` can do with schedules."""

    schema: str
    _pool: Any

    async def create_schedule(
        self,
        when: str | timedelta,
        actor: ActorRef[Any, Any],
        *,
        timezone: str = "UTC",
        dst_strategy: DstStrategy = "skip",
        **options: Unpack[ScheduleOptions],
    ) -> ScheduleHandle:
        """Create a schedule: ``when`` is a cron expression, or an interval. The options are those of :func:`cron`.

        Raises ``ScheduleDefinitionError`` for what is no schedule, ``TaskQError`` where its name is taken.
        """
        zone = {"timezone": timezone, "dst_strategy": dst_strategy}
        wanted = declare_schedule(actor, when, zone, options).definition
        with explain_unmigrated(self.schema):
            if not await create_schedule(self._pool, self.schema, wanted, "api"):
                raise TaskQError(f"a schedule {wanted.name!r} exists, or existed; use update_schedule, or another name")
        return await self.get_schedule(wanted.name)

    async def get_schedule(self, name: str) -> ScheduleHandle:
        """Return a schedule. Raises ``TaskQError`` where there is none of this name."""
        return ScheduleHandle(await self._stored(name), self)

    async def list_schedules(
        self, *, actor: str | None = None, enabled: bool | None = None
    ) -> Sequence[ScheduleHandle]:
        """Return the schedules that are not retired, by name: of one actor, enabled or not."""
        check_text("actor", actor, optional=True)
        if enabled is not None:
            check_flag("enabled", enabled)
        with explain_unmigrated(self.schema):
            found = await read_schedules(self._pool, self.schema)
        return [
            ScheduleHandle(one, self)
            for one in found
            if one.retired_at is None and actor in (None, one.actor) and enabled in (None, one.enabled)
        ]

    async def update_schedule(self, name: str, **changes: Any) -> ScheduleHandle:
        """Change a schedule, wherever it comes from: ``expression`` (a cron expression, or an interval), ``timezone``,
        ``dst_strategy``, ``catch_up``, ``catch_up_max``, ``catch_up_window``, ``overlap``, ``smear``, ``identity_key``.

        Durations are ``timedelta``. A changed recurrence begins now. Raises ``ScheduleDefinitionError`` for what would
        be no schedule, ``TaskQError`` where there is none of this name, ``ScheduleChangedError`` where others change it
        all the time.
        """
        check_text("name", name)
        for key in changes:
            if key not in CHANGEABLE:
                known = ", ".join(CHANGEABLE)
                raise ScheduleDefinitionError(
                    f"update_schedule() changes no {key!r}{nearest(key, CHANGEABLE)}; it changes {known}"
                )
        values: dict[str, Any] = {
            key: value.total_seconds() if isinstance(value, timedelta) else value for key, value in changes.items()
        }
        if "expression" in changes:
            interval = isinstance(changes["expression"], timedelta)
            values["kind"] = "every" if interval else "cron"
            values["expression"] = interval_text(changes["expression"]) if interval else changes["expression"]
        for _ in range(RACES):
            stored = await self._stored(name)
            if stored.retired_at is not None:
                raise TaskQError(f"schedule {name!r} is retired for good")
            if stored.definition is None:
                raise ScheduleDefinitionError(stored.problem)
            wanted = replace(stored.definition, **values)
            if wanted == stored.definition or await change_schedule(
                self._pool, self.schema, stored, wanted, stored.source, f"changed {', '.join(changes)}"
            ):
                return await self.get_schedule(name)
        raise ScheduleChangedError(f"schedule {name!r} is changed by others all the time")

    async def delete_schedule(self, name: str) -> None:
        """End a schedule for good; what it fired stays, and its name is not given again."""
        await self._steer(name, "retired")

    async def _steer(self, name: str, steering: Any, reason: str | None = None) -> None:
        check_reason(reason)
        await self._stored(name)
        await steer_schedule(self._pool, self.schema, name, steering, None, reason)

    async def _run_now(self, name: str) -> bool:
        async with self._pool.acquire() as connection:
            return await run_now(connection, self.schema, name) == "fired"

    async def _stored(self, name: str) -> StoredSchedule:
        check_text("name", name)
        with explain_unmigrated(self.schema):
            for one in await read_schedules(self._pool, self.schema, name):
                return one
            known = [one.name for one in await read_schedules(self._pool, self.schema)]
        raise TaskQError(f"no schedule {name!r}{nearest(name, known)}")
