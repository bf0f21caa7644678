"""Whether the server serves: vacuum and who is in its way, notifications, poolers, clocks, connections, settings."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import asyncpg

from taskqd.domain.errors import ConfigError
from taskqd.storage.connect import close, connect, create_pool
from taskqd.storage.credentials import login_of
from taskqd.storage.doctor import STATEMENT_TIMEOUT, Finding, Patient, fail, ok, span, warn
from taskqd.storage.limits import Asker, read_connection_limits

TUNED = {
    "jobs": {
        "fillfactor": 70.0,
        "autovacuum_vacuum_scale_factor": 0.01,
        "autovacuum_vacuum_insert_scale_factor": 0.05,
        "autovacuum_vacuum_cost_limit": 2000.0,
    },
    "job_events": {"autovacuum_vacuum_scale_factor": 0.01, "autovacuum_vacuum_insert_scale_factor": 0.05},
    "workers": {"fillfactor": 50.0},
}
"""How the migrations set the tables that are written all the time."""
_MORE_IS_FINE = {"autovacuum_vacuum_cost_limit"}
SNAPSHOT_WARN, SNAPSHOT_FAIL = 60.0, 900.0
"""Seconds for which a transaction may keep dead rows from being removed."""
SNAPSHOT_TRANSACTIONS = 1_000_000
"""The same for what knows no time: transactions since."""
MANY_DEAD = 100_000
"""Dead rows of a table that are worth a word, where they are a fifth of the living too."""
SKEW = 2.0
"""Seconds that a host's clock may be off."""
NOTIFY_TIMEOUT = 5.0
CROWDED = 0.9
"""The share of the connections from which on the server is nearly full."""


async def check_snapshots(patient: Patient) -> list[Finding]:
    """Look for who keeps dead rows from being removed."""
    name = "snapshots"
    found = []
    for row in await patient.rows("snapshots", SNAPSHOT_WARN, SNAPSHOT_TRANSACTIONS):
        age = row["age"]
        since = f"for {span(age)}" if age is not None else f"for {row['transactions']} transactions"
        told = ", ".join(filter(None, [row["state"], row["who"] and f"of {row['who']}", row["name"]]))
        severe = fail if age is None or age >= SNAPSHOT_FAIL else warn
        do = {
            "session": f"end its transaction, or the session: select pg_terminate_backend({row['id']})",
            "prepared transaction": f"commit prepared or rollback prepared '{row['id']}'",
            "replication slot": f"start its consumer, or select pg_drop_replication_slot('{row['id']}')",
            "standby": "end the long query there, or turn its hot_standby_feedback off",
        }[row["kind"]]
        what = f"holds a snapshot {since}" + (f" ({told})" if told else "")
        why = "no row that died since can be vacuumed: claims walk over them"
        found.append(severe(name, f"{row['kind']} {row['id']}", what, why, do))
    if found:
        return found
    if not await patient.conn.fetchval(patient.sql.sees_all):
        return [ok(name, "none that this role can see; one with pg_read_all_stats sees all sessions")]
    return [ok(name, f"none is held for longer than {span(SNAPSHOT_WARN)}")]


async def check_vacuum(patient: Patient) -> list[Finding]:
    """Look at dead rows, and at how the busy tables are vacuumed."""
    name, found = "vacuum", []
    server = await patient.row("vacuum_settings")
    for setting in ("autovacuum", "track_counts"):
        if not server[setting]:
            what, why = "is off", "nothing removes dead rows: the tables grow and claims crawl"
            found.append(fail(name, f"server setting {setting}", what, why, f"set {setting} = on in postgresql.conf"))
    dead = 0
    for row in await patient.rows("tables"):
        table = f"{patient.schema}.{row['name']}"
        options = dict(option.split("=", 1) for option in row["options"])
        if problems := wrong_options(row["name"], options):
            target = f'"{patient.schema}"."{row["name"]}"'
            wanted = ", ".join(f"{key} = {_number(value)}" for key, value in TUNED.get(row["name"], {}).items())
            resets = ", ".join(key for key in ("autovacuum_enabled", "toast.autovacuum_enabled") if key in options)
            fix = " ".join(
                ([f"alter table {target} reset ({resets});"] if resets else [])
                + ([f"alter table {target} set ({wanted});"] if wanted else [])
            )
            why = "dead rows stay longer than claims can bear"
            found.append(warn(name, table, "; ".join(problems), why, f"run {fix}", fix))
        dead += row["dead"]
        if row["dead"] > MANY_DEAD and row["dead"] > row["live"] / 5:
            last = row["vacuumed_ago"]
            when = "never vacuumed" if last is None else f"last vacuumed {span(last)} ago"
            do = "see who holds snapshots; else vacuum it, and give autovacuum more workers or a higher cost limit"
            what = f"{row['dead']} dead rows beside {row['live']} living, {when}"
            found.append(warn(name, table, what, "every claim and look walks over them", do))
    return found or [ok(name, f"{dead} dead rows, the busy tables are vacuumed as they should be")]


def wrong_options(table: str, options: dict[str, str]) -> list[str]:
    """Return what is wrong with the storage options of a table."""
    problems = []
    if options.get("autovacuum_enabled", "on").lower() in ("off", "false", "no", "0"):
        problems.append("autovacuum_enabled is off")
    for key, wanted in TUNED.get(table, {}).items():
        given = options.get(key)
        value = None if given is None else float(given)
        if value is None or (value < wanted if key in _MORE_IS_FINE else value > wanted):
            problems.append(f"{key} is {given or 'not set'}, not {_number(wanted)}")
    return problems


async def check_notifications(patient: Patient) -> list[Finding]:
    """Send a notification through the direct DSN, and see that no transaction pooler sits in between."""
    name, where = "notifications", "the direct DSN"
    channel, token = f"taskq_doctor_{uuid.uuid4().hex[:16]}", uuid.uuid4().hex
    arrived = asyncio.Event()

    def heard(*_: Any) -> None:
        arrived.set()

    why = "LISTEN, session settings and advisory locks need a session: jobs start late, plans flip"
    do = "give the server's own address, or a session pooler's, as TASKQ_PG_DSN_DIRECT"
    opened: list[asyncpg.Connection] = []
    try:
        for _ in range(2):
            opened.append(await _open(patient))
        listener, other = opened
        own = await listener.fetchval("select pg_catalog.pg_backend_pid()")
        between = own != listener.get_server_pid()
        await listener.fetchval(patient.sql.stick, token)
        async with other.transaction():  # takes the server session that a transaction pooler has just got back
            await other.fetchval("select pg_catalog.pg_backend_pid()")
            stuck = await listener.fetchval(patient.sql.stuck) == token
        if not stuck:
            return [fail(name, where, "goes through a transaction pooler", why, do)]
        await listener.add_listener(channel, heard)
        await other.fetchval(patient.sql.notify, channel)
        started = time.monotonic()
        try:
            await asyncio.wait_for(arrived.wait(), NOTIFY_TIMEOUT)
        except TimeoutError:
            what = f"no notification arrived within {NOTIFY_TIMEOUT:g} s"
            why = "jobs wait for the next poll instead of starting in milliseconds"
            return [
                fail(name, where, what, why, "look for a pooler or a proxy in between, and for a full queue of them")
            ]
        took = (time.monotonic() - started) * 1000
    except ConfigError as error:
        return [fail(name, where, str(error), why, do)]
    finally:
        for conn in opened:
            await close(conn)
    through = ", through a session pooler" if between else ""
    return [ok(name, f"one arrived after {took:.0f} ms{through}", where)]


async def check_clock(patient: Patient) -> list[Finding]:
    """Compare this host's clock with the database's."""
    name = "clock"
    before = time.time()
    theirs = await patient.conn.fetchval(patient.sql.clock)
    after = time.time()
    skew, unsure = theirs - (before + after) / 2, (after - before) / 2
    if abs(skew) - unsure > SKEW:
        side = "ahead of" if skew < 0 else "behind"
        why = "the database's time decides everything, but logs, and times that clients give, are off by that much"
        return [
            warn(name, "this host", f"its clock is {span(abs(skew))} {side} the database's", why, "let both use NTP")
        ]
    return [ok(name, f"this host and the database differ by {abs(skew) * 1000:.0f} ms (± {unsure * 1000:.0f})")]


async def check_connections(patient: Patient) -> list[Finding]:
    """Compare what is held, and what the groups of the schema have declared, with what the server grants."""
    name, found = "connections", []
    asker = Asker(patient.schema, "doctor", None)
    for limits in await read_connection_limits(patient.conn, asker):
        ceiling = limits.ceiling
        grants = ceiling.max_connections - ceiling.superuser_reserved - ceiling.reserved
        groups = sum(max(share.declared, share.live) for share in limits.groups)
        held = groups + limits.others
        where = ceiling.limited_by or "server"
        what = f"{held} of {grants} connections: {groups} of groups (declared, or more where they hold more)"
        what += f", {limits.others} of others"
        if held > grants:
            why = "processes will not start, or not get a session when they need one"
            do = "run fewer or smaller workers (`taskqd budget`), or raise max_connections"
            found.append(fail(name, where, what, why, do))
        elif held > grants * CROWDED:
            why = "a rotation or a roll-out will not fit"
            found.append(warn(name, where, what, why, "see `taskqd budget` before anything is added"))
        else:
            found.append(ok(name, what, where))
    return found


async def check_settings(patient: Patient) -> list[Finding]:
    """Look at what a session is given that asks for nothing: behind a pooler that is what workers get."""
    name, settings = "jit", patient.settings
    pool = await create_pool(
        settings.pooled_dsn(),
        role="doctor",
        schema=patient.schema,
        group="",
        min_size=1,
        max_size=1,
        command_timeout=STATEMENT_TIMEOUT,
        is_pooled=True,
        login=login_of(settings),
    )
    try:
        given = (await pool.fetch(patient.sql.own_settings))[0]
    finally:
        pool.terminate()
    who = f"role {given['who']}"
    if not given["jit"]:
        return [ok(name, "off", who)]
    fix = f'alter role "{given["who"]}" set jit = off;'
    if settings.pg_is_pooled:
        why = "sessions behind a pooler cannot switch it off, and compiling a plan takes longer than running it"
        return [warn(name, who, "on, and TASKQ_PG_IS_POOLED", why, f"run {fix}", fix)]
    return [ok(name, f"on, and switched off in every session of taskqd; for your own pools: {fix}", who)]


async def _open(patient: Patient) -> asyncpg.Connection:
    settings = patient.settings
    return await connect(
        settings.direct_dsn(),
        role="doctor",
        schema=patient.schema,
        command_timeout=STATEMENT_TIMEOUT,
        login=login_of(settings),
    )


def _number(value: float) -> str:
    return f"{value:g}"
