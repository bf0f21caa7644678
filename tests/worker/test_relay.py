"""Settlements that claim: what an attempt gives back is taken up in the commit that ends it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.worker.attempt import Attempt
from taskqd.worker.completer import RETRY_BUDGET, Completer
from taskqd.worker.outcome import Succeeded
from tests.jobs import JobTable
from tests.support import eventually
from tests.worker.test_lanes import CAPPED, IN_LANE, SERIAL, capped, serial
from tests.worker.test_producer import Harness, Spy

LANES = {"limit": (CAPPED, IN_LANE), "identity": (SERIAL, serial("x"))}


@pytest.mark.parametrize("kind", LANES)
async def test_what_is_given_back_is_claimed_in_the_same_commit(jobs: JobTable, kind: str) -> None:
    unit, columns = LANES[kind]
    await jobs.gate("a:succeed", 1)
    first, second, third = await jobs.plant(3, **columns)
    worker = new_uuid()
    await jobs.claim_lanes(worker, 1, unit)
    applied, claimed, _ = await jobs.relay((first, 1), worker, 5, unit)
    assert applied
    assert [record["id"] for record in claimed] == [second]
    rows = [await jobs.row(job) for job in (first, second, third)]
    assert [row["status"] for row in rows] == ["succeeded", "running", "pending"]
    written = await jobs.conn.fetch(
        f'select distinct xmin from "{jobs.schema}".jobs where id = any($1)', [first, second]
    )
    assert len(written) == 1
    assert await jobs.held() == {"a:succeed": int(kind == "limit")}


async def test_a_settlement_that_comes_too_late_claims_nothing(jobs: JobTable) -> None:
    (job, _) = await capped(jobs, 2, 2)
    await jobs.claim_lanes(new_uuid(), 1, CAPPED)
    before = await jobs.image()
    assert await jobs.relay((job, 0), new_uuid(), 5, CAPPED) == (False, [], [])
    assert await jobs.image() == before
    assert await jobs.held() == {"a:succeed": 1}


async def test_who_ends_its_last_job_is_told_that_nothing_is_left(jobs: JobTable) -> None:
    (job,) = await capped(jobs, 1, 1)
    await jobs.claim_lanes(new_uuid(), 1, CAPPED)
    assert await jobs.relay((job, 1), new_uuid(), 5, CAPPED) == (True, [], [("short", None)])


class Chain:
    """A producer and a completer of one worker, whose jobs succeed as they begin."""

    def __init__(self, pool: Any, schema: str, *, size: int = 4) -> None:
        self.harness = Harness(pool, schema, ["default"], size=size)
        self.producer = self.harness.producer
        self.slots = self.harness.slots
        self.taken = self.harness.taken
        self.refused: list[Attempt] = []
        self.completer = Completer(
            pool,
            schema,
            self.harness.leases,
            command_timeout=5.0,
            on_repended=lambda: None,
            before=self._before,
            on_ended=lambda *_: None,
            on_freed=self._freed,
            relay=self.producer.relay,
            on_backlog=self.slots.hold,
        )

    async def _before(self, attempts: Sequence[Attempt]) -> None:
        """Nothing to store."""

    def _freed(self, attempt: Attempt) -> None:
        self.refused.append(attempt)
        self.producer.freed(attempt)

    async def run(self) -> None:
        while (attempt := await self.slots.get()) is not None:
            self.taken.append(attempt)
            self.slots.finished(0.001)
            self.completer.submit(Succeeded(attempt, 0.001, None))

    @classmethod
    @asynccontextmanager
    async def working(cls, pool: Any, schema: str) -> AsyncIterator[Chain]:
        chain = cls(pool, schema)
        chain.completer.start()
        running = asyncio.ensure_future(chain.run())
        async with chain.harness:
            yield chain
        await running
        assert await chain.completer.flush(20)
        await chain.completer.stop(1)
        assert chain.harness.errors == []


@pytest.mark.parametrize("kind", LANES)
async def test_each_of_a_lane_costs_one_statement(jobs: JobTable, pool: Any, schema: str, kind: str) -> None:
    await jobs.store_actor("succeed", **({"max_concurrent": 1} if kind == "limit" else {}))
    ids = await jobs.plant(100, **LANES[kind][1])
    spy = Spy(pool)
    async with Chain.working(spy, schema) as chain:
        await eventually(lambda: chain.completer.succeeded == 100, 30)
        assert [attempt.job_id for attempt in chain.taken] == ids, "in their order, each once"
    assert sum("claim_lanes" in text and "settled" not in text for text in spy.sent) < 20


async def test_a_claim_that_fails_holds_no_settlement_up(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.store_actor("succeed", max_concurrent=1)
    first, second = await jobs.plant(2, **IN_LANE)
    await jobs.conn.execute(
        f"""
        create function "{schema}".refuse() returns trigger language plpgsql as $$
        begin raise exception 'not now' using errcode = 'unique_violation'; end $$;
        create trigger refuse before update on "{schema}".jobs for each row
            when (old.status = 'pending' and new.id = '{second}') execute function "{schema}".refuse();
        """
    )
    async with Chain.working(pool, schema) as chain:
        await eventually(lambda: chain.completer.succeeded == 1, 30)
        assert (await jobs.row(first))["status"] == "succeeded"
        assert [attempt.job_id for attempt in chain.refused] == [first], "the producer hears of what came free"
        await jobs.conn.execute(f'drop trigger refuse on "{schema}".jobs')
        await eventually(lambda: chain.completer.succeeded == 2, 30)


async def test_nothing_is_claimed_by_settlements_of_a_paused_worker(jobs: JobTable, pool: Any, schema: str) -> None:
    await jobs.store_actor("succeed", max_concurrent=1)
    await jobs.plant(2, **IN_LANE)
    chain = Chain(pool, schema)
    async with chain.harness:
        attempt = await asyncio.wait_for(chain.slots.get(), 10)
        assert attempt is not None
        chain.producer.pause(True)
        async with chain.producer.relay([attempt]) as relay:
            assert not relay.carries
        chain.producer.pause(False)
        async with chain.producer.relay([attempt]) as relay:
            assert relay.carries
            async with chain.producer.relay([attempt]) as beside:
                assert not beside.carries, "one claim of the lanes at a time"
    async with chain.producer.relay([attempt]) as relay:
        assert not relay.carries, "it has stopped"


async def test_what_is_claimed_as_the_worker_stops_is_there_to_be_given_back(
    jobs: JobTable, pool: Any, schema: str, dsn: str
) -> None:
    await jobs.store_actor("succeed", max_concurrent=1)
    _, second = await jobs.plant(2, **IN_LANE)
    other = await asyncpg.connect(dsn, timeout=30)
    chain = Chain(pool, schema)
    chain.completer.start()
    try:
        async with chain.harness, asyncio.timeout(60):
            attempt = await chain.slots.get()
            assert attempt is not None
            chain.slots.finished(0.001)
            await jobs.conn.execute(
                f"""
                create function "{schema}".wait() returns trigger language plpgsql as $$
                begin perform pg_advisory_xact_lock_shared(4711); return new; end $$;
                create trigger wait before update on "{schema}".jobs for each row
                    when (old.status = 'pending' and new.id = '{second}') execute function "{schema}".wait();
                """
            )
            async with other.transaction():
                await other.execute("select pg_advisory_xact_lock(4711)")
                chain.completer.submit(Succeeded(attempt, 0.001, None))
                await eventually(lambda: _waits_for(jobs, other))
                stopping = asyncio.ensure_future(chain.producer.stop(30))
                done, _ = await asyncio.wait([stopping], timeout=0.1)
                assert not done, "it waits for the claim under way"
            await stopping
            assert [one.job_id for one in chain.slots.take_all()] == [second]
    finally:
        await other.close()
        await chain.completer.stop(1)


async def test_a_gate_that_somebody_holds_delays_only_those_who_go_through_it(
    jobs: JobTable, pool: Any, schema: str, dsn: str
) -> None:
    await jobs.store_actor("succeed", max_concurrent=1)
    await jobs.plant(1, **IN_LANE)
    other = await asyncpg.connect(dsn, timeout=30)
    chain = Chain(pool, schema)
    chain.completer.start()
    try:
        async with chain.harness, asyncio.timeout(60):
            held = await chain.slots.get()
            assert held is not None
            running = asyncio.ensure_future(chain.run())
            async with other.transaction():
                await other.execute(f'select from "{schema}".gates for update')
                chain.slots.finished(0.001)
                chain.completer.submit(Succeeded(held, 0.001, None))
                began = time.monotonic()
                while time.monotonic() < began + RETRY_BUDGET + 1:
                    before = chain.completer.succeeded
                    await jobs.plant(3, actor="'plain'")
                    chain.producer.woken()
                    await eventually(lambda wanted=before + 3: chain.completer.succeeded == wanted, 2.5)
                assert (await jobs.row(held.job_id))["status"] == "running"
            total = chain.completer.succeeded + 1
            await eventually(lambda: chain.completer.succeeded == total)
            assert (await jobs.row(held.job_id))["status"] == "succeeded"
            assert (chain.completer.disowned, chain.completer.lost) == (0, 0)
            assert await jobs.held() == {"a:succeed": 0}
        await running
    finally:
        await other.close()
        await chain.completer.stop(1)
    assert chain.harness.errors == []


async def _waits_for(jobs: JobTable, other: asyncpg.Connection) -> bool:
    """Whether somebody waits for what ``other`` holds."""
    waiting = "select exists (select from pg_stat_activity where $1 = any(pg_blocking_pids(pid)))"
    return bool(await jobs.conn.fetchval(waiting, other.get_server_pid()))
