"""The completer: every outcome is written, whatever stands in the way of its neighbours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.storage.connect import create_pool
from taskqd.worker.attempt import Attempt, Leases
from taskqd.worker.completer import BACKLOG, GROUP, Completer
from taskqd.worker.lane_claims import Relay
from taskqd.worker.outcome import Failed, Outcome, Released, Snoozed, Succeeded
from tests.jobs import JobTable
from tests.postgres import Server
from tests.proxy import Proxy
from tests.support import eventually
from tests.worker.attempts import attempt_of


class Harness:
    """A completer on a real database, and attempts that it may settle."""

    def __init__(self, jobs: JobTable, pool: Any, command_timeout: float = 5.0) -> None:
        self.jobs = jobs
        self.leases = Leases()
        self.repended = 0
        self.ended: list[tuple[Outcome, str]] = []
        self.freed: list[Attempt] = []
        self.backlogs: list[tuple[bool, bool]] = []
        self.groups_may_go = asyncio.Event()
        self.groups_may_go.set()
        self.completer = Completer(
            pool,
            jobs.schema,
            self.leases,
            command_timeout=command_timeout,
            on_repended=self._count,
            before=self._before,
            on_ended=lambda outcome, status: self.ended.append((outcome, status)),
            on_freed=self.freed.append,
            relay=self._relay,
            on_backlog=lambda *backlog: self.backlogs.append(backlog),
        )

    async def _before(self, attempts: Sequence[Attempt]) -> None:
        assert attempts
        if not attempts[0].lane:
            await self.groups_may_go.wait()

    def _count(self) -> None:
        self.repended += 1

    @asynccontextmanager
    async def _relay(self, attempts: Sequence[Attempt]) -> AsyncIterator[Relay]:
        yield Relay()

    async def attempts(self, count: int = 1, **columns: str) -> list[Attempt]:
        await self.jobs.plant(count, **columns)
        made = [attempt_of(record) for record in await self.jobs.claim(new_uuid(), count)]
        assert len(made) == count
        for attempt in made:
            self.leases.add(attempt)
        return made

    async def settle(self, *outcomes: Outcome, timeout: float = 20.0) -> None:
        for outcome in outcomes:
            self.completer.submit(outcome)
        assert await self.completer.flush(timeout)

    async def status(self, attempt: Attempt) -> str:
        return str((await self.jobs.row(attempt.job_id))["status"])


def good(attempt: Attempt, result: str | None = '"ok"') -> Succeeded:
    return Succeeded(attempt, 0.1, result)


def bad(attempt: Attempt, message: str = "no") -> Failed:
    return Failed(attempt, 0.1, "RuntimeError", message, None)


@pytest.fixture
async def harness(jobs: JobTable, pool: Any) -> AsyncIterator[Harness]:
    harness = Harness(jobs, pool)
    harness.completer.start()
    yield harness
    await harness.completer.stop(1)


@pytest.fixture
def proxy(server: Server, short_dir: Path) -> Iterator[Proxy]:
    proxy = Proxy(server, short_dir)
    proxy.start()
    yield proxy
    proxy.stop()


@pytest.fixture
async def by_proxy(jobs: JobTable, proxy: Proxy) -> AsyncIterator[Harness]:
    """A completer whose one connection goes through a proxy, and whose statements are prepared already."""
    pool = await create_pool(
        proxy.dsn(), role="test", schema=jobs.schema, group="", min_size=1, max_size=1, command_timeout=2, pinned=True
    )
    harness = Harness(jobs, pool, command_timeout=2.0)
    harness.completer.start()
    for verb in (good, bad, lambda one: Snoozed(one, 0.1, 0.0), lambda one: Released(one, 0.1, "worker_shutdown")):
        (attempt,) = await harness.attempts(retry_base="3600", retry_cap="3600")
        await harness.settle(verb(attempt))
        await jobs.update([attempt.job_id], status="'cancelled'")
    harness.completer.succeeded = harness.completer.failed = harness.repended = 0
    yield harness
    await harness.completer.stop(1)
    pool.terminate()


# -- groups -----------------------------------------------------------------------------------------


async def test_outcomes_of_every_kind_settle_in_one_go(harness: Harness) -> None:
    one, two, three, four, five = await harness.attempts(5)
    await harness.settle(
        good(one), bad(two), Snoozed(three, 0.1, 60.0), Released(four, 0.1, "worker_shutdown"), good(five)
    )
    assert [await harness.status(attempt) for attempt in (one, two, three, four, five)] == [
        "succeeded",
        "pending",
        "scheduled",
        "pending",
        "succeeded",
    ]
    assert len(harness.leases) == 0
    assert (harness.completer.succeeded, harness.completer.failed, harness.completer.lost) == (2, 0, 0)
    assert harness.repended > 0


async def test_a_burst_is_written_in_groups(harness: Harness) -> None:
    attempts = await harness.attempts(3 * GROUP)
    before = await harness.jobs.conn.fetchval("select txid_current()")
    await harness.settle(*map(good, attempts))
    after = await harness.jobs.conn.fetchval("select txid_current()")
    assert harness.completer.succeeded == 3 * GROUP
    assert after - before < 30, "a handful of transactions, not one for each outcome"


async def test_an_outcome_that_comes_alone_does_not_wait_for_a_group(harness: Harness) -> None:
    for attempt in await harness.attempts(5):
        began = time.monotonic()
        await harness.settle(good(attempt))
        assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("limited", [False, True], ids=["plain", "limited"])
async def test_a_backlog_is_told_when_it_is_full_and_when_it_is_not_any_more(
    jobs: JobTable, pool: Any, limited: bool
) -> None:
    harness = Harness(jobs, pool)  # its loop has not started, so nothing is written
    attempts = await harness.attempts(BACKLOG)
    for attempt in attempts:
        attempt.lane = "a:limited" * limited
        assert harness.backlogs == []
        harness.completer.submit(good(attempt))
    full = (not limited, limited)
    assert harness.backlogs == [full]
    harness.completer.start()
    await eventually(lambda: harness.backlogs == [full, (False, False)])
    assert await harness.completer.flush(20)
    assert await jobs.counts() == {"succeeded": BACKLOG}
    assert harness.freed == (attempts if limited else [])
    await harness.completer.stop(1)


async def test_what_others_wait_for_is_settled_beside_the_groups(harness: Harness) -> None:
    plain, limited = await harness.attempts(2)
    limited.lane = "a:limited"
    harness.groups_may_go.clear()
    harness.completer.submit(good(plain))
    harness.completer.submit(good(limited))
    await eventually(lambda: harness.completer.succeeded == 1)
    assert await harness.status(limited) == "succeeded"
    assert not await harness.completer.flush(0.01)
    harness.groups_may_go.set()
    assert await harness.completer.flush(20)
    assert await harness.status(plain) == "succeeded"


# -- a row that somebody holds ----------------------------------------------------------------------


async def test_a_row_locked_for_long_delays_only_itself(harness: Harness, dsn: str) -> None:
    attempts = await harness.attempts(GROUP)
    held = attempts[100]
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{harness.jobs.schema}".jobs where id = $1 for update', held.job_id)
            for attempt in attempts:
                harness.completer.submit(good(attempt))
            await eventually(lambda: harness.completer.succeeded == GROUP - 1, 2)
            assert await harness.jobs.counts() == {"succeeded": GROUP - 1, "running": 1}
            (later,) = await harness.attempts()
            harness.completer.submit(good(later))
            await eventually(lambda: harness.completer.succeeded == GROUP, 2)
            assert not await harness.completer.flush(0.5), "several tries of the straggler, each in vain"
            assert harness.leases.snapshot() == (held,), "its lease is renewed while it waits"
        await eventually(lambda: len(harness.leases) == 0, 10)
    finally:
        await other.close()
    assert await harness.jobs.counts() == {"succeeded": GROUP + 1}
    assert (harness.completer.succeeded, harness.completer.lost) == (GROUP + 1, 0)


async def test_a_straggler_outlasts_a_lost_connection(harness: Harness, dsn: str, pool: Any) -> None:
    (held,) = await harness.attempts()
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f'select from "{harness.jobs.schema}".jobs where id = $1 for update', held.job_id)
            harness.completer.submit(good(held))
            for _ in range(5):
                await harness.jobs.conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1",
                    f"taskqd/{harness.jobs.schema}//test",
                )
                await asyncio.sleep(0.1)
        await eventually(lambda: len(harness.leases) == 0, 15)
    finally:
        await other.close()
    assert harness.completer.disowned == 0
    assert await harness.status(held) == "succeeded"


async def test_a_straggler_that_is_taken_meanwhile_is_lost(harness: Harness, dsn: str) -> None:
    (held,) = await harness.attempts()
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(
                f"update \"{harness.jobs.schema}\".jobs set lock_expires_at = now() - interval '1 s' where id = $1",
                held.job_id,
            )
            harness.completer.submit(good(held))
            assert not await harness.completer.flush(0.3)
            assert await other.fetchval(f'select "{harness.jobs.schema}".reap(10)') == 1
        await eventually(lambda: harness.completer.lost == 1, 10)
    finally:
        await other.close()
    assert await harness.status(held) == "pending"
    assert len(harness.leases) == 0


# -- what Postgres refuses --------------------------------------------------------------------------


async def test_an_outcome_that_cannot_be_stored_is_found_and_replaced(harness: Harness) -> None:
    attempts = await harness.attempts(20)
    outcomes = [good(attempt) for attempt in attempts]
    outcomes[3].result = '"nul \\u0000"'
    outcomes[17].result = "not json"
    await harness.settle(*outcomes)
    assert await harness.jobs.counts() == {"succeeded": 18, "failed": 2}
    for index in (3, 17):
        row = await harness.jobs.row(attempts[index].job_id)
        assert (row["error_class"], row["result"]) == ("OutcomeNotStorable", None)
        assert "Succeeded" in row["error_message"] or "succeeded" in row["error_message"]
    assert len(harness.leases) == 0
    assert harness.completer.disowned == 0


async def test_so_is_a_message_that_is_not_unicode(harness: Harness) -> None:
    attempts = await harness.attempts(6, max_attempts="1")
    outcomes = [bad(attempt) for attempt in attempts]
    outcomes[2].message = "lone \ud800"
    outcomes[4].message = "nul \x00"
    await harness.settle(*outcomes)
    assert await harness.jobs.counts() == {"failed": 6}
    classes = [(await harness.jobs.row(attempt.job_id))["error_class"] for attempt in attempts]
    assert classes == [
        "RuntimeError",
        "RuntimeError",
        "OutcomeNotStorable",
        "RuntimeError",
        "OutcomeNotStorable",
        "RuntimeError",
    ]


# -- infrastructure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.3, 3.0])
async def test_a_short_outage_is_waited_out(by_proxy: Harness, proxy: Proxy, seconds: float) -> None:
    attempts = await by_proxy.attempts(10)
    proxy.cut()
    for attempt in attempts:
        by_proxy.completer.submit(good(attempt))
    await asyncio.sleep(seconds)
    proxy.restore()
    assert await by_proxy.completer.flush(10)
    assert (by_proxy.completer.succeeded, by_proxy.completer.disowned, by_proxy.completer.lost) == (10, 0, 0)
    assert len(by_proxy.leases) == 0


async def test_a_long_outage_disowns_what_failed_and_nothing_else(by_proxy: Harness, proxy: Proxy) -> None:
    early = await by_proxy.attempts(3)
    late = await by_proxy.attempts(3)
    proxy.cut()
    began = time.monotonic()
    await by_proxy.settle(*map(good, early))
    assert 1.0 < time.monotonic() - began < 10
    assert by_proxy.completer.disowned == 3
    assert all(attempt.disowned for attempt in early)
    assert set(by_proxy.leases.snapshot()) == set(late), "a disowned row is left to its lease"
    proxy.restore()
    await by_proxy.settle(*map(good, late))
    assert [await by_proxy.status(attempt) for attempt in (*early, *late)] == ["running"] * 3 + ["succeeded"] * 3


async def test_a_hang_disowns_within_its_budget(by_proxy: Harness, proxy: Proxy) -> None:
    attempts = await by_proxy.attempts(3)
    proxy.freeze()
    began = time.monotonic()
    await by_proxy.settle(*map(good, attempts), timeout=30)
    assert time.monotonic() - began < 10
    assert by_proxy.completer.disowned == 3
    proxy.restore()


# -- answers that were lost -------------------------------------------------------------------------

REPLAYS = {
    "success": lambda attempt: good(attempt),
    "retry": lambda attempt: bad(attempt),
    "failure": lambda attempt: Failed(attempt, 0.1, "KeyError", "no", None, "non_retryable"),
    "snooze": lambda attempt: Snoozed(attempt, 0.1, 3600.0),
    "release": lambda attempt: Released(attempt, 0.1, "worker_shutdown"),
    "unstarted": lambda attempt: Released(attempt, None, "unstarted"),
}


@pytest.mark.parametrize("kind", REPLAYS)
async def test_a_lost_answer_changes_nothing_twice(by_proxy: Harness, proxy: Proxy, kind: str) -> None:
    (attempt,) = await by_proxy.attempts(retry_base="3600", retry_cap="3600")
    proxy.lose_next_answer()
    await by_proxy.settle(REPLAYS[kind](attempt))
    assert len(by_proxy.leases) == 0
    completer = by_proxy.completer
    assert (completer.lost, completer.disowned) == (0, 0)
    assert completer.succeeded == (kind == "success")
    assert completer.failed == (kind == "failure")
    row = await by_proxy.jobs.row(attempt.job_id)
    assert row["epoch"] == (1 if kind in ("success", "failure") else 2)
    assert row["attempt"] == (0 if kind in ("snooze", "unstarted") else 1)
    assert (row["snooze_count"], row["interrupt_count"]) == (kind == "snooze", kind == "release")
    assert len(await by_proxy.jobs.attempts(attempt.job_id)) == (kind in ("retry", "snooze", "release"))


@pytest.mark.parametrize("kind", REPLAYS)
async def test_a_replay_is_told_even_when_another_has_the_job_by_now(harness: Harness, kind: str) -> None:
    (attempt,) = await harness.attempts()
    await harness.settle(REPLAYS[kind](attempt))
    await harness.jobs.update([attempt.job_id], status="'pending'", scheduled_at="clock_timestamp()")
    if kind not in ("success", "failure"):
        (again,) = await harness.jobs.claim(new_uuid())
        assert again["epoch"] == 3
    else:
        await harness.jobs.update([attempt.job_id], status="'succeeded'" if kind == "success" else "'failed'")
    before = await harness.jobs.image()
    await harness.settle(REPLAYS[kind](attempt))
    assert await harness.jobs.image() == before
    assert harness.completer.lost == 0


@pytest.mark.parametrize("kind", [kind for kind in REPLAYS if kind != "unstarted"])
async def test_an_attempt_that_lost_its_lease_changes_nothing_and_is_counted(harness: Harness, kind: str) -> None:
    (attempt,) = await harness.attempts()
    await harness.jobs.update([attempt.job_id], lock_expires_at="clock_timestamp() - interval '1 s'")
    await harness.jobs.tick()
    (again,) = await harness.jobs.claim(new_uuid())
    assert again["epoch"] == 3
    before = await harness.jobs.image()
    await harness.settle(REPLAYS[kind](attempt))
    assert await harness.jobs.image() == before
    assert harness.completer.lost == 1
    assert len(harness.leases) == 0


@pytest.mark.parametrize("kind", [kind for kind in REPLAYS if kind != "unstarted"])
async def test_another_verb_than_the_one_written_is_a_loss(harness: Harness, kind: str) -> None:
    (attempt,) = await harness.attempts()
    first = REPLAYS["snooze"] if kind == "success" else REPLAYS["success"]
    await harness.settle(first(attempt))
    before = await harness.jobs.image()
    await harness.settle(REPLAYS[kind](attempt))
    assert await harness.jobs.image() == before
    assert harness.completer.lost == 1


async def test_the_outcome_of_a_disowned_attempt_is_dropped(harness: Harness) -> None:
    (attempt,) = await harness.attempts()
    attempt.disowned = True
    before = await harness.jobs.image()
    await harness.settle(good(attempt))
    assert await harness.jobs.image() == before
    assert len(harness.leases) == 0
    assert harness.completer.lost == 0, "whoever disowned it has counted it"
