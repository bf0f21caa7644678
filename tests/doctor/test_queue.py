"""What the doctor says of jobs: who serves them, what limits them, what is late, who maintains the schema."""

from __future__ import annotations

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.storage import doctor_queue
from taskqd.storage.doctor import Finding, Severity
from taskqd.storage.doctor_queue import (
    check_caps,
    check_maintenance,
    check_progress,
    check_schedules,
    check_service,
)
from tests.doctor.conftest import Look
from tests.jobs import JobTable

THREE_DAYS_AGO = "clock_timestamp() - interval '3 days'"
WORKER = """
insert into "{s}".workers (id, hostname, pid, queues, max_concurrency) values ($1, 'h', 1, $2, 4)
"""
ACTOR = """
insert into "{s}".actor_config (actor, queue, max_concurrent, max_pending, max_attempts, retry_kind, retry_backoff,
    retry_base, retry_cap, retry_jitter)
values ($1, 'default', $2, $3, 3, 'transient', 'fixed', 1, 1, 0)
"""
SCHEDULE = """
insert into "{s}".schedules (id, name, source, actor, kind, expression, next_fire_at)
values ($1, 'nightly', 'api', 'succeed', 'every', '60', clock_timestamp() + $2::text::interval)
"""


class Clinic:
    """Makes an installation ill."""

    def __init__(self, conn: asyncpg.Connection, schema: str) -> None:
        self._conn = conn
        self._schema = schema

    async def run(self, sql: str, *arguments: object) -> None:
        """Run a statement in which {s} is the schema."""
        await self._conn.execute(sql.replace("{s}", self._schema), *arguments)

    async def worker(self, *queues: str) -> None:
        """Add a worker that was just seen."""
        await self.run(WORKER, new_uuid(), list(queues))

    async def actor(self, name: str = "succeed", cap: int | None = None, pending: int | None = None) -> None:
        """Add an actor that a worker made known."""
        await self.run(ACTOR, name, cap, pending)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, what was just written is fresh."""
    for name in ("WORKER_ALIVE", "FRESH", "HOST_ALIVE"):
        monkeypatch.setattr(doctor_queue, name, 600.0)


@pytest.fixture
def clinic(conn: asyncpg.Connection, schema: str) -> Clinic:
    """This test's installation."""
    return Clinic(conn, schema)


def bad(findings: list[Finding]) -> dict[str, tuple[Severity, str]]:
    """What is not well, by where; each with why it matters and what to do."""
    wrong = [each for each in findings if each.severity is not Severity.OK]
    assert all(each.why and each.do for each in wrong)
    return {each.where: (each.severity, each.what) for each in wrong}


async def test_queues_that_nobody_serves_and_actors_that_nobody_knows(
    jobs: JobTable, clinic: Clinic, look: Look
) -> None:
    await clinic.actor()
    await jobs.plant(3)
    await jobs.plant(1, route="'mail'", scheduled_at="now() - interval '90 days'")  # fills in a slot of the past
    await jobs.plant(1, route="'mail'", scheduled_at=THREE_DAYS_AGO, created_at=THREE_DAYS_AGO)
    await jobs.plant(1, actor="'renamed'")
    found = bad(await look(check_service))
    assert set(found) == {"queue default", "queue mail", "actor renamed"}
    assert found["queue mail"] == (
        Severity.FAIL,
        "2 jobs wait, the oldest for 3 d, and no live worker serves it",
    )
    await clinic.worker("default", "mail")
    assert set(bad(await look(check_service))) == {"actor renamed"}
    await clinic.actor("renamed")
    assert bad(await look(check_service)) == {}
    await clinic.run("update \"{s}\".workers set last_seen_at = clock_timestamp() - interval '1 day'")
    assert set(bad(await look(check_service))) == {"queue default", "queue mail"}
    await clinic.run("insert into \"{s}\".queues (name, paused_at) values ('mail', clock_timestamp())")
    assert set(bad(await look(check_service))) == {"queue default"}


async def test_limits_that_contradict_each_other(jobs: JobTable, clinic: Clinic, look: Look) -> None:
    await clinic.actor("free")
    await clinic.actor("drained", 0)
    await clinic.actor("narrow", 10, 3)
    found = await look(check_caps)
    texts = {each.where: each.what for each in found if each.severity is Severity.OK}
    assert texts[""] == "1 of 3 actors are uncapped: free"
    assert texts["actor drained"].startswith("max_concurrent 0: drained")
    assert bad(found) == {"actor narrow": (Severity.WARN, "max_pending 3 is below max_concurrent 10")}
    await clinic.run("insert into \"{s}\".queues (name, max_concurrent) values ('default', 5)")
    await clinic.run('update "{s}".actor_config set max_pending = null')
    what = "max_concurrent 10 is above the limit 5 of its queue default"
    assert bad(await look(check_caps)) == {"actor narrow": (Severity.WARN, what)}


async def test_gates_that_differ_from_their_limits_or_from_what_runs(
    jobs: JobTable, clinic: Clinic, look: Look
) -> None:
    await clinic.actor("capped", 2)
    assert bad(await look(check_caps)) == {}
    await clinic.run('update "{s}".gates set cap = 7')
    assert bad(await look(check_caps)) == {
        "actor capped": (Severity.FAIL, "its limit is 2, its gate lets 7 through"),
    }
    await clinic.run('update "{s}".gates set cap = 2, held = 1')
    assert bad(await look(check_caps)) == {"gate a:capped": (Severity.WARN, "counts 1 jobs, 0 run")}


async def test_what_is_late(jobs: JobTable, clinic: Clinic, look: Look) -> None:
    await jobs.plant(2, status="'scheduled'", scheduled_at="clock_timestamp() + interval '1 hour'")
    assert bad(await look(check_progress)) == {}
    await jobs.plant(1, status="'scheduled'", scheduled_at="now() - interval '90 days'")
    await jobs.plant(1, status="'scheduled'", scheduled_at=THREE_DAYS_AGO, created_at=THREE_DAYS_AGO)
    assert bad(await look(check_progress)) == {
        "scheduled jobs": (Severity.FAIL, "2 jobs are due and not claimable, the first for 3 d"),
    }
    running = {"status": "'running'", "worker_id": f"'{new_uuid()}'"}
    (old,) = await jobs.plant(
        1, **running, started_at="clock_timestamp() - interval '3 days'", lock_expires_at="now() + interval '1 min'"
    )
    found = bad(await look(check_progress))
    assert found["running jobs"] == (Severity.WARN, f"job {old} of succeed has run for 3 d")
    await jobs.plant(1, **running, claimed_at="now()", lock_expires_at="now() - interval '5 min'")
    whats = [each.what for each in await look(check_progress)]
    assert "1 of 2 running have leases that have expired" in whats


async def test_schedules_that_do_not_fire(clinic: Clinic, look: Look) -> None:
    await clinic.actor()
    await clinic.run(SCHEDULE, new_uuid(), "1 hour")
    assert bad(await look(check_schedules)) == {}
    await clinic.run("update \"{s}\".schedules set enabled = false, disabled_by = 'operator'")
    assert [each.what for each in await look(check_schedules)] == ["paused by an operator"]
    await clinic.run("update \"{s}\".schedules set disabled_by = 'auto', last_error = 'bad', consecutive_failures = 3")
    assert bad(await look(check_schedules)) == {"schedule nightly": (Severity.FAIL, "paused after 3 failures: bad")}
    await clinic.run('update "{s}".schedules set enabled = true, disabled_by = null, consecutive_failures = 1')
    assert bad(await look(check_schedules)) == {"schedule nightly": (Severity.WARN, "1 failures in a row: bad")}
    await clinic.run(
        "update \"{s}\".schedules set consecutive_failures = 0, created_at = now() - interval '4 days', "
        "next_fire_at = now() - interval '3 days'"
    )
    assert bad(await look(check_schedules)) == {"schedule nightly": (Severity.FAIL, "was due 3 d ago")}
    await clinic.run("update \"{s}\".schedules set actor = 'unknown', next_fire_at = now() + interval '1 h'")
    assert bad(await look(check_schedules)) == {
        "schedule nightly": (Severity.WARN, "no worker has made its actor unknown known"),
    }


async def test_which_hosts_maintain_the_schema(clinic: Clinic, look: Look) -> None:
    await clinic.run('select "{s}".tick()')
    insert = 'insert into "{s}".maintenance_hosts (host_id, kind, complete, hostname, pid) values ($1, $2, $3, $4, 7)'
    await clinic.run(insert, new_uuid(), "runtime", False, "api")
    await clinic.run(insert, new_uuid(), "fallback", True, "io")
    told = {finding.where: finding.what for finding in await look(check_maintenance)}
    assert told.keys() == {"tick", "runtime", "fallback"}
    assert told["fallback"].startswith("1 alive, a worker that stands in, the newest beat")
    assert told["fallback"].endswith(": io:7")
    assert "1 alive in other processes, without schedules, the newest beat" in told["runtime"]


async def test_who_maintains_the_schema(conn: asyncpg.Connection, clinic: Clinic, look: Look) -> None:
    assert bad(await look(check_maintenance)) == {}  # nothing runs, nothing waits
    await clinic.worker("default")
    assert bad(await look(check_maintenance)) == {"tick": (Severity.FAIL, "last ran never")}
    await clinic.run('select "{s}".tick()')
    assert bad(await look(check_maintenance)) == {}
    await clinic.run(
        'insert into "{s}".maintenance_hosts (host_id, kind, hostname, pid, beat_at) '
        "values ($1, 'scheduler', 'h', 7, now() - interval '3 days')",
        new_uuid(),
    )
    assert bad(await look(check_maintenance)) == {
        "scheduler": (Severity.WARN, "the last beat, of h:7, is 3 d old"),
    }
    await clinic.run(
        "insert into \"{s}\".maintenance_hosts (host_id, kind, hostname, pid) values ($1, 'scheduler', 'h', 8)",
        new_uuid(),
    )
    assert bad(await look(check_maintenance)) == {}
    await clinic.run(
        "update \"{s}\".maintenance set last_error = 'reap: no', last_error_at = now() - interval '3 days'"
    )
    assert bad(await look(check_maintenance)) == {"tick": (Severity.WARN, "failed 3 d ago: reap: no")}
