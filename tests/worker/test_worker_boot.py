"""A worker that cannot start says why, once, and ends with a code that tells a supervisor what to do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import asyncpg
import pytest

from tests.fleet import Fleet, ask, wait_for_event
from tests.jobs import JobTable
from tests.postgres import PASSWORD_ROLE, Server
from tests.support import wait_until


def errors(text: str) -> list[str]:
    """The error lines that a command printed beside its log."""
    return [line for line in text.splitlines() if line.startswith("error: ")]


def nowhere(directory: Path, password: str = "") -> str:
    """The DSN of a server that is down."""
    secret = f":{password}" if password else ""
    return f"postgresql://postgres{secret}@/postgres?host={directory}"


def test_a_database_that_is_down_is_waited_for_within_bounds(fleet: Fleet, short_dir: Path) -> None:
    env = {"TASKQ_PG_DSN": nowhere(short_dir, "hunter2"), "TASKQ_DATABASE_BOOT_TIMEOUT": "1"}
    began = time.monotonic()
    worker = fleet.worker(ready=False, env=env)
    assert worker.wait() == 69
    assert 1.0 <= time.monotonic() - began < 10
    (message,) = errors(worker.stderr)
    assert "not reachable" in message
    assert "tried" in message
    assert "hunter2" not in worker.stderr + worker.stdout
    assert "Traceback" not in worker.stderr


def test_a_database_that_comes_up_in_time_is_used(fleet: Fleet, server: Server, short_dir: Path) -> None:
    late = short_dir / "late"
    late.mkdir()
    worker = fleet.worker(ready=False, env={"TASKQ_PG_DSN": nowhere(late)})
    wait_for_event(worker, "database-unavailable")
    (late / ".s.PGSQL.5432").symlink_to(server.root / ".s.PGSQL.5432")
    wait_for_event(worker, "worker-ready")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_database_is_down_ends_the_boot(fleet: Fleet, short_dir: Path, number: signal.Signals) -> None:
    worker = fleet.worker(ready=False, env={"TASKQ_PG_DSN": nowhere(short_dir), "TASKQ_DATABASE_BOOT_TIMEOUT": "600"})
    wait_for_event(worker, "database-unavailable")
    began = time.monotonic()
    worker.signal(number)
    assert worker.wait() == 0
    assert time.monotonic() - began < 2


async def test_a_wrong_password_is_refused_for_good(fleet: Fleet, server: Server, conn: asyncpg.Connection) -> None:
    if not await conn.fetchval("select exists (select from pg_roles where rolname = $1)", PASSWORD_ROLE):
        await conn.execute(f"create role {PASSWORD_ROLE} login password 'right'")
    began = time.monotonic()
    worker = fleet.worker(ready=False, env={"TASKQ_PG_DSN": server.dsn(PASSWORD_ROLE, "hunter2")})
    assert worker.wait() == 78
    assert time.monotonic() - began < 10, "another attempt cannot help"
    (message,) = errors(worker.stderr)
    assert "refused the connection" in message
    assert "hunter2" not in worker.stderr + worker.stdout


def test_a_schema_that_is_not_migrated(fleet: Fleet) -> None:
    worker = fleet.worker(ready=False, env={"TASKQ_SCHEMA_NAME": "nothing_here"})
    assert worker.wait() == 75
    (message,) = errors(worker.stderr)
    assert "nothing_here" in message
    assert "taskqd migrate up" in message


async def test_a_schema_that_is_too_new(fleet: Fleet, jobs: JobTable) -> None:
    await jobs.conn.execute(f'update "{jobs.schema}".schema_migrations set min_code = 99')
    worker = fleet.worker(ready=False)
    assert worker.wait() == 75
    (message,) = errors(worker.stderr)
    assert "99" in message


@pytest.mark.parametrize(
    ("source", "reference", "message", "tracebacks"),
    [
        ("import nothing_like_this", "app:actors", "does not import", 1),
        ("raise RuntimeError('on purpose')", "app:actors", "on purpose", 1),
        ("actors = []", "app:actors", "holds no actors", 0),
        ("actors = (a for a in [])", "app:actors", "can be read only once", 0),
        ("actors = 5", "app:actors", "must be a list, a tuple or a mapping", 0),
        ("actor = []", "app:actors", "did you mean 'actor'?", 0),
        ("", "no_such_module:actors", "no module named 'no_such_module'", 0),
        ("", "app", "module:attribute", 0),
    ],
    ids=["import", "raises", "empty", "generator", "number", "typo", "module", "form"],
)
def test_a_registry_that_cannot_be_had_is_refused_for_good(
    fleet: Fleet, short_dir: Path, source: str, reference: str, message: str, tracebacks: int
) -> None:
    (short_dir / "app.py").write_text(source)
    worker = fleet.worker(ready=False, actors=reference)
    assert worker.wait() == 78
    (error,) = errors(worker.stderr)
    assert message in error
    assert worker.stderr.count("Traceback (most recent call last)") == tracebacks


@pytest.mark.parametrize(
    ("path", "message"),
    [("x" * 120, "107"), ("no/such/directory/worker.sock", "no/such/directory")],
    ids=["too-long", "no-directory"],
)
def test_a_health_socket_that_cannot_be_had_is_refused_for_good(
    fleet: Fleet, short_dir: Path, path: str, message: str
) -> None:
    worker = fleet.worker(ready=False, env={"TASKQ_HEALTH_SOCKET_PATH": str(short_dir / path)})
    assert worker.wait() == 78
    (error,) = errors(worker.stderr)
    assert message in error


def test_settings_that_contradict_each_other_are_refused_for_good(fleet: Fleet) -> None:
    worker = fleet.worker(ready=False, env={"TASKQ_LOCK_LEASE": "2"})
    assert worker.wait() == 78
    assert "2.5" in worker.stderr
    assert "lock_lease" in worker.stderr.lower()


async def test_what_it_needs_and_serves_is_logged_once(fleet: Fleet, jobs: JobTable) -> None:
    worker = fleet.worker(concurrency=6, env={"TASKQ_MAINTENANCE": "auto"})
    budget = wait_for_event(worker, "worker-startup-budget")
    assert (budget["direct"], budget["pooled"], budget["total"]) == (10, 9, 19)
    ready = wait_for_event(worker, "worker-ready")
    assert ready["queues"] == ["default"]
    row = await jobs.conn.fetchrow(f'select * from "{jobs.schema}".workers')
    assert (str(row["id"]), row["pid"], row["queues"], row["max_concurrency"]) == (
        ready["worker_id"],
        worker.pid,
        ["default"],
        6,
    )


async def test_sessions_say_whose_they_are_and_stay_within_the_budget(fleet: Fleet, jobs: JobTable) -> None:
    worker = fleet.worker(concurrency=4)
    await jobs.plant(300)
    await fleet.wait_for_executions(300)
    names = await jobs.conn.fetch(
        "select application_name from pg_stat_activity where application_name like $1", f"taskqd/{jobs.schema}/%"
    )
    roles = {record[0].rsplit("/", 1)[1] for record in names}
    assert {"dispatch", "heartbeat", "notify"} <= roles <= {"dispatch", "heartbeat", "notify", "worker"}
    assert len(names) <= 16
    assert worker.process.poll() is None


async def test_what_the_code_declares_is_stored_and_what_the_operator_set_stays(fleet: Fleet, jobs: JobTable) -> None:
    worker = fleet.worker()
    config = f'"{jobs.schema}".actor_config'
    row = await jobs.conn.fetchrow(f"select * from {config} where actor = 'backs_off'")
    assert (row["queue"], row["max_attempts"], row["retry_base"], row["retry_jitter"]) == ("default", 2, 1.5, 0)
    await jobs.conn.execute(f"update {config} set queue = 'elsewhere', max_concurrent = 3 where actor = 'backs_off'")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    again = fleet.worker()
    override = wait_for_event(again, "actor-config-queue-override")
    assert (override["actor"], override["declared"], override["stored"]) == ("backs_off", "default", "elsewhere")
    row = await jobs.conn.fetchrow(f"select * from {config} where actor = 'backs_off'")
    assert (row["queue"], row["max_concurrent"]) == ("elsewhere", 3)


def test_workers_that_start_at_once_agree(fleet: Fleet) -> None:
    workers = [fleet.worker(ready=False) for _ in range(3)]
    for worker in workers:
        wait_for_event(worker, "worker-ready")
        assert '"actor-config-queue-override"' not in worker.stderr


def test_the_health_socket_answers_and_goes_with_the_process(fleet: Fleet, short_dir: Path) -> None:
    path = short_dir / "w.sock"
    worker = fleet.worker(env={"TASKQ_HEALTH_SOCKET_PATH": str(path)})
    assert ask(path, "/live").startswith("HTTP/1.1 200")
    assert ask(path, "/ready").startswith("HTTP/1.1 200")
    assert "taskq_worker_max_concurrency 4" in ask(path, "/metrics")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    wait_until(lambda: not path.exists())
