"""The life of jobs on a real Postgres, against an oracle that knows nothing of SQL.

Hypothesis sends what clients, workers, the reaper and operators send, in any order; whoever ever held a job writes for
it again, late or twice. After every step the oracle says what each row must be.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from taskqd.client.control import JobControl
from taskqd.domain.errors import IllegalStateTransition
from taskqd.domain.status import TERMINAL
from taskqd.domain.transitions import TRANSITIONS, Attempt, Transition, find
from taskqd.storage.connect import connect
from taskqd.storage.migrate import migrate_up
from tests.jobs import JobTable
from tests.postgres import Server

STEPS = 10_000
LONG = 2000.0
"""Seconds: longer than any deadline of a job, which is half of it away."""


@dataclass
class Job:
    """What the oracle knows of a job."""

    id: UUID
    status: str
    max_attempts: int
    kind: str
    delay: float
    deadline: str | None
    """None, "ahead" (sooner than a long delay ends), or "past"."""
    batch: UUID | None = None
    lane: str = ""
    epoch: int = 0
    attempt: int = 0
    interrupts: int = 0
    snoozes: int = 0
    cancelled: bool = False
    phase: int = 0
    worker: UUID | None = None
    lapsed: bool = False
    history: dict[int, str] = field(default_factory=dict)

    def may_retry(self, override: str | None = None) -> bool:
        kind = override or self.kind
        return kind == "indefinite" or (kind == "transient" and self.attempt < self.max_attempts)

    def in_time(self, delay: float) -> bool:
        return self.deadline is None or (self.deadline == "ahead" and delay < LONG / 2)


CAPPED = "a:capped"
BATCHES = (UUID(int=1), UUID(int=2))
"""The batches of two thirds of the jobs."""

LANES = ("", "", "", CAPPED, "i:succeed\x1fx", "i:succeed\x1fy")
"""The lanes of jobs, one after the other: plain, of an actor with a limit, of two identities."""

LIMITED: tuple[dict[str, Any], ...] = (
    {"kind": "lane", "lane": CAPPED, "gates": [CAPPED]},
    {"kind": "serial", "actor": "succeed"},
)
"""What is claimed from the lanes with limits."""

Token = tuple[UUID, int]
"""Who once held a job: (job id, epoch)."""


class Life(RuleBasedStateMachine):
    """One schema, a few workers, and every statement that changes a job."""

    loop: ClassVar[asyncio.AbstractEventLoop]
    conn: ClassVar[asyncpg.Connection]
    table: ClassVar[JobTable]
    control: ClassVar[JobControl]
    steps: ClassVar[int] = 0
    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[UUID, Job] = {}
        self.tokens: list[Token] = []
        self.workers: list[UUID] = []
        self.cap = 2
        self.stopping: set[UUID] = set()
        self.dead: set[UUID] = set()
        self.ends: dict[tuple[UUID | None, str], int] = {}

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, 30))

    def sql(self, text: str, *arguments: Any) -> Any:
        return self.run(self.conn.fetch(text.replace("{s}", f'"{self.table.schema}"'), *arguments))

    # -- the oracle ---------------------------------------------------------------------------------

    def moves(self, job: Job, event: str, to: str) -> None:
        """Move a job by a transition of the table."""
        one: Transition = find(event)
        assert job.status in one.sources, (event, job)
        assert to in one.targets, (event, to)
        Life.seen[event] += 1
        ended_by_others = one.raises_epoch and to in TERMINAL
        if job.status == "running" and (to not in TERMINAL or ended_by_others) and event != "hand back":
            outcome = {"retry": "retried", "snooze": "snoozed", "interrupt": "interrupted"}.get(event, "crashed")
            job.history[job.epoch] = outcome
        job.status = to
        job.epoch += one.raises_epoch
        job.attempt += {Attempt.SPENT: 1, Attempt.GIVEN_BACK: -1, Attempt.KEPT: 0}[one.attempt]
        job.lapsed = False
        if to == "running":
            return
        job.phase = 0
        if to not in TERMINAL:
            job.worker, job.cancelled = None, False

    def running(self, lane: str) -> int:
        """How many jobs of a lane run."""
        return sum(job.status == "running" and job.lane == lane for job in self.jobs.values())

    def able(self, lane: str) -> list[UUID]:
        """The jobs of a lane that may begin."""
        waiting = [job for job in self.jobs.values() if job.status == "pending" and job.lane == lane]
        return [job.id for job in waiting if job.deadline != "past"]

    def held(self, token: Token) -> Job | None:
        """The job of a token that is still good."""
        job = self.jobs[token[0]]
        return job if job.status == "running" and job.epoch == token[1] else None

    def writer(self, data: st.DataObject) -> Token:
        """Draw who writes: as a rule somebody whose token is good, else anybody who ever held a job."""
        good = [token for token in self.tokens if self.held(token)]
        late = not good or data.draw(st.integers(0, 3)) == 0
        return data.draw(st.sampled_from(self.tokens if late else good))

    @staticmethod
    def waits(delay: float) -> str:
        return "scheduled" if delay > 0 else "pending"

    def check(self) -> None:
        """Compare every row with what the oracle says."""
        Life.steps += 1
        rows = self.sql(
            """select *, status::text as state, schedule_to_close <= clock_timestamp() as late,
                (select held from {s}.gates where bucket = $1) as gate,
                array(select (epoch, outcome) from {s}.job_attempts a where a.job_id = j.id) as history
            from {s}.jobs j order by id""",
            CAPPED,
        )
        assert [row["id"] for row in rows] == sorted(self.jobs)
        for row in rows:
            job = self.jobs[row["id"]]
            found = (row["state"], row["epoch"], row["attempt"], row["interrupt_count"], row["snooze_count"])
            assert found == (job.status, job.epoch, job.attempt, job.interrupts, job.snoozes), job
            assert (row["cancel_requested_at"] is not None, row["cancel_phase"]) == (job.cancelled, job.phase), job
            assert row["worker_id"] == job.worker, job
            assert row["max_attempts"] == job.max_attempts, job
            assert (row["lock_expires_at"] is not None) == (job.status == "running"), job
            assert (row["finished_at"] is not None) == (job.status in TERMINAL), job
            assert row["lane"] == job.lane, job
            assert (row["held_gates"] is not None) == (job.status == "running" and job.lane == CAPPED), job
            assert row["late"] is (None if job.deadline is None else job.deadline == "past"), job
            assert dict(row["history"]) == job.history, job
        assert {row["gate"] for row in rows} <= {self.running(CAPPED)}
        assert all(self.running(lane) <= 1 for lane in LANES if lane.startswith("i:")), "two of one identity run"
        statuses = Counter((job.batch, job.status) for job in self.jobs.values())
        ends = {key: count for key, count in statuses.items() if key[1] in TERMINAL}
        if ends != self.ends:  # what is counted wrong stays wrong until then
            self.ends = ends
            self.check_batches(statuses)

    def check_batches(self, statuses: Counter[tuple[UUID | None, str]]) -> None:
        """Compare the counters of every batch with how many of its jobs are where."""
        for row in self.sql("select * from {s}.batches"):
            of_batch = {status: count for (batch, status), count in statuses.items() if batch == row["id"]}
            assert {end: row[end] for end in TERMINAL} == {end: of_batch.get(end, 0) for end in TERMINAL}
            if of_batch and of_batch.keys() <= TERMINAL:
                assert (row["status"], row["completed_at"] is not None) == ("complete", True)

    # -- clients and workers ------------------------------------------------------------------------

    @initialize()
    def empty(self) -> None:
        self.sql("delete from {s}.jobs")
        self.sql("delete from {s}.workers")
        self.sql("delete from {s}.batches")
        self.sql("update {s}.gates set held = 0")
        for batch in BATCHES:  # which no sweep recounts
            self.sql("insert into {s}.batches (id, count_again_at) values ($1, '9999-12-31')", batch)
        self.sql("update {s}.actor_config set max_concurrent = $1 where actor = 'capped'", self.cap)
        self.register()
        for kind, deadline in (("transient", None), ("transient", "ahead"), ("indefinite", None)):
            self.add(max_attempts=2, kind=kind, delay=0.0, deadline=deadline, later=False)

    @precondition(lambda self: len(self.jobs) < 12)
    @rule(
        max_attempts=st.integers(1, 3),
        kind=st.sampled_from(["transient", "transient", "indefinite", "non_retryable"]),
        delay=st.sampled_from([0.0, LONG]),
        deadline=st.sampled_from([None, None, "ahead"]),
        later=st.booleans(),
    )
    def enqueue(self, **options: Any) -> None:
        self.add(**options)

    def add(self, *, max_attempts: int, kind: str, delay: float, deadline: str | None, later: bool) -> None:
        batch = (None, *BATCHES)[len(self.jobs) % 3]
        lane = LANES[len(self.jobs) % len(LANES)]
        identity = lane.partition("\x1f")[2]
        (job_id,) = self.run(
            self.table.plant(
                batch_id=f"'{batch}'" if batch else "null",
                actor="'capped'" if lane == CAPPED else "'succeed'",
                lane=f"'{lane}'",
                identity_key=f"'{identity}'" if identity else "null",
                serial=str(bool(identity)),
                heartbeat_timeout=f"interval '{LONG} seconds'",
                status="'scheduled'" if later else "'pending'",
                scheduled_at="clock_timestamp() + interval '1 day'" if later else "clock_timestamp()",
                max_attempts=str(max_attempts),
                retry_kind=f"'{kind}'",
                retry_base=str(delay),
                retry_jitter="0",
                schedule_to_close=f"clock_timestamp() + interval '{LONG / 2} seconds'" if deadline else "null",
            )
        )
        status = "scheduled" if later else "pending"
        self.jobs[job_id] = Job(job_id, status, max_attempts, kind, delay, deadline, batch, lane)
        self.check()

    @rule()
    def register(self) -> None:
        self.workers = [*self.workers[-2:], self.run(self.table.register())]  # the oldest is heard of no more

    @rule(data=st.data(), count=st.sampled_from([1, 2, 100]))
    def claim(self, data: st.DataObject, count: int) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        claimed = self.run(self.table.claim(worker, count))
        able = self.able("")
        assert {record["id"] for record in claimed} <= set(able)
        assert len(claimed) == min(count, len(able))
        self.claimed(worker, claimed)

    @rule(data=st.data(), room=st.sampled_from([1, 2, 100]), cap=st.sampled_from([None, None, None, 0, 1, 3]))
    def claim_limited(self, data: st.DataObject, room: int, cap: int | None) -> None:
        if cap is not None:
            self.cap = cap
            self.sql("update {s}.actor_config set max_concurrent = $1 where actor = 'capped'", cap)
        worker = data.draw(st.sampled_from(self.workers))
        claimed, _ = self.run(self.table.claim_lanes(worker, room, *LIMITED))
        self.claimed_limited(worker, room, claimed)

    def claimed_limited(self, worker: UUID, room: int, claimed: list[Any]) -> None:
        """Move the jobs that a worker has claimed of what is limited: as many as may run, in their order."""
        found = Counter(self.jobs[record["id"]].lane for record in claimed)
        capped = min(room, max(0, self.cap - self.running(CAPPED)), len(self.able(CAPPED)))
        free = [lane for lane in LANES if lane.startswith("i:") and not self.running(lane) and self.able(lane)]
        assert found[CAPPED] == capped
        assert len(claimed) == capped + min(room - capped, len(free))
        assert all(lane == CAPPED or (lane in free and found[lane] == 1) for lane in found)
        assert {record["id"] for record in claimed} <= {job for lane in found for job in self.able(lane)}
        self.claimed(worker, claimed)

    def claimed(self, worker: UUID, claimed: list[Any]) -> None:
        """Move the jobs that a worker has claimed."""
        for record in claimed:
            job = self.jobs[record["id"]]
            self.moves(job, "claim", "running")
            job.worker = worker
            assert (record["epoch"], record["attempt"]) == (job.epoch, job.attempt)
            assert (job.id, job.epoch) not in self.tokens, "an epoch was given twice"
            self.tokens.append((job.id, job.epoch))
        self.check()

    def settle(self, statement: str, token: Token, *columns: Any) -> None:
        """Send a settlement; the caller has moved the oracle already, which ``token`` held before."""
        self.run(self.conn.fetchrow(self.table.worker_sql[statement], [token[0]], [token[1]], *([c] for c in columns)))
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        token = self.writer(data)
        if job := self.held(token):
            self.moves(job, "succeed", "succeeded")
        applied = self.run(self.table.succeed(token[0], epoch=token[1], result="1"))
        assert (applied == [token[0]]) is bool(job)
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), room=st.sampled_from([1, 2, 100]))
    def succeed_and_claim(self, data: st.DataObject, room: int) -> None:
        token = self.writer(data)
        if job := self.held(token):
            self.moves(job, "succeed", "succeeded")
        worker = data.draw(st.sampled_from(self.workers))
        applied, claimed, _ = self.run(self.table.relay(token, worker, room, *LIMITED))
        assert applied is bool(job)
        if applied:
            self.claimed_limited(worker, room, claimed)
        else:
            assert claimed == []
            self.check()

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        kind=st.sampled_from([None, None, None, "non_retryable", "indefinite", "transient"]),
        own=st.sampled_from([None, None, 0.0, LONG]),
    )
    def fail(self, data: st.DataObject, kind: str | None, own: float | None) -> None:
        token = self.writer(data)
        if job := self.held(token):
            delay = job.delay if own is None else own
            if job.cancelled:
                self.moves(job, "end cancelled", "cancelled")
            elif job.may_retry(kind) and job.in_time(delay):
                self.moves(job, "retry", self.waits(delay))
            else:
                self.moves(job, "fail", "failed")
        self.settle("settle_failed", token, 0.1, "E", "m", None, kind, own, None)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), delay=st.sampled_from([0.0, LONG]))
    def snooze(self, data: st.DataObject, delay: float) -> None:
        token = self.writer(data)
        if job := self.held(token):
            job.snoozes += 1
            if job.cancelled:
                self.moves(job, "end cancelled", "cancelled")
            elif job.in_time(delay):
                self.moves(job, "snooze", self.waits(delay))
            else:
                self.moves(job, "fail", "failed")
        self.settle("settle_snoozed", token, 0.1, delay)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), began=st.booleans(), cancelled=st.booleans())
    def release(self, data: st.DataObject, began: bool, cancelled: bool) -> None:
        token = self.writer(data)
        if cancelled and (holds := self.held(token)) and not holds.cancelled:
            holds.phase, holds.cancelled = 1, True
            self.run(self.control.cancel(holds.id, None, None))
        if job := self.held(token):
            if job.cancelled:
                self.moves(job, "end cancelled" if began else "drop cancelled", "cancelled")
            else:
                job.interrupts += began
                self.moves(job, "interrupt" if began else "hand back", "pending")
        self.settle("settle_released", token, 0.1 if began else None, "worker_shutdown")

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        token = self.writer(data)
        if job := self.held(token):
            self.moves(job, "abandon", "abandoned")
        self.settle("settle_abandoned", token, 0.1)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        token = self.writer(data)
        lost = self.run(self.conn.fetch(self.table.worker_sql.renew, [token[0]], [token[1]], [0.1], 60.0, 58.0))
        job = self.held(token)
        assert [(one["id"], one["epoch"]) for one in lost] == ([] if job else [token])
        if job:
            job.lapsed = False
        self.check()

    # -- operators ----------------------------------------------------------------------------------

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        running = [job.id for job in self.jobs.values() if job.status == "running"]
        job = self.jobs[data.draw(st.sampled_from(sorted(running or self.jobs)))]
        initiated = job.status in ("pending", "scheduled") or (job.status == "running" and not job.cancelled)
        before = job.status
        if job.status == "running":
            job.phase = max(job.phase, 1)
            job.cancelled = True
        elif initiated:
            self.moves(job, "cancel", "cancelled")
            job.cancelled = True
        result = self.run(self.control.cancel(job.id, None, None))
        assert (result.previous_status, result.new_status, result.cancellation_initiated) == (
            before,
            job.status,
            initiated,
        )
        self.check()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def force(self, data: st.DataObject) -> None:
        token = self.writer(data)
        job = self.held(token)
        if job and job.cancelled:
            job.phase = 2
        self.run(self.conn.execute(self.table.worker_sql.force_cancel, *token))
        self.check()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def run_again(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if job.status in TERMINAL:
            job.history.setdefault(job.epoch, job.status)
            self.moves(job, "run again", "pending")
            job.max_attempts = max(job.max_attempts, job.attempt + 1)
            job.deadline = None if job.deadline == "past" else job.deadline
            self.run(self.control.retry(job.id, None))
        else:
            with pytest.raises(IllegalStateTransition):
                self.run(self.control.retry(job.id, None))
        self.check()

    # -- faults, and the passing of time ------------------------------------------------------------

    @rule(data=st.data())
    def stop_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.stopping.add(worker)
        self.run(self.conn.execute(self.table.worker_sql.stop_worker, worker))
        self.check()

    def reaped(self, job: Job) -> None:
        if job.cancelled:
            self.moves(job, "reap cancelled", "cancelled")
        elif job.worker in self.stopping:
            job.interrupts += 1
            self.moves(job, "interrupt", "pending")
        elif not job.may_retry():
            self.moves(job, "crash out", "crashed")
        elif job.in_time(job.delay):
            self.moves(job, "crash", self.waits(job.delay))
        else:
            self.moves(job, "crash out", "failed")

    def taken(self, job: Job) -> None:
        """Move a job that the reaper takes, with the row that it leaves in the history."""
        epoch, interrupted = job.epoch, not job.cancelled and job.worker in self.stopping
        self.reaped(job)
        job.history[epoch] = "interrupted" if interrupted else "crashed"

    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.dead.add(worker)
        for job in self.jobs.values():
            if job.status == "running" and job.worker == worker:
                self.taken(job)
        self.sql("select {s}.release(array[$1::uuid], 1000)", worker)
        self.check()

    @rule()
    def tick(self) -> None:
        for job in self.jobs.values():
            if job.status == "running" and (job.lapsed or job.worker in self.dead):
                self.taken(job)
        for job in self.jobs.values():
            if job.status in ("pending", "scheduled") and job.deadline == "past":
                self.moves(job, "expire", "failed")
        self.run(self.table.tick())
        self.check()

    @precondition(lambda self: any(job.status == "running" for job in self.jobs.values()))
    @rule(data=st.data(), cancelled=st.booleans(), heart=st.booleans(), swept=st.booleans())
    def lease_lapses(self, data: st.DataObject, cancelled: bool, heart: bool, swept: bool) -> None:
        running = [job.id for job in self.jobs.values() if job.status == "running"]
        job = self.jobs[data.draw(st.sampled_from(sorted(running)))]
        if cancelled and not job.cancelled:
            job.phase, job.cancelled = 1, True
            self.run(self.control.cancel(job.id, None, None))
        job.lapsed = True
        if heart:  # its heartbeat alone is missed
            lapsed = {"last_heartbeat_at": f"clock_timestamp() - interval '{2 * LONG} seconds'"}
        else:
            lapsed = {"lock_expires_at": "clock_timestamp() - interval '1 second'"}
        self.run(self.table.update([job.id], **lapsed))
        if swept:
            self.tick()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def deadline_passes(self, data: st.DataObject) -> None:
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if job.deadline == "ahead":
            job.deadline = "past"
            self.run(self.table.update([job.id], schedule_to_close="clock_timestamp() - interval '1 second'"))

    @rule()
    def everything_is_due(self) -> None:
        for job in self.jobs.values():
            if job.status == "scheduled":
                self.moves(job, "promote", "pending")
        self.sql("update {s}.jobs set scheduled_at = clock_timestamp() where status = 'scheduled'")
        self.run(self.table.promote())
        self.check()


@pytest.fixture(scope="module")
def life(server: Server) -> Iterator[type[Life]]:
    """The machine, on a schema and an event loop of its own."""
    loop = asyncio.new_event_loop()
    schema = f"t_{uuid.uuid4().hex[:12]}"

    async def prepare() -> asyncpg.Connection:
        plain = await asyncpg.connect(server.dsn(), timeout=30)
        await migrate_up(plain, schema)
        await plain.execute(
            f"""insert into "{schema}".actor_config (actor, queue, max_concurrent, max_attempts, retry_kind,
                    retry_backoff, retry_base, retry_cap, retry_jitter)
                values ('capped', 'default', 2, 3, 'transient', 'fixed', 0, 0, 0)"""
        )
        await plain.close(timeout=10)
        return await connect(server.dsn(), role="test", schema=schema, pinned=True)

    Life.loop, Life.steps, Life.seen = loop, 0, Counter()
    Life.conn = loop.run_until_complete(prepare())
    Life.table, Life.control = JobTable(Life.conn, schema), JobControl(Life.conn, schema)
    yield Life
    loop.run_until_complete(Life.conn.execute(f'drop schema "{schema}" cascade'))
    loop.run_until_complete(Life.conn.close(timeout=10))
    loop.close()


@pytest.mark.timeout(1200)
def test_the_sql_and_the_table_of_transitions_agree(life: type[Life]) -> None:
    run_state_machine_as_test(
        life,
        settings=settings(
            max_examples=250,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # a long shrink would end in the timeout instead of a message
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert life.steps >= STEPS
    assert life.seen.keys() == {one.event for one in TRANSITIONS}, "a transition was never taken"


def test_the_epochs_of_a_job_are_never_given_twice() -> None:
    """What is not an end of the attempt's own fences it off."""
    own = {"promote", "succeed", "fail", "end cancelled", "drop cancelled", "abandon"}
    assert {one.event for one in TRANSITIONS if not one.raises_epoch} == own
