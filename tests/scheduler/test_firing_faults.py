"""Schedulers, backends and networks that fail while schedules fire: no slot is lost, none fires twice."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.maintenance.firing import Firing
from tests.fleet import Fleet, events, wait_for_event
from tests.matrix.oracle import needs
from tests.matrix.test_f25_clock import LIBRARY
from tests.postgres import Server, embedded
from tests.proxy import Proxy
from tests.scheduler.schedules import ScheduleTable, fire
from tests.support import eventually

TOMORROW = "clock_timestamp() + interval '1 day'"
AGO = "clock_timestamp() - interval '{}'".format


@asynccontextmanager
async def held_up(schedules: ScheduleTable, dsn: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Let fires wait inside their transactions; yield what waits for one to get there and returns its backend."""
    holder = await asyncpg.connect(dsn, timeout=30)
    transaction = holder.transaction()
    await transaction.start()
    # The same slots, uncommitted: whoever writes them waits for what becomes of these.
    await holder.execute(
        f"""
        insert into "{schedules.schema}".schedule_occurrences (schedule_id, due_at, decision_id, outcome)
        select id, next_fire_at, gen_random_uuid(), 'fired' from "{schedules.schema}".schedules
        """
    )

    async def backend() -> int:
        async def waiting() -> int:
            found = await schedules.conn.fetchval(
                """
                select pid from pg_stat_activity
                where application_name like $1 and wait_event = 'transactionid'
                """,
                f"taskqd/{schedules.schema}/%",
            )
            return int(found or 0)

        return await eventually(waiting, 30)

    try:
        yield backend
    finally:
        await transaction.rollback()
        await holder.close(timeout=10)


async def fired(schedules: ScheduleTable, count: int, timeout: float = 60) -> None:
    """Wait until there are so many jobs, and check that there is one for each slot."""
    jobs = f'select count(*) from "{schedules.schema}".jobs'

    async def enough() -> bool:
        return bool(await schedules.conn.fetchval(jobs) >= count)

    await eventually(enough, timeout, f"{count} fires")
    await one_job_a_slot(schedules, count)


async def one_job_a_slot(schedules: ScheduleTable, count: int) -> None:
    """Check that there are so many jobs, of as many slots, each with its own."""
    record = await schedules.conn.fetchrow(
        f"""
        select count(*) as jobs,
            count(distinct (metadata #>> '{{taskq_schedule,id}}', metadata #>> '{{taskq_schedule,due_at}}')) as slots,
            (select count(*) from "{schedules.schema}".schedule_occurrences where job_id is not null) as rows,
            (select sum(fired) from "{schedules.schema}".schedule_decisions) as decided
        from "{schedules.schema}".jobs
        """
    )
    assert tuple(record.values()) == (count, count, count, count)


async def test_a_backend_killed_before_its_commit_leaves_nothing(
    fleet: Fleet, schedules: ScheduleTable, dsn: str
) -> None:
    await schedules.plant(due=AGO("1 second"), kind="every", expression="3600")
    async with held_up(schedules, dsn) as backend:
        scheduler = fleet.scheduler(ready=False)
        pid = await backend()
        await schedules.conn.execute("select pg_terminate_backend($1)", pid)
        wait_for_event(scheduler, "loop-failed")
        assert await schedules.jobs() == []
        assert await schedules.decisions() == []
    await fired(schedules, 1)
    row = await schedules.row()
    assert (row["consecutive_failures"], row["claim_token"]) == (0, None)


async def test_a_commit_whose_answer_is_lost_is_not_repeated(
    server: Server, schedules: ScheduleTable, short_dir: Path
) -> None:
    await schedules.plant_many(10, AGO("1 second"))
    proxy = Proxy(server, short_dir)
    proxy.start()
    lost = threading.Event()

    async def watch(connection: asyncpg.Connection) -> None:
        def told(record: Any) -> None:
            if "schedule_occurrences (schedule_id" in record.query and not lost.is_set():
                lost.set()
                proxy.lose_next_answer()  # that to the commit

        connection.add_query_logger(told)

    pool = await asyncpg.create_pool(proxy.dsn(), min_size=1, max_size=1, init=watch, timeout=30)
    firing = Firing(pool, schedules.schema, new_uuid(), statement_timeout=10)
    try:
        with pytest.raises((asyncpg.PostgresConnectionError, asyncpg.InterfaceError, OSError)):
            await fire(firing)
        assert lost.is_set()
        await fired(schedules, 10)
        assert (await fire(firing)).claimed == 0
        await one_job_a_slot(schedules, 10)
    finally:
        pool.terminate()
        proxy.stop()


async def test_a_killed_scheduler_is_followed_by_another(fleet: Fleet, schedules: ScheduleTable, dsn: str) -> None:
    await schedules.plant_many(50, AGO("1 second"), kind="every", expression="3600")
    async with held_up(schedules, dsn) as backend:
        first = fleet.scheduler(ready=False)
        await backend()
        first.signal(signal.SIGKILL)
        assert first.wait() == -9
    claims = f'select count(*) from "{schedules.schema}".schedules where claim_token is not null'
    assert await schedules.conn.fetchval(claims) == 50
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set claim_expires_at = {AGO("1 second")}')
    fleet.scheduler()
    await fired(schedules, 50)


async def test_a_stop_lets_the_running_fire_commit_and_claims_no_more(
    fleet: Fleet, schedules: ScheduleTable, dsn: str
) -> None:
    await schedules.plant_many(50, AGO("1 second"), kind="every", expression="3600")
    async with held_up(schedules, dsn) as backend:
        scheduler = fleet.scheduler(ready=False)
        await backend()
        scheduler.signal(signal.SIGTERM)
        wait_for_event(scheduler, "shutdown-phase")
        await schedules.plant("late", due=AGO("1 second"))
    assert scheduler.wait() == 0
    await one_job_a_slot(schedules, 50)
    claims = f'select count(*) from "{schedules.schema}".schedules where claim_token is not null'
    assert await schedules.conn.fetchval(claims) == 0


class HoldingProxy(Proxy):
    """A network that holds back the first packet with a text in it."""

    def __init__(self, server: Server, directory: Path, text: bytes) -> None:
        super().__init__(server, directory)
        self._text = text
        self.caught = threading.Event()
        self._letting = asyncio.Event()

    def let_through(self) -> None:
        """Deliver it."""
        self._do(self._letting.set)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: Any, *, from_server: bool
    ) -> None:
        held = reader.read

        async def read(size: int) -> bytes:
            data = await held(size)
            if not from_server and self._text in data and not self.caught.is_set():
                self.caught.set()
                await self._letting.wait()
            return data

        reader.read = read  # type: ignore[method-assign]
        await super()._pump(reader, writer, pair, from_server=from_server)


@pytest.fixture
def network(server: Server, short_dir: Path) -> Iterator[HoldingProxy]:
    """One that holds back the first fire."""
    directory = short_dir / "proxy"
    directory.mkdir()
    proxy = HoldingProxy(server, directory, b"schedule_occurrences (schedule_id")
    proxy.start()
    yield proxy
    proxy.stop()


async def test_a_scheduler_that_slept_on_its_claims_is_refused(
    fleet: Fleet, schedules: ScheduleTable, firing: Firing, network: HoldingProxy
) -> None:
    await schedules.plant_many(50, AGO("1 second"), kind="every", expression="3600")
    sleeper = fleet.scheduler(ready=False, env={"TASKQ_PG_DSN": network.dsn()})
    await eventually(network.caught.is_set, 30)
    sleeper.signal(signal.SIGSTOP)
    claims = f'select count(*) from "{schedules.schema}".schedules where claim_token is not null'
    assert await schedules.conn.fetchval(claims) == 50, sleeper.stderr
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set claim_expires_at = {AGO("1 second")}')
    assert (await fire(firing)).fired == 50
    network.let_through()
    sleeper.signal(signal.SIGCONT)

    def refused() -> list[dict[str, Any]]:
        # Where the machine took over five seconds for this, the server has ended the transaction.
        return [entry for entry in events(sleeper) if entry["event"] in ("schedule-claims-lapsed", "loop-failed")]

    await eventually(refused, 30)
    await one_job_a_slot(schedules, 50)
    # It goes on with what is due next.
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set next_fire_at = {AGO("2 seconds")}')
    await fired(schedules, 100)


async def test_who_sleeps_inside_its_transaction_lets_go_of_it(
    fleet: Fleet, schedules: ScheduleTable, firing: Firing, dsn: str
) -> None:
    await schedules.plant(due=AGO("1 second"), kind="every", expression="3600")
    async with held_up(schedules, dsn) as backend:
        sleeper = fleet.scheduler(ready=False)
        await backend()
        sleeper.signal(signal.SIGSTOP)

    # Waits until the server has ended the transaction.
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set claim_expires_at = {AGO("1 second")}')
    assert (await fire(firing)).fired == 1
    sleeper.signal(signal.SIGCONT)
    wait_for_event(sleeper, "loop-failed")
    await one_job_a_slot(schedules, 1)


async def test_two_schedulers_fire_thousands_of_slots_once_each(fleet: Fleet, schedules: ScheduleTable) -> None:
    await schedules.plant_many(
        80,
        TOMORROW,
        kind="every",
        expression="3600",
        catch_up="fire_all",
        catch_up_max=7,
        catch_up_window=None,
    )
    await schedules.plant(
        "second",
        due=TOMORROW,
        kind="every",
        expression="1",
        catch_up="fire_all",
        catch_up_max=200,
        catch_up_window=None,
    )
    fleet.scheduler(), fleet.scheduler()
    # Half an hour away from the next slot, so that none comes while the test looks.
    missed = AGO("24 hours 30 minutes")
    await schedules.conn.execute(
        f"update \"{schedules.schema}\".schedules set next_fire_at = {missed} where name <> 'second'"
    )
    await schedules.update("second", next_fire_at=AGO("59 minutes"))
    jobs = f"select count(*) from \"{schedules.schema}\".jobs where metadata #>> '{{taskq_schedule,name}}' <> 'second'"

    async def all_fired() -> bool:
        return bool(await schedules.conn.fetchval(jobs) >= 2000 and (await schedules.row("second"))["last_fired_at"])

    await eventually(all_fired, 120)

    async def caught_up() -> bool:
        row = await schedules.row("second")
        return bool(row["now"] - row["next_fire_at"] < timedelta(seconds=30))

    await eventually(caught_up, 120)
    await schedules.update("second", enabled="false", version="version + 1")
    assert await schedules.conn.fetchval(jobs) == 2000
    slots = await schedules.slots("second")
    assert len(slots) >= 3510
    assert {later - sooner for sooner, later in pairwise(slots)} == {timedelta(seconds=1)}
    for name in ("s-0", "s-40", "s-79"):
        slots = await schedules.slots(name)
        assert len(slots) == 25
        assert {later - sooner for sooner, later in pairwise(slots)} == {timedelta(hours=1)}
    total = await schedules.conn.fetchval(f'select count(*) from "{schedules.schema}".jobs')
    await one_job_a_slot(schedules, total)


@pytest.mark.parametrize("wrong", ["+2h", "-2h"])
async def test_the_clock_of_a_scheduler_decides_nothing(fleet: Fleet, schedules: ScheduleTable, wrong: str) -> None:
    needs(LIBRARY is not None, "libfaketime (Debian's package faketime)")
    await schedules.plant("due", due=AGO("1 second"), kind="every", expression="3600")
    await schedules.plant("not-yet", due="clock_timestamp() + interval '1 hour'")
    await schedules.plant("new", kind="cron", expression="* * * * *")
    clock = {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME": wrong,
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    fleet.scheduler(env=clock)

    async def done() -> bool:
        return bool((await schedules.row("due"))["last_fired_at"] and len(await schedules.decisions("new")) > 0)

    await eventually(done, 60)
    assert (await schedules.row("not-yet"))["last_fired_at"] is None
    row = await schedules.row("new")
    assert timedelta(seconds=-60) < row["next_fire_at"] - row["now"] <= timedelta(seconds=60)


@pytest.fixture
def jumping_server(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path]]:
    """A server whose clock is wrong by what a file says, and the file."""
    needs(LIBRARY is not None, "libfaketime (Debian's package faketime)")
    file = short_dir / "clock"
    file.write_text("+0")
    file.chmod(0o644)
    short_dir.chmod(0o755)
    own = embedded(18)
    before = set(Path("/dev/shm").glob("*faketime*"))
    try:
        own.stop()
        with monkeypatch.context() as patch:
            for name, value in {
                "LD_PRELOAD": str(LIBRARY),
                "FAKETIME_TIMESTAMP_FILE": str(file),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_NO_CACHE": "1",
                "NO_FAKE_STAT": "1",
                "DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }.items():
                patch.setenv(name, value)
            own.start()
        yield own, file
    finally:
        own.remove()
        for left in set(Path("/dev/shm").glob("*faketime*")) - before:
            left.unlink(missing_ok=True)


async def test_a_database_whose_clock_goes_back_an_hour_fires_nothing_twice(
    jumping_server: tuple[Server, Path],
) -> None:
    from taskqd.storage.migrate import migrate_up

    own, file = jumping_server
    connection = await asyncpg.connect(own.dsn(), timeout=30)
    await migrate_up(connection, "taskq")
    schedules = ScheduleTable(connection, "taskq")
    await schedules.plant(due=AGO("90 seconds"), catch_up="fire_all")
    pool = await asyncpg.create_pool(own.dsn(), min_size=1, max_size=1, timeout=30)
    firing = Firing(pool, "taskq", new_uuid(), statement_timeout=10)
    try:
        began = await connection.fetchval("select clock_timestamp()")
        assert (await fire(firing)).fired == 2
        await jump(connection, file, "-1h", lambda now: now < began - timedelta(minutes=30))
        assert (await fire(firing)).claimed == 0
        await one_job_a_slot(schedules, 2)
        await jump(connection, file, "+10m", lambda now: now > began + timedelta(minutes=5))
        await fire(firing)
        slots = await schedules.slots()
        assert len(slots) >= 11
        assert {later - sooner for sooner, later in pairwise(slots)} == {timedelta(minutes=1)}
        await one_job_a_slot(schedules, len(slots))
    finally:
        pool.terminate()
        await connection.close(timeout=10)


async def jump(connection: asyncpg.Connection, file: Path, by: str, there: Callable[[Any], bool]) -> None:
    """Set the server's clock, and wait until it shows."""
    file.write_text(by)

    async def jumped() -> bool:
        return there(await connection.fetchval("select clock_timestamp()"))

    await eventually(jumped, 60)
