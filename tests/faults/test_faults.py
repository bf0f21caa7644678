"""Faults under load on real processes: nothing is lost, nothing ends twice, and no execution is unaccounted for.

What was executed is read from a log that the actors write outside Postgres.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter

import pytest

from tests.fleet import Fleet
from tests.jobs import JobTable
from tests.support import Command, eventually

WAIT = 60
LOAD = {"succeed": 160, "plain": 80, "fail": 40, "refuses": 20, "naps": 20}
PAYLOAD = "jsonb_build_object('seconds', 0.02 + random() * 0.2, 'times', 1)"
ENDS = {"succeed": "succeeded", "plain": "succeeded", "fail": "succeeded", "refuses": "failed", "naps": "succeeded"}
"""How each actor ends its jobs, whatever happens to the processes around it."""


class Trial:
    """Two workers, a scheduler, and a load of jobs of every kind, some of them for a moment from now."""

    def __init__(self, fleet: Fleet, jobs: JobTable) -> None:
        self.fleet = fleet
        self.jobs = jobs
        self.unstarted = 0
        """Rows that were claimed, and not begun, when their worker was killed."""
        self._groups: dict[int, str] = {}

    async def begin(self) -> None:
        for actor, count in LOAD.items():
            await self.jobs.plant(count - count // 4, actor=f"'{actor}'", payload=PAYLOAD, max_attempts="50")
            await self.jobs.plant(
                count // 4,
                actor=f"'{actor}'",
                payload=PAYLOAD,
                max_attempts="50",
                status="'scheduled'",
                scheduled_at="clock_timestamp() + random() * interval '3 seconds'",
            )
        self.scheduler = self.fleet.scheduler(ready=False)
        self.workers = [self.worker("a"), self.worker("b")]

    def worker(self, group: str) -> Command:
        worker = self.fleet.worker(concurrency=4, ready=False, env={"TASKQ_WORKER_GROUP": group})
        self._groups[worker.pid] = group
        return worker

    async def kill(self, *workers: Command) -> None:
        """SIGKILL workers and count what they had claimed and not begun."""
        pids = [worker.pid for worker in workers]
        for worker in workers:
            worker.signal(signal.SIGKILL)
        for worker in workers:
            worker.wait()
        await eventually(lambda: self._over(pids))
        held = await self.jobs.conn.fetch(
            f'select j.id, j.epoch from "{self.jobs.schema}".jobs j join "{self.jobs.schema}".workers w'
            " on w.id = j.worker_id where j.status = 'running' and w.pid = any($1)",
            pids,
        )
        begun = {(one.job, one.epoch) for one in self.fleet.executions()}
        self.unstarted += sum((str(row["id"]), row["epoch"]) not in begun for row in held)
        assert any((str(row["id"]), row["epoch"]) in begun for row in held), "no job was running when it was killed"

    async def _over(self, pids: list[int]) -> bool:
        """Whether the server has ended the sessions of dead workers: a claim may commit after its worker died."""
        names = [f"taskqd/{self.jobs.schema}/{self._groups[pid]}/dispatch" for pid in pids]
        return not await self.jobs.conn.fetchval(
            "select count(*) from pg_stat_activity where application_name = any($1)", names
        )

    async def check(self) -> None:
        """Wait for the end of every job and settle the accounts."""
        await eventually(self._all_ended, WAIT)
        schema = self.jobs.schema
        rows = await self.jobs.conn.fetch(
            f'select id, actor, status::text, attempt, epoch, snooze_count, error_class from "{schema}".jobs'
        )
        assert len(rows) == sum(LOAD.values())
        executions = self.fleet.executions()
        attempts_seen = Counter((one.job, one.epoch) for one in executions)
        assert max(attempts_seen.values()) == 1, "an attempt was executed twice"
        per_job = Counter(one.job for one in executions)
        spent = 0
        for row in rows:
            assert row["status"] == ENDS[row["actor"]], dict(row)
            assert row["error_class"] == ("KeyError" if row["actor"] == "refuses" else None)
            # A snooze gives its attempt back, but was executed. So does a row handed back unstarted, which was not.
            attempts = row["attempt"] + row["snooze_count"]
            spent += attempts
            assert 1 <= per_job[str(row["id"])] <= attempts
            assert attempts <= (row["epoch"] + 1) // 2, "each claim and each hand-back raises the epoch"
            history = await self.jobs.attempts(row["id"])
            assert all(one["epoch"] < row["epoch"] for one in history), "the end is written by the last attempt"
        assert spent <= len(executions) + self.unstarted

    async def _all_ended(self) -> bool:
        counts = await self.jobs.counts()
        return counts.get("succeeded", 0) + counts.get("failed", 0) == sum(LOAD.values())


@pytest.fixture
async def trial(fleet: Fleet, jobs: JobTable) -> Trial:
    trial = Trial(fleet, jobs)
    await trial.begin()
    return trial


async def test_a_worker_is_killed(trial: Trial) -> None:
    await trial.fleet.wait_for_executions(80)
    await trial.kill(trial.workers[0])
    await trial.check()
    assert trial.workers[1].process.poll() is None


async def test_the_scheduler_is_killed(trial: Trial) -> None:
    await trial.fleet.wait_for_executions(80)
    trial.scheduler.signal(signal.SIGKILL)
    trial.scheduler.wait()
    await trial.fleet.wait_for_executions(160)
    trial.fleet.scheduler()
    await trial.check()
    assert [worker.process.poll() for worker in trial.workers] == [None, None]


async def test_everything_is_killed_and_started_again(trial: Trial) -> None:
    await trial.fleet.wait_for_executions(80)
    trial.scheduler.signal(signal.SIGKILL)
    await trial.kill(*trial.workers)
    trial.worker("c")
    trial.fleet.scheduler()
    await trial.check()


async def test_workers_are_killed_one_after_the_other(trial: Trial) -> None:
    """Each survives only as long as it takes to be in the middle of something."""
    for round_ in range(3):
        victim = trial.workers[0]
        await eventually(lambda pid=victim.pid: sum(one.pid == pid for one in trial.fleet.executions()) > 20, WAIT)
        await trial.kill(trial.workers.pop(0))
        trial.workers.append(trial.worker(f"c{round_}"))
    await trial.check()


async def test_a_worker_is_stopped_under_load(trial: Trial) -> None:
    await trial.fleet.wait_for_executions(80)
    trial.workers[0].signal(signal.SIGTERM)
    assert await asyncio.to_thread(trial.workers[0].wait) == 0
    trial.worker("c")
    await trial.check()
    crashed = await trial.jobs.conn.fetchval(
        f"select count(*) from \"{trial.jobs.schema}\".job_attempts where outcome = 'crashed'"
    )
    assert crashed == 0, "a stop is no crash"
