"""Plants and reads rows of the jobs table in tests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg

from taskqd.domain.ids import new_uuid
from taskqd.storage.schema_name import wake_channel
from taskqd.storage.statements import load
from taskqd.worker.floors import BEGINNING
from taskqd.worker.lane_claims import NO_CLAIM

LEASE = 60.0


class JobTable:
    """The jobs of one schema, through one connection."""

    def __init__(self, conn: asyncpg.Connection, schema: str) -> None:
        self.conn = conn
        self.schema = schema
        self.worker_sql = load("worker", schema)
        self.scheduler_sql = load("scheduler", schema)

    async def plant(self, count: int = 1, **columns: Any) -> list[UUID]:
        """Insert pending jobs of the actor ``succeed``; ``columns`` are SQL expressions that replace the defaults."""
        values = {
            "queue": "'default'",
            "route": "'default'",
            "actor": "'succeed'",
            "payload": "'{}'",
            "retry_base": "0",
            **columns,
        }
        ids = sorted(new_uuid() for _ in range(count))
        names, expressions = ", ".join(values), ", ".join(str(value) for value in values.values())
        await self.conn.execute(
            f'insert into "{self.schema}".jobs (id, {names}) select id, {expressions} from unnest($1::uuid[]) id', ids
        )
        return ids

    async def claim(
        self,
        worker: UUID,
        count: int = 1,
        *,
        routes: tuple[str, ...] = ("default",),
        known: tuple[str, ...] = ("succeed",),
        lease: float = LEASE,
        conn: asyncpg.Connection | None = None,
    ) -> list[asyncpg.Record]:
        """Claim through the statement that workers send, priority 0 from the beginning."""
        return await (conn or self.conn).fetch(
            self.worker_sql.claim,
            count,
            worker,
            list(routes),
            [0] * len(routes),
            [BEGINNING[0]] * len(routes),
            [BEGINNING[1]] * len(routes),
            list(known),
            lease,
        )

    async def claim_lanes(
        self,
        worker: UUID,
        room: int,
        *units: dict[str, Any],
        known: tuple[str, ...] = ("succeed",),
        conn: asyncpg.Connection | None = None,
    ) -> tuple[list[asyncpg.Record], list[tuple[str, str | None]]]:
        """Claim from lanes; return the jobs, and for each unit its note and where its walk stopped."""
        records = await (conn or self.conn).fetch(
            self.worker_sql.claim_lanes, room, worker, LEASE, list(known), _asked(units)
        )
        return _claimed(records)

    async def relay(
        self,
        attempt: tuple[UUID, int],
        worker: UUID,
        room: int,
        *units: dict[str, Any],
        known: tuple[str, ...] = ("succeed",),
        conn: asyncpg.Connection | None = None,
    ) -> tuple[bool, list[asyncpg.Record], list[tuple[str, str | None]]]:
        """Settle one attempt as a success and claim from lanes in the same statement; return whether that applied, and
        what :meth:`claim_lanes` returns."""
        job, epoch = attempt
        claim = (room, worker, LEASE, list(known), _asked(units))
        records = await (conn or self.conn).fetch(
            self.worker_sql.settle_succeeded, [job], [epoch], [0.1], [None], *claim
        )
        return records[0]["ids"] == [job], *_claimed([record for record in records if record["unit"] is not None])

    async def succeed(
        self, *ids: UUID, epoch: int = 1, result: str | None = None, conn: asyncpg.Connection | None = None
    ) -> list[UUID] | None:
        """Settle attempts as successes by the statement that workers send; return those that it applied to."""
        count = len(ids)
        applied: list[UUID] | None = await (conn or self.conn).fetchval(
            self.worker_sql.settle_succeeded, ids, [epoch] * count, [0.1] * count, [result] * count, *NO_CLAIM
        )
        return applied

    async def store_actor(self, name: str = "succeed", **columns: Any) -> None:
        """Make an actor known; ``columns`` are SQL expressions that replace the defaults."""
        values = {
            "actor": f"'{name}'",
            "queue": "'default'",
            "max_attempts": "3",
            "retry_kind": "'transient'",
            "retry_backoff": "'fixed'",
            "retry_base": "0",
            "retry_cap": "0",
            "retry_jitter": "0",
            **columns,
        }
        names, expressions = ", ".join(values), ", ".join(str(value) for value in values.values())
        await self.conn.execute(f'insert into "{self.schema}".actor_config ({names}) values ({expressions})')

    async def held(self) -> dict[str, int]:
        """Return how many jobs each gate counts."""
        records = await self.conn.fetch(f'select bucket, held from "{self.schema}".gates order by bucket')
        return {record["bucket"]: record["held"] for record in records}

    async def gate(self, bucket: str, cap: int) -> None:
        """Set a gate."""
        await self.conn.execute(f'select "{self.schema}".set_gate($1, $2)', bucket, cap)

    async def running(self, worker: UUID, count: int = 1, *, lease: float = LEASE, **columns: Any) -> list[UUID]:
        """Plant jobs and claim them: epoch 1, attempt 1."""
        ids = await self.plant(count, **columns)
        claimed = {record["id"] for record in await self.claim(worker, count, lease=lease)}
        assert claimed == set(ids), "other pending jobs were claimed"
        return ids

    async def register(self, worker: UUID | None = None, **columns: Any) -> UUID:
        """Insert a row of a worker and return its id; ``columns`` are SQL expressions."""
        worker = worker or new_uuid()
        await self.conn.execute(
            self.worker_sql.register_worker, worker, "host", 1, ["default"], 4, None, None, "default"
        )
        for name, value in columns.items():
            await self.conn.execute(f'update "{self.schema}".workers set {name} = {value} where id = $1', worker)
        return worker

    async def update(self, ids: list[UUID], **columns: Any) -> None:
        """Set columns of jobs to SQL expressions."""
        setting = ", ".join(f"{name} = {value}" for name, value in columns.items())
        await self.conn.execute(f'update "{self.schema}".jobs set {setting} where id = any($1)', ids)

    async def row(self, job_id: UUID) -> asyncpg.Record:
        """Return the whole row, and ``now``, the database's time."""
        record = await self.conn.fetchrow(
            f'select *, clock_timestamp() as now from "{self.schema}".jobs where id = $1', job_id
        )
        assert record is not None
        return record

    async def image(self) -> tuple[str, str]:
        """Return everything that jobs and attempts hold, for comparing before with after."""
        select = "select coalesce(jsonb_agg(to_jsonb(t) order by {key})::text, '') from \"{schema}\".{table} t"
        jobs = await self.conn.fetchval(select.format(schema=self.schema, table="jobs", key="id"))
        attempts = await self.conn.fetchval(
            select.format(schema=self.schema, table="job_attempts", key="job_id, epoch")
        )
        return jobs, attempts

    async def attempts(self, job_id: UUID) -> list[asyncpg.Record]:
        """Return the stored attempts of a job, oldest first."""
        return await self.conn.fetch(
            f'select * from "{self.schema}".job_attempts where job_id = $1 order by epoch', job_id
        )

    async def events(self, job_id: UUID) -> list[dict[str, Any]]:
        """Return the details of a job's events, oldest first."""
        records = await self.conn.fetch(
            f'select detail from "{self.schema}".job_events where job_id = $1 order by id', job_id
        )
        return [json.loads(record["detail"]) for record in records]

    @asynccontextmanager
    async def listening(self, dsn: str) -> AsyncIterator[list[str]]:
        """Yield a list that grows with every wake-up of the schema."""
        heard: list[str] = []
        listener = await asyncpg.connect(dsn, timeout=30)
        try:
            await listener.add_listener(wake_channel(self.schema), lambda *arguments: heard.append(arguments[2]))
            yield heard
        finally:
            await listener.close(timeout=10)

    async def counts(self) -> dict[str, int]:
        """Return how many jobs are in each status."""
        records = await self.conn.fetch(f'select status::text, count(*) from "{self.schema}".jobs group by 1')
        return {record["status"]: record["count"] for record in records}

    async def tick(self) -> dict[str, Any]:
        """Run one round of housekeeping."""
        return json.loads(await self.conn.fetchval(self.scheduler_sql.tick, 200))

    async def promote(self, limit: int = 1000) -> asyncpg.Record:
        """Promote from the beginning."""
        return await self.conn.fetchrow(self.scheduler_sql.promote, limit, BEGINNING[0])


def _asked(units: tuple[dict[str, Any], ...]) -> str:
    return json.dumps([{"route": "default", "gates": [], "first": [], "after": None, **unit} for unit in units])


def _claimed(records: list[asyncpg.Record]) -> tuple[list[asyncpg.Record], list[tuple[str, str | None]]]:
    notes = [(record["note"], record["lane"]) for record in records if record["id"] is None]
    return [record for record in records if record["id"] is not None], notes
