"""What the doctor says of the server: snapshots, vacuum, notifications, clocks, connections."""

from __future__ import annotations

import time
from typing import Any

import asyncpg
import pytest

from taskqd.settings import load_settings
from taskqd.storage import doctor_server
from taskqd.storage.doctor import Finding, Patient, Severity, examine, listed, span
from taskqd.storage.doctor_server import (
    TUNED,
    check_clock,
    check_connections,
    check_notifications,
    check_settings,
    check_snapshots,
    check_vacuum,
)
from taskqd.storage.limits import Ceiling, ConnectionLimits, Share
from tests.doctor.conftest import Look
from tests.storage.test_pooler import pooler

__all__ = ["pooler"]


async def test_who_holds_a_snapshot_is_named_with_what_ends_it(
    other: asyncpg.Connection, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [each.severity for each in await look(check_snapshots)] == [Severity.OK]
    monkeypatch.setattr(doctor_server, "SNAPSHOT_WARN", 0.0)
    async with other.transaction(isolation="repeatable_read"):
        await other.execute("set local application_name = 'a report'")
        pid = await other.fetchval("select pg_backend_pid() from pg_class limit 1")
        (held,) = [each for each in await look(check_snapshots) if each.where == f"session {pid}"]
        assert held.severity is Severity.WARN
        assert "idle in transaction, of postgres, a report" in held.what
        assert held.do.endswith(f"select pg_terminate_backend({pid})")
        monkeypatch.setattr(doctor_server, "SNAPSHOT_FAIL", 0.0)
        assert Severity.FAIL in [each.severity for each in await look(check_snapshots)]


async def test_how_the_busy_tables_are_vacuumed_is_compared_and_can_be_set_right(
    conn: asyncpg.Connection, schema: str, look: Look
) -> None:
    assert [each.severity for each in await look(check_vacuum)] == [Severity.OK]
    await conn.execute(
        f'alter table "{schema}".jobs set (autovacuum_vacuum_scale_factor = 0.5, autovacuum_enabled = off); '
        f'alter table "{schema}".job_events reset (autovacuum_vacuum_insert_scale_factor); '
        f'alter table "{schema}".gates set (autovacuum_enabled = off)'
    )
    found = {each.where.split(".")[1]: each for each in await look(check_vacuum)}
    assert set(found) == {"jobs", "job_events", "gates"}
    assert found["jobs"].what == "autovacuum_enabled is off; autovacuum_vacuum_scale_factor is 0.5, not 0.01"
    assert found["job_events"].what == "autovacuum_vacuum_insert_scale_factor is not set, not 0.05"
    for each in found.values():
        assert each.severity is Severity.WARN
        await conn.execute(each.fix)
    assert [each.severity for each in await look(check_vacuum)] == [Severity.OK]
    await conn.execute(f'alter table "{schema}".jobs set (autovacuum_vacuum_scale_factor = 0.001)')
    assert [each.severity for each in await look(check_vacuum)] == [Severity.OK]  # sooner is fine


async def test_it_knows_how_the_migrations_set_the_tables(conn: asyncpg.Connection, schema: str) -> None:
    for table, wanted in TUNED.items():
        options = await conn.fetchval("select reloptions from pg_class where oid = $1::regclass", f"{schema}.{table}")
        assert {key: float(value) for key, value in (option.split("=") for option in options)} == wanted


async def test_dead_rows_that_nobody_removes_are_a_finding(
    conn: asyncpg.Connection, schema: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Patient.rows

    async def rows(self: Patient, name: str, *arguments: Any) -> list[Any]:
        found = await real(self, name, *arguments)
        if name != "tables":
            return found
        return [{**dict(row), "dead": 500_000, "live": 1000} if row["name"] == "jobs" else row for row in found]

    monkeypatch.setattr(Patient, "rows", rows)
    (dead,) = await look(check_vacuum)
    assert (dead.severity, dead.where) == (Severity.WARN, f"{schema}.jobs")
    assert dead.what == "500000 dead rows beside 1000 living, never vacuumed"


async def test_a_notification_makes_the_round(look: Look) -> None:
    (alive,) = await look(check_notifications)
    assert alive.severity is Severity.OK
    assert alive.what.startswith("one arrived after ")


async def test_a_transaction_pooler_in_between_is_a_finding(
    pooler: str, schema: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await _through(pooler, schema, dsn)
    assert found.severity is Severity.FAIL
    assert "is behind a pooler that refuses session settings" in found.what

    async def unset(_: Patient) -> asyncpg.Connection:
        return await asyncpg.connect(pooler, statement_cache_size=0, timeout=30)

    # And one that lets every session setting pass.
    monkeypatch.setattr(doctor_server, "_open", unset)
    found = await _through(pooler, schema, dsn)
    assert (found.severity, found.what) == (Severity.FAIL, "goes through a transaction pooler")


async def _through(pooler: str, schema: str, dsn: str) -> Finding:
    settings = load_settings(environ={"TASKQ_PG_DSN": pooler, "TASKQ_SCHEMA_NAME": schema})
    conn = await asyncpg.connect(dsn, timeout=30)
    try:
        (found,) = await examine(conn, settings, [("notifications", check_notifications)])
    finally:
        await conn.close(timeout=10)
    return found


async def test_a_clock_that_is_off_is_a_finding(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.severity for each in await look(check_clock)] == [Severity.OK]
    real = time.time
    monkeypatch.setattr(doctor_server.time, "time", lambda: real() - 3600)
    (behind,) = await look(check_clock)
    assert (behind.severity, behind.what) == (Severity.WARN, "its clock is 60 min behind the database's")


async def test_connections_that_do_not_fit(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    (fits,) = await look(check_connections)
    assert (fits.severity, fits.where) == (Severity.OK, "server")

    async def crowded(*_: object) -> list[ConnectionLimits]:
        groups = (Share("a", 60, 10), Share("b", 5, 20))
        return [ConnectionLimits(Ceiling("server", None, 100, 3), groups, others) for others in (10, 30)]

    monkeypatch.setattr(doctor_server, "read_connection_limits", crowded)
    full, over = await look(check_connections)
    assert (full.severity, over.severity) == (Severity.WARN, Severity.FAIL)
    assert over.what.startswith("110 of 97 connections: 80 of groups")


async def test_jit_matters_behind_a_pooler(dsn: str, schema: str) -> None:
    for pooled, severity in (("false", Severity.OK), ("true", Severity.WARN)):
        settings = load_settings(
            environ={
                "TASKQ_PG_DSN_DIRECT": dsn,
                "TASKQ_PG_DSN_POOLED": f"{dsn}&target_session_attrs=any",
                "TASKQ_PG_IS_POOLED": pooled,
                "TASKQ_SCHEMA_NAME": schema,
            }
        )
        conn = await asyncpg.connect(dsn, timeout=30)
        try:
            (found,) = await examine(conn, settings, [("jit", check_settings)])
        finally:
            await conn.close(timeout=10)
        assert found.severity is severity
        assert 'alter role "postgres" set jit = off;' in (found.fix or found.what)


async def test_a_check_that_cannot_look_says_so_and_stops_no_other(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    async def blind(_: Patient) -> list[Finding]:
        raise asyncpg.QueryCanceledError("canceling statement due to statement timeout")

    (found,) = await look(blind)
    assert found.severity is Severity.WARN
    assert found.what == "could not be looked at: canceling statement due to statement timeout"


def test_times_and_names_read_well() -> None:
    assert [span(each) for each in (0.3, 12, 119, 120, 7200, 172_800)] == [
        "0.3 s",
        "12 s",
        "119 s",
        "2 min",
        "2 h",
        "2 d",
    ]
    assert listed(["a", "b"]) == "a, b"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
