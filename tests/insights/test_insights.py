"""What queues and schedules suffer from, told by what has ended and what waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from taskqd.domain.ids import new_uuid
from taskqd.insights import InsightKind, QueueFigures, ScheduleFigures, insights_sql, read_insights
from taskqd.settings import load_settings
from taskqd.storage.doctor import Severity, examine
from taskqd.storage.doctor_queue import check_insights
from taskqd.storage.insights import judge
from taskqd.storage.statements import load
from tests.jobs import JobTable
from tests.support import Command

Start = Callable[..., Command]
QUIET: dict[str, Any] = {
    "queue": "q",
    "seconds": 3600.0,
    "waiting": 0,
    "oldest_wait": 0.0,
    "running": 0,
    "ended": 1000,
    "ended_badly": 0,
    "since": 3600.0,
    "busy": 3600.0,
    "wait_p95": 1.0,
    "workers": 1,
    "slots": 4,
    "paused": False,
}


@pytest.mark.parametrize(
    ("figures", "kinds"),
    [
        ({}, []),
        ({"waiting": 5, "oldest_wait": 59.0}, []),
        ({"waiting": 5, "oldest_wait": 61.0}, [InsightKind.STARVED]),
        ({"waiting": 5, "oldest_wait": 61.0, "paused": True}, []),
        ({"waiting": 5, "oldest_wait": 90.0, "wait_p95": 30.0}, []),
        ({"waiting": 5, "oldest_wait": 121.0, "wait_p95": 30.0}, [InsightKind.STARVED]),
        ({"waiting": 5, "oldest_wait": 61.0, "ended": 0, "busy": 0.0, "wait_p95": None}, [InsightKind.STARVED]),
        ({"waiting": 7000, "oldest_wait": 5.0}, []),  # two times what the slots do
        ({"waiting": 7100, "oldest_wait": 5.0}, [InsightKind.STARVED]),
        ({"waiting": 23_000, "oldest_wait": 5.0, "slots": 40}, []),  # 23 h
        ({"waiting": 25_000, "oldest_wait": 5.0, "slots": 40}, [InsightKind.SLOW_DRAIN]),  # 25 h
        ({"busy": 1400.0}, [InsightKind.OVER_PROVISIONED]),
        ({"busy": 1400.0, "ended": 99}, []),
        ({"busy": 1400.0, "waiting": 1}, []),
        ({"busy": 1400.0, "slots": 1}, []),
        ({"busy": 0.0, "slots": 0}, []),
    ],
)
def test_the_verdicts_on_a_queue(figures: dict[str, Any], kinds: list[InsightKind]) -> None:
    found = judge([QueueFigures(**QUIET | figures)], [])
    assert [each.kind for each in found] == kinds
    assert all(each.subject == "q" and each.what and each.do for each in found)


def test_what_it_would_take_is_told() -> None:
    (idle,) = judge([QueueFigures(**QUIET | {"busy": 3600.0, "slots": 64})], [])
    assert idle.what == "2% of the time of 64 slots was used; 2 would do twice the work"


@pytest.mark.parametrize(
    ("now", "before", "backlog", "runs_away"),
    [
        ((60, 60), (60, 60), 5, False),
        ((60, 50), (60, 60), 15, False),  # one window is no trend
        ((60, 50), (60, 50), 20, True),
        ((60, 59), (60, 59), 2, False),  # these are on their way
        ((60, 60), (60, 60), 61, True),  # more than it ever clears
    ],
)
def test_the_verdict_on_a_schedule(
    now: tuple[int, int], before: tuple[int, int], backlog: int, runs_away: bool
) -> None:
    one = ScheduleFigures("nightly", "report", True, *now, *before, backlog, 300.0, 0)
    assert [each.kind for each in judge([], [one])] == ([InsightKind.RUNAWAY] if runs_away else [])


async def test_the_figures_of_queues(conn: asyncpg.Connection, jobs: JobTable, schema: str, pool: Any) -> None:
    ended = {
        "status": "'succeeded'",
        "created_at": "now() - interval '1 day'",
        "scheduled_at": "now() - interval '100 s'",
        "started_at": "now() - interval '90 s'",
        "finished_at": "now() - interval '60 s'",
    }
    await jobs.plant(9, **ended)
    await jobs.plant(1, **ended | {"status": "'failed'", "scheduled_at": "now() - interval '190 s'"})
    await jobs.plant(1, **ended | {"finished_at": "now() - interval '3 hours'"})
    await _plant_waiting(jobs, 2, "30 s", priority="5")
    await _plant_waiting(jobs, 1, "500 s", priority="-5")  # behind, and older than all others
    await _plant_waiting(jobs, 3, "40 s", route="'mail'", lane="'a:mailer'")
    await jobs.plant(1, status="'running'", claimed_at="now() - interval '10 s'", worker_id=f"'{new_uuid()}'")
    await conn.execute(
        f'insert into "{schema}".jobs_archive select j.*, now(), now() from "{schema}".jobs j '
        f"where status = 'failed'; delete from \"{schema}\".jobs where status = 'failed'"
    )
    for queues in (["default"], ["default", "mail"]):
        await conn.execute(
            f'insert into "{schema}".workers (id, hostname, pid, queues, max_concurrency) values ($1, $2, 1, $3, 8)',
            new_uuid(),
            "h",
            queues,
        )
    found = await read_insights(pool, schema, window=600)
    figures = {one.queue: one for one in found.queues}
    one, mail = figures["default"], figures["mail"]
    assert (one.waiting, one.running, one.ended, one.ended_badly) == (3, 1, 10, 1)
    assert (one.workers, one.slots, mail.workers, mail.slots) == (2, 16, 1, 8)
    assert 500 <= one.oldest_wait < 620
    assert 40 <= mail.oldest_wait < 160
    assert one.wait_p95 is not None
    assert 10 <= one.wait_p95 <= 100
    assert 310 <= one.busy < 430  # ten of 30 s, and one that runs
    assert one.seconds == 600
    assert (mail.waiting, mail.ended, mail.rate, mail.drain) == (3, 0, 0.0, None)
    assert [each.kind for each in found.found if each.subject == "default"] == [InsightKind.STARVED]


async def test_a_job_that_fills_in_the_past_has_not_waited_since_then(
    jobs: JobTable, schema: str, conn: asyncpg.Connection
) -> None:
    past = {"scheduled_at": "now() - interval '90 days'"}
    ended = past | {"status": "'succeeded'", "started_at": "clock_timestamp()", "finished_at": "clock_timestamp()"}
    await jobs.plant(3, **past)
    await jobs.plant(5, **ended)
    found = await read_insights(conn, schema, window=600)
    (one,) = found.queues
    assert (one.waiting, one.ended) == (3, 5)
    assert one.oldest_wait < 600
    assert one.wait_p95 is not None
    assert one.wait_p95 < 600


async def _plant_waiting(jobs: JobTable, count: int, since: str, **columns: str) -> None:
    """Plant jobs that were created, and due, so long ago."""
    moment = f"now() - interval '{since}'"
    await jobs.plant(count, created_at=moment, scheduled_at=moment, **columns)


async def test_fires_against_clearance_names_the_schedule_that_runs_away(
    conn: asyncpg.Connection, jobs: JobTable, schema: str
) -> None:
    for name, left in (("quick", 0), ("slow", 6)):
        schedule, decision = new_uuid(), new_uuid()
        await conn.execute(
            f'insert into "{schema}".schedules (id, name, source, actor, kind, expression) '
            "values ($1, $2, 'api', 'succeed', 'every', '60')",
            schedule,
            name,
        )
        await conn.execute(
            f'insert into "{schema}".schedule_decisions (id, schedule_id, version, action, skipped) '
            "values ($1, $2, 1, 'fired', 4)",
            decision,
            schedule,
        )
        ids = await jobs.plant(8 - left, status="'succeeded'", finished_at="now() - interval '10 s'")
        ids += await jobs.plant(left) if left else []
        await conn.execute(
            f'insert into "{schema}".schedule_occurrences (schedule_id, due_at, decision_id, job_id, outcome, '
            "created_at) select $1, now() - n * interval '1 min', $2, id, 'fired', now() - n * interval '1 min' "
            "from unnest($3::uuid[]) with ordinality g(id, n)",
            schedule,
            decision,
            ids,
        )
    found = await read_insights(conn, schema, window=240)
    quick, slow = found.schedules
    assert (quick.cleared, quick.backlog, quick.skipped) == (8, 0, 4)
    assert (slow.cleared, slow.backlog) == (2, 6)
    assert slow.oldest_open >= 480
    assert [(each.kind, each.subject) for each in found.found if each.kind is InsightKind.RUNAWAY] == [
        (InsightKind.RUNAWAY, "slow")
    ]


async def test_it_leaves_a_session_as_it_was(conn: asyncpg.Connection, schema: str) -> None:
    await read_insights(conn, schema)
    assert not conn.is_in_transaction()
    assert await conn.fetchval("show enable_sort") == "on"
    async with conn.transaction():
        await read_insights(conn, schema)
        assert await conn.fetchval("show enable_sort") == "on"


async def test_the_statements_can_be_used_elsewhere(conn: asyncpg.Connection, schema: str) -> None:
    statements = insights_sql(schema, window=600)
    assert set(statements) == {"queues", "schedules"}
    for sql in statements.values():
        assert "$" not in sql
        await conn.fetch(sql)


async def test_a_window_has_bounds(conn: asyncpg.Connection, schema: str) -> None:
    for window in (59.0, 7 * 86400 + 1):
        with pytest.raises(ValueError, match="must be between 60 and 604800 seconds"):
            await read_insights(conn, schema, window=window)


async def test_a_hidden_backlog_is_reached_by_its_index(conn: asyncpg.Connection, jobs: JobTable, schema: str) -> None:
    await conn.execute(f'alter table "{schema}".jobs set (autovacuum_enabled = off)')
    await jobs.plant(3)
    await conn.execute(f'analyze "{schema}".jobs')
    await jobs.plant(20_000)
    async with conn.transaction():
        await conn.execute(load("insights", schema).pin)
        plan = await conn.fetchval(f"explain (format json, costs off) {insights_sql(schema)['queues']}")
    kinds = {node["Node Type"] for node in _nodes(json.loads(plan)[0]["Plan"]) if node.get("Relation Name") == "jobs"}
    assert kinds <= {"Index Scan", "Index Only Scan"}, plan


def _nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for child in plan.get("Plans", ()) for node in _nodes(child))]


async def test_the_command(start: Start, child_env: dict[str, str], jobs: JobTable) -> None:
    def insights(*flags: str) -> tuple[int, str]:
        command = start("insights", *flags, env=child_env)
        return command.wait(60), command.stdout

    assert insights() == (0, "nothing is starved, drains slowly, idles or runs away\n")
    await _plant_waiting(jobs, 2, "10 min")
    code, out = insights("--window", "10m")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["queue", "waiting", "oldest"]
    assert "starved: default: 2 wait, the oldest for 6" in out
    told = json.loads(insights("--json")[1])
    assert (told["window"], told["found"][0]["kind"], told["queues"][0]["waiting"]) == (3600, "starved", 2)
    assert "with recursive heads" in insights("--sql")[1]
    command = start("insights", "--window", "1s", env=child_env)
    assert command.wait(60) == 2
    assert "must be between 60 and 604800 seconds" in command.stderr


async def test_the_doctor_tells_of_them(jobs: JobTable, conn: asyncpg.Connection, schema: str, dsn: str) -> None:
    await _plant_waiting(jobs, 2, "10 min")
    settings = load_settings(environ={"TASKQ_PG_DSN": dsn, "TASKQ_SCHEMA_NAME": schema})
    own = await asyncpg.connect(dsn, timeout=30)
    try:
        (found,) = await examine(own, settings, [("insights", check_insights)])
    finally:
        await own.close(timeout=10)
    assert (found.severity, found.where) == (Severity.WARN, "queue default")
    assert found.what.startswith("starved: 2 wait")
