"""Workers that maintain the schema: always, never, or while nobody else does."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import asyncpg
import pytest

from taskqd import TaskqRuntime
from taskqd.domain.ids import new_uuid
from taskqd.maintenance.core import ALIVE
from taskqd.settings import SettingsError, load_settings
from taskqd.storage.statements import load
from tests.fleet import Fleet, ask, events, wait_for_event
from tests.jobs import JobTable
from tests.scheduler.schedules import ScheduleTable
from tests.scheduler.test_firing_faults import (
    AGO,
    TOMORROW,
    HoldingProxy,
    fired,
    held_up,
    network,
    one_job_a_slot,
)
from tests.support import Command, eventually

__all__ = ["network"]

AUTO = {"TASKQ_MAINTENANCE": "auto", "TASKQ_SWEEP_INTERVAL": "0.5"}
ON = {**AUTO, "TASKQ_MAINTENANCE": "on"}
IDLE = {"TASKQ_NOTIFY_POLL_INTERVAL": "3600", "TASKQ_NOTIFY_ENABLED": "true"}
"""An idle worker takes back and promotes a little where it polls: this one hardly does."""
HOURLY: dict[str, Any] = {"kind": "every", "expression": "3600"}


class Hosts:
    """The rows of those that maintain the schema."""

    def __init__(self, conn: asyncpg.Connection, schema: str) -> None:
        self.conn = conn
        self.table = f'"{schema}".maintenance_hosts'
        self.sql = load("hosts", schema)

    async def rows(self) -> list[tuple[str, int]]:
        """Return the kind and the process of each, in the order in which they come first."""
        rows = await self.conn.fetch(f"select kind, pid from {self.table} order by place, started_at, host_id")
        return [(row["kind"], row["pid"]) for row in rows]

    async def become(self, *wanted: tuple[str, int]) -> None:
        """Wait until these are the hosts."""

        async def are() -> bool:
            return await self.rows() == list(wanted)

        await eventually(are, 60, f"hosts {wanted}")

    async def age(self, kind: str) -> None:
        """Let the last beats of a kind be as old as those of the dead are."""
        await self.conn.execute(f"update {self.table} set beat_at = {AGO('1 minute')} where kind = $1", kind)

    async def stand_in(self, worker: uuid.UUID) -> bool:
        return bool(await self.conn.fetchval(self.sql.stand_in, worker, "h", 1, "g", ALIVE))

    async def beat(self, host: uuid.UUID) -> bool | None:
        first: bool | None = await self.conn.fetchval(self.sql.beat_host, host, True, True, ALIVE)
        return first

    async def enlist(self, kind: str, complete: bool = True) -> uuid.UUID:
        host = new_uuid()
        await self.conn.execute(self.sql.enlist_host, host, kind, complete, "h", 1, "g")
        return host


@pytest.fixture
def hosts(conn: asyncpg.Connection, schema: str) -> Hosts:
    return Hosts(conn, schema)


# -- who comes first --------------------------------------------------------------------------------


async def test_one_worker_stands_in_and_goes_on_until_its_beats_are_old(hosts: Hosts) -> None:
    first, second = new_uuid(), new_uuid()
    assert await hosts.conn.fetchval(hosts.sql.unattended, ALIVE)
    assert await hosts.stand_in(first)
    assert not await hosts.stand_in(second)
    assert await hosts.stand_in(first)  # what it had begun has failed
    assert await hosts.beat(first) is True
    assert not await hosts.conn.fetchval(hosts.sql.unattended, ALIVE)
    await hosts.age("fallback")
    assert await hosts.conn.fetchval(hosts.sql.unattended, ALIVE)
    assert await hosts.stand_in(second)
    assert await hosts.beat(first) is None
    assert await hosts.beat(second) is True


async def test_nobody_stands_in_beside_a_host_that_does_everything(hosts: Hosts) -> None:
    worker = new_uuid()
    partial = await hosts.enlist("runtime", complete=False)
    assert await hosts.conn.fetchval(hosts.sql.unattended, ALIVE)
    assert await hosts.stand_in(worker)
    assert await hosts.beat(worker) is True
    assert await hosts.beat(partial) is False
    for kind in ("runtime", "worker", "scheduler"):
        host = await hosts.enlist(kind)
        assert await hosts.beat(worker) is False
        assert await hosts.beat(host) is True
        await hosts.conn.execute(hosts.sql.withdraw_host, host)
        assert await hosts.beat(worker) is True
    await hosts.enlist("scheduler")
    await hosts.age("fallback")
    assert not await hosts.stand_in(new_uuid())


async def test_one_host_leads_whatever_their_number(hosts: Hosts) -> None:
    kinds = ("runtime", "worker", "scheduler", "scheduler", "worker")
    rows = [await hosts.enlist(kind) for kind in kinds]
    assert [await hosts.beat(row) for row in rows] == [False, False, True, False, False]
    assert await hosts.beat(await hosts.enlist("scheduler", complete=False)) is False
    await hosts.age("scheduler")
    assert await hosts.beat(rows[1]) is False
    assert await hosts.beat(rows[0]) is True


async def test_a_clock_that_was_set_back_leaves_no_host_alive_for_ever(hosts: Hosts) -> None:
    await hosts.enlist("scheduler")
    await hosts.conn.execute(f"update {hosts.table} set beat_at = clock_timestamp() + interval '1 hour'")
    assert await hosts.stand_in(new_uuid())


async def test_of_many_that_want_to_stand_in_at_once_one_does(hosts: Hosts, dsn: str) -> None:
    pool = await asyncpg.create_pool(dsn, min_size=8, max_size=8, timeout=30)
    try:
        asked = [pool.fetchval(hosts.sql.stand_in, new_uuid(), "h", 1, "g", ALIVE) for _ in range(64)]
        assert sum(bool(each) for each in await asyncio.gather(*asked)) == 1
    finally:
        pool.terminate()


# -- processes --------------------------------------------------------------------------------------


async def test_a_fleet_without_a_scheduler_maintains_itself(
    fleet: Fleet, jobs: JobTable, schedules: ScheduleTable, hosts: Hosts
) -> None:
    (dead,) = await jobs.running(await jobs.register())
    await jobs.update([dead], lock_expires_at=AGO("1 second"), max_attempts="9")
    (late,) = await jobs.plant(
        status="'scheduled'", scheduled_at=TOMORROW, schedule_to_close=AGO("1 second"), actor="'unknown'"
    )
    await schedules.plant(due=AGO("1 second"), actor="unknown", **HOURLY)
    path = fleet.directory / "w.sock"
    worker = fleet.worker(env={**AUTO, **IDLE, "TASKQ_HEALTH_SOCKET_PATH": str(path)})
    await eventually(lambda: _has_fired(schedules), 60)

    async def done() -> bool:
        return ((await jobs.row(dead))["status"], (await jobs.row(late))["status"]) == ("succeeded", "failed")

    await eventually(done, 30)
    await hosts.become(("fallback", worker.pid))
    await eventually(lambda: "taskq_maintenance_leader_is_leader 1" in ask(path, "/metrics"), 30)
    assert "taskq_cron_fired_total 1" in ask(path, "/metrics")
    roles = "select count(*) from pg_stat_activity where application_name = $1"
    name = f"taskqd/{schedules.schema}/default/maintain"
    assert 1 <= await hosts.conn.fetchval(roles, name) <= 2
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert await hosts.rows() == []
    assert await hosts.conn.fetchval(roles, name) == 0


async def _has_fired(schedules: ScheduleTable) -> bool:
    return await schedules.outcomes() == {"fired": 1}


async def test_a_worker_takes_over_from_what_was_killed_and_gives_back_to_a_scheduler(
    fleet: Fleet, schedules: ScheduleTable, hosts: Hosts
) -> None:
    await schedules.plant(due=TOMORROW, **HOURLY)
    scheduler = fleet.scheduler()
    workers = {worker.pid: worker for worker in (fleet.worker(env=AUTO), fleet.worker(env=AUTO))}
    await hosts.become(("scheduler", scheduler.pid))
    scheduler.signal(signal.SIGKILL)
    assert scheduler.wait() == -9
    await hosts.age("scheduler")
    first = await elected(hosts)
    await schedules.update("report", next_fire_at=AGO("1 second"))
    await fired(schedules, 1)
    # It dies too: the other one takes its place.
    workers.pop(first).signal(signal.SIGKILL)
    ((last, worker),) = workers.items()
    await hosts.age("fallback")
    assert await elected(hosts, then=last) == last
    await schedules.update("report", next_fire_at=AGO("1 second"))
    await fired(schedules, 2)
    # A scheduler comes: it is the only one again.
    back = fleet.scheduler()
    wait_for_event(worker, "maintenance-ended")
    await hosts.conn.execute(f"delete from {hosts.table} where pid = {scheduler.pid}")
    await hosts.become(("scheduler", back.pid))
    (ending,) = events(worker, "maintenance-ending")
    assert ending["why"] == "another process maintains"
    await schedules.update("report", next_fire_at=AGO("1 second"))
    await fired(schedules, 3)
    assert worker.process.poll() is None


async def elected(hosts: Hosts, then: int | None = None) -> int:
    """Wait until a worker stands in, ``then`` this one, and return its process."""

    async def one() -> int:
        found = [pid for kind, pid in await hosts.rows() if kind == "fallback" and then in (None, pid)]
        return found[0] if found else 0

    return await eventually(one, 60)


async def test_a_scheduler_that_slept_on_its_claims_is_refused_what_a_worker_has_fired(
    fleet: Fleet, schedules: ScheduleTable, hosts: Hosts, network: HoldingProxy
) -> None:
    await schedules.plant_many(20, TOMORROW, **HOURLY)
    scheduler = fleet.scheduler(env={"TASKQ_PG_DSN": network.dsn()})
    worker = fleet.worker(env=AUTO)
    due = f'update "{schedules.schema}".schedules set next_fire_at = {AGO("1 second")}'
    await schedules.conn.execute(due)
    await eventually(network.caught.is_set, 60)  # between its claims and their fire
    scheduler.signal(signal.SIGSTOP)
    await hosts.age("scheduler")
    await schedules.conn.execute(f'update "{schedules.schema}".schedules set claim_expires_at = {AGO("1 second")}')
    assert await elected(hosts) == worker.pid
    await fired(schedules, 20)
    network.let_through()
    scheduler.signal(signal.SIGCONT)

    def refused() -> bool:
        # Where the machine took over five seconds for this, the server has ended the transaction.
        return any(entry["event"] in ("schedule-claims-lapsed", "loop-failed") for entry in events(scheduler))

    await eventually(refused, 60)
    await hosts.become(("scheduler", scheduler.pid))
    await one_job_a_slot(schedules, 20)
    await schedules.conn.execute(due)
    await fired(schedules, 40)


async def test_a_worker_that_slept_finds_another_in_its_place(
    fleet: Fleet, schedules: ScheduleTable, hosts: Hosts
) -> None:
    await schedules.plant(due=TOMORROW, **HOURLY)
    sleeper = fleet.worker(env=AUTO)
    assert await elected(hosts) == sleeper.pid
    sleeper.signal(signal.SIGSTOP)
    other = fleet.worker(env=AUTO)
    await hosts.age("fallback")
    assert await elected(hosts, then=other.pid) == other.pid
    sleeper.signal(signal.SIGCONT)
    assert wait_for_event(sleeper, "maintenance-ending")["why"] == "another worker stands in"
    await hosts.become(("fallback", other.pid))
    await schedules.update("report", next_fire_at=AGO("1 second"))
    await fired(schedules, 1)


async def test_a_stop_lets_the_running_fire_commit_and_gives_back_the_rest(
    fleet: Fleet, schedules: ScheduleTable, hosts: Hosts, dsn: str
) -> None:
    # More than one transaction's worth: the second batch is claimed, and not fired.
    await schedules.plant_many(40, AGO("49 hours 30 minutes"), catch_up="fire_all", catch_up_max=50, **HOURLY)
    slots = 40 * 50
    async with held_up(schedules, dsn) as backend:
        worker = fleet.worker(env={**ON, "TASKQ_CANCELLATION_GRACE_PERIOD": "10", "TASKQ_LOCK_LEASE": "30"})
        await backend()
        worker.signal(signal.SIGTERM)
        wait_for_event(worker, "maintenance-ending")
    assert worker.wait(60) == 0
    held = f'select count(*) from "{schedules.schema}".schedules where claim_token is not null'
    assert await hosts.conn.fetchval(held) == 0
    assert await hosts.rows() == []
    done = await hosts.conn.fetchval(f'select count(*) from "{schedules.schema}".jobs')
    assert 0 < done < slots
    await one_job_a_slot(schedules, done)
    fleet.scheduler()
    await fired(schedules, slots)


async def test_an_actor_that_blocks_the_event_loop_holds_up_no_schedule(
    fleet: Fleet, jobs: JobTable, schedules: ScheduleTable, hosts: Hosts
) -> None:
    await schedules.plant(due=TOMORROW, **HOURLY)
    worker = fleet.worker(env=ON, concurrency=1)
    await hosts.become(("worker", worker.pid))
    await jobs.plant(actor="'blocks'", payload="'{\"seconds\": 60}'")
    await fleet.wait_for_executions(1)
    await schedules.update("report", next_fire_at=AGO("1 second"))
    await eventually(lambda: _has_fired(schedules), 60)
    assert fleet.executions("end") == []


async def test_workers_that_are_told_to_do_so_together(fleet: Fleet, schedules: ScheduleTable, hosts: Hosts) -> None:
    await schedules.plant_many(500, AGO("1 second"), **HOURLY)
    workers = [fleet.worker(env=ON, ready=False) for _ in range(3)]
    await fired(schedules, 500)
    await eventually(lambda: _many(hosts, 3), 60)
    assert {pid for _, pid in await hosts.rows()} == {worker.pid for worker in workers}


async def _many(hosts: Hosts, count: int) -> bool:
    return len(await hosts.rows()) == count


async def test_a_session_that_is_ended_is_made_again(fleet: Fleet, schedules: ScheduleTable, hosts: Hosts) -> None:
    await schedules.plant(due=TOMORROW, **HOURLY)
    worker = fleet.worker(env=AUTO)
    wait_for_event(worker, "maintenance-begun")
    end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1"
    await hosts.conn.execute(end, f"taskqd/{schedules.schema}/default/maintain")
    await schedules.update("report", next_fire_at=AGO("1 second"))
    await fired(schedules, 1)
    assert worker.process.poll() is None


async def test_one_that_gets_no_connections_leaves_it_to_another(
    fleet: Fleet, hosts: Hosts, conn: asyncpg.Connection, schema: str, dsn: str
) -> None:
    """Its own pools are full of connections that it has; those of the duties are refused."""
    role = f"few_{uuid.uuid4().hex[:8]}"
    await conn.execute(f"create role {role} login superuser")
    try:
        poor = fleet.worker(env={**AUTO, "TASKQ_PG_DSN": dsn.replace("//postgres", f"//{role}")})
        assert await elected(hosts) == poor.pid
        await conn.execute(f"alter role {role} nologin")
        end = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = $1"
        await conn.execute(end, f"taskqd/{schema}/default/maintain")
        rich = fleet.worker(env=AUTO)
        await hosts.age("fallback")
        assert await elected(hosts, then=rich.pid) == rich.pid
    finally:
        poor.end()
        await conn.execute(f"drop role {role}")


# -- all of them ------------------------------------------------------------------------------------


async def test_every_kind_of_host_at_once_fires_ten_thousand_slots_once_each(
    fleet: Fleet, schedules: ScheduleTable, hosts: Hosts, dsn: str
) -> None:
    """A scheduler, two workers that stand in where it is away, and a runtime; in the middle the scheduler sleeps."""
    await schedules.plant_many(
        100, TOMORROW, catch_up="fire_all", catch_up_max=20, catch_up_window=None, actor="unknown", **HOURLY
    )
    # Half an hour away from the next slot, so that none comes while the test looks.
    due = f'update "{schedules.schema}".schedules set next_fire_at = {AGO("99 hours 30 minutes")} where name'
    runtime = TaskqRuntime(dsn=dsn, schema=schedules.schema, schedule_enabled=True)
    scheduler = fleet.scheduler()
    workers = [fleet.worker(env=AUTO), fleet.worker(env=AUTO)]
    async with runtime:
        await schedules.conn.execute(f"{due} < 's-5'")
        await eventually(lambda: _at_least(schedules, 1000), 120)
        scheduler.signal(signal.SIGSTOP)
        await runtime.stop()
        await hosts.age("scheduler")
        assert await elected(hosts) in {worker.pid for worker in workers}
        await schedules.conn.execute(f"{due} >= 's-5'")
        before = await _count(schedules)
        await eventually(lambda: _at_least(schedules, min(before + 500, 10_000)), 120)
        await runtime.start()
        scheduler.signal(signal.SIGCONT)
        # What the scheduler held when it fell asleep, it may hold for a minute, and fires now or gives back.
        await fired(schedules, 10_000, 240)
    assert await schedules.outcomes() == {"fired": 10_000}
    deciders = f"""
        select count(distinct decided_by) as hosts, count(*) filter (where w.id is not null) > 0 as by_a_worker
        from "{schedules.schema}".schedule_decisions left join "{schedules.schema}".workers w on w.id = decided_by
    """
    told = await hosts.conn.fetchrow(deciders)
    assert (told["hosts"] >= 2, told["by_a_worker"]) == (True, True)
    for name in ("s-0", "s-50", "s-99"):
        slots = await schedules.slots(name)
        assert len(slots) == 100
        assert {later - sooner for sooner, later in pairwise(slots)} == {timedelta(hours=1)}


async def _at_least(schedules: ScheduleTable, count: int) -> bool:
    return await _count(schedules) >= count


async def _count(schedules: ScheduleTable) -> int:
    return int(await schedules.conn.fetchval(f'select count(*) from "{schedules.schema}".jobs'))


# -- the setting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["auto", "off", "on", "ON"])
def test_the_setting(value: str) -> None:
    assert load_settings({"maintenance": value}, environ={}).maintenance == value.lower()
    assert load_settings(environ={"TASKQ_MAINTENANCE": value}).maintenance == value.lower()


@pytest.mark.parametrize("value", ["yes", "", "0", True, 1])
def test_what_it_may_not_be(value: object) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(default_keys={"maintenance": value}, environ={})
    (problem,) = raised.value.problems
    assert "maintenance" in problem
    assert "one of auto, off, on" in problem


def test_a_worker_is_told_of_a_wrong_one_at_once(start: Callable[..., Command], child_env: dict[str, str]) -> None:
    command = start("worker", "--actors", "tests.apps.basic:actors", "--maintenance", "maybe", env=child_env)
    assert command.wait(60) == 78
    (message,) = [line for line in command.stderr.splitlines() if line.startswith("error: ")]
    assert "--maintenance = 'maybe': must be one of auto, off, on" in message
