"""Plants and reads schedules in tests."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.domain.schedule import Schedule
from taskqd.maintenance.firing import FireCounts, Firing
from taskqd.storage.schedules import StoredSchedule, create_schedule, read_schedules


def never() -> bool:
    """Not stopping."""
    return False


class ScheduleTable:
    """The schedules of one schema, through one connection."""

    def __init__(self, conn: asyncpg.Connection, schema: str) -> None:
        self.conn = conn
        self.schema = schema

    async def plant(self, name: str = "report", due: str | None = None, **columns: Any) -> UUID:
        """Create a schedule of the actor ``succeed``, each minute unless told otherwise.

        ``due`` is the SQL expression of its next slot; None leaves it to the scheduler.
        """
        values = {"actor": "succeed", "kind": "every", "expression": "60", **columns}
        assert await create_schedule(self.conn, self.schema, Schedule(name=name, **values), "api")
        (stored,) = await read_schedules(self.conn, self.schema, name)
        if due is not None:
            await self.update(name, next_fire_at=due)
        return stored.id

    async def plant_many(self, count: int, due: str, **columns: Any) -> None:
        """Create schedules named like ``s-1`` that are due at once."""
        await self.plant("s-0", **columns)
        await self.conn.execute(
            f"""
            insert into "{self.schema}".schedules (id, name, source, actor, kind, expression, catch_up, catch_up_max,
                catch_up_window, overlap, payload_factory)
            select gen_random_uuid(), 's-' || n, source, actor, kind, expression, catch_up, catch_up_max,
                catch_up_window, overlap, payload_factory
            from "{self.schema}".schedules, generate_series(1, $1 - 1) n where name = 's-0'
            """,
            count,
        )
        await self.conn.execute(f'update "{self.schema}".schedules set next_fire_at = {due}')

    async def update(self, name: str, /, **columns: Any) -> None:
        """Set columns of a schedule to SQL expressions."""
        setting = ", ".join(f"{column} = {value}" for column, value in columns.items())
        await self.conn.execute(f'update "{self.schema}".schedules set {setting} where name = $1', name)

    async def stored(self, name: str = "report") -> StoredSchedule:
        """Return a schedule."""
        (found,) = await read_schedules(self.conn, self.schema, name)
        return found

    async def row(self, name: str = "report") -> asyncpg.Record:
        """Return the whole row, and ``now``, the database's time."""
        record = await self.conn.fetchrow(
            f'select *, clock_timestamp() as now from "{self.schema}".schedules where name = $1', name
        )
        assert record is not None
        return record

    async def jobs(self) -> list[asyncpg.Record]:
        """Return the jobs, oldest slot first, their metadata parsed as ``meta``."""
        records = await self.conn.fetch(f'select * from "{self.schema}".jobs order by scheduled_at, id')
        return [dict(record) | {"meta": json.loads(record["metadata"] or "{}")} for record in records]

    async def outcomes(self) -> dict[str, int]:
        """Return how many slots there are of each outcome."""
        records = await self.conn.fetch(f'select outcome from "{self.schema}".schedule_occurrences')
        return dict(Counter(record["outcome"] for record in records))

    async def decisions(self, name: str = "report") -> list[asyncpg.Record]:
        """Return the decisions on a schedule, oldest first."""
        return await self.conn.fetch(
            f"""
            select d.* from "{self.schema}".schedule_decisions d
            join "{self.schema}".schedules s on s.id = d.schedule_id
            where s.name = $1 and d.action <> 'created' order by d.decided_at
            """,
            name,
        )

    async def slots(self, name: str = "report") -> list[datetime]:
        """Return the slots that were decided, oldest first."""
        records = await self.conn.fetch(
            f"""
            select o.due_at from "{self.schema}".schedule_occurrences o
            join "{self.schema}".schedules s on s.id = o.schedule_id where s.name = $1 order by 1
            """,
            name,
        )
        return [record["due_at"] for record in records]


async def fire(firing: Firing) -> FireCounts:
    """Fire everything that is due."""
    counts, done = await firing.fire_due(never)
    assert done
    return counts
