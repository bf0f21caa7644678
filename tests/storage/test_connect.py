"""Connections: what they are named and set to, how long a start-up waits, and what a failure says."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from taskqd.domain.errors import ConfigError, DatabaseAuthError, DatabaseUnavailableError
from taskqd.domain.exit_codes import ExitCode
from taskqd.settings.model import DEFAULT_DSN
from taskqd.storage import connect as storage
from taskqd.storage.dsn import describe_dsn
from tests.postgres import PASSWORD_ROLE, Server, embedded

SECRET = "s3cr3t-word"
PINNED = ["enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "enable_seqscan", "enable_sort"]
KEEPALIVE = ["tcp_keepalives_count", "tcp_keepalives_idle", "tcp_keepalives_interval"]


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A server of this module's own, with roles that may not do everything."""
    server = embedded(18)
    try:
        asyncio.run(_prepare(server.dsn()))
        yield server
    finally:
        server.remove()


async def _prepare(dsn: str) -> None:
    admin = await asyncpg.connect(dsn)
    await admin.execute(f"create role {PASSWORD_ROLE} login password '{SECRET}'")
    await admin.execute("create role narrow login connection limit 1")
    await admin.execute("create role outsider login")
    await admin.execute("create database closed")
    await admin.execute("revoke connect on database closed from public")
    await admin.close()


@pytest.fixture
def running(own_server: Server) -> Server:
    """The same server, up again if a test left it down."""
    if not own_server.running:
        own_server.start()
    return own_server


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@asynccontextmanager
async def connected(dsn: str, **options: object) -> AsyncIterator[asyncpg.Connection]:
    conn = await storage.connect(dsn, **{"role": "test", "schema": "taskq", **options})
    try:
        yield conn
    finally:
        await storage.close(conn)


async def settings_we_sent(conn: asyncpg.Connection) -> dict[str, str]:
    rows = await conn.fetch("select name, setting from pg_settings where source = 'client'")
    return {row["name"]: row["setting"] for row in rows}


def everything_shown(error: BaseException) -> str:
    return repr(error) + "".join(traceback.format_exception(error))


# -- describing an address ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "description"),
    [
        (f"postgresql://app:{SECRET}@db:6432/jobs", "app@db:6432/jobs"),
        (f"postgres://app:{SECRET}@db/jobs?sslmode=require", "app@db:5432/jobs"),
        (f"postgresql://app:{SECRET}@db", "app@db:5432/app"),
        (f"postgresql://app:{SECRET}@[::1]:5433/jobs", "app@[::1]:5433/jobs"),
        (f"postgresql://app:{SECRET}@one:5433,two/jobs", "app@one:5433,two:5432/jobs"),
        (f"postgresql:///jobs?host=one,two&port=1,2&user=app&password={SECRET}", "app@one:1,two:2/jobs"),
        ("postgresql://postgres:@/postgres?host=/tmp/x", "postgres@/tmp/x:5432/postgres"),
        ("postgresql://app@/jobs?host=/run/pg&port=5433", "app@/run/pg:5433/jobs"),
        (f"postgresql://me%40corp:{SECRET}@db/a%2Fb", "me@corp@db:5432/a/b"),
    ],
)
def test_an_address_is_described_without_its_password(
    dsn: str, description: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PGHOST", "PGPORT", "PGUSER", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    assert describe_dsn(dsn) == description


def test_what_an_address_omits_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "db.internal")
    monkeypatch.setenv("PGPORT", "7000")
    monkeypatch.setenv("PGUSER", "app")
    monkeypatch.setenv("PGDATABASE", "jobs")
    assert describe_dsn("postgresql://") == "app@db.internal:7000/jobs"


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://app:{SECRET}/x@db/jobs",
        f"postgresql://app:{SECRET}@x@db/jobs",
        f"postgresql://app:{SECRET}?x@db/jobs",
        f"postgresql://app:{SECRET}#x@db/jobs",
        f"postgresql://app:x@{SECRET}/x@db/jobs",
        f"postgresql://app:x@{SECRET}?x=1@db/jobs",
        f"postgresql://app:x[{SECRET}@db/jobs",
        f"postgresql://app:{SECRET}/jobs",
        f"postgresql://app:{SECRET}@db:port/jobs",
        f"postgresql://app:{SECRET}@db:0/jobs",
        f"postgresql://app:{SECRET}@db/jobs?sslmode",
        f"postgresql+asyncpg://app:{SECRET}@db/jobs",
        f"host=db user=app password={SECRET}",
        SECRET,
        "",
    ],
)
async def test_an_unusable_address_is_refused_without_quoting_it(dsn: str) -> None:
    assert SECRET not in describe_dsn(dsn)
    with pytest.raises(ConfigError) as caught:
        await storage.connect_with_retry(dsn, role="test", schema="taskq", boot_timeout=60)
    assert "database DSN" in str(caught.value)
    assert SECRET not in str(caught.value)
    assert caught.value.exit_code is ExitCode.REFUSED


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        ("sslmode=never", "`sslmode` parameter must be one of"),
        ("sslmode=verify-full&sslrootcert=/nowhere/ca.pem", "a certificate file that does not exist"),
    ],
)
async def test_a_bad_parameter_of_an_address_is_refused_at_once(parameter: str, reason: str) -> None:
    dsn = f"postgresql://app:{SECRET}@db/jobs?{parameter}"
    with pytest.raises(ConfigError) as caught:
        await storage.connect_with_retry(dsn, role="test", schema="taskq", boot_timeout=60)
    assert "app@db:5432/jobs" in str(caught.value)
    assert reason in str(caught.value)
    assert SECRET not in everything_shown(caught.value)


# -- what a session is set to ---------------------------------------------------------------------


def test_an_application_name_fits_the_63_bytes_of_postgres() -> None:
    assert storage.application_name("taskq", "io", "heartbeat") == "taskqd/taskq/io/heartbeat"
    names = {storage.application_name("s" * 50, group, "scheduler") for group in ("grüße", "gruß", "")}
    assert len(names) == 3
    for name in names:
        assert len(name.encode()) <= 63
        assert name.startswith("taskqd/" + "s" * 36)
        assert name.endswith("/scheduler")


async def test_a_connection_is_named_kept_alive_and_without_jit(dsn: str) -> None:
    async with connected(dsn, role="claim", schema="jobs", group="io") as conn:
        sent = await settings_we_sent(conn)
        assert await conn.fetchval("show application_name") == "taskqd/jobs/io/claim"
        assert await conn.fetchval("show jit") == "off"
        assert await conn.fetchval("show transaction_isolation") == "read committed"
        assert set(KEEPALIVE) <= set(sent)
        assert not set(PINNED) & set(sent)


async def test_a_pinned_connection_forbids_the_plans_that_flip(dsn: str) -> None:
    async with connected(dsn, pinned=True) as conn:
        sent = await settings_we_sent(conn)
        assert {name: sent[name] for name in PINNED} == dict.fromkeys(PINNED, "off")
        await conn.execute("reset all")
        assert await conn.fetchval("show enable_sort") == "off"


async def test_a_pool_sets_each_connection_and_caches_statements(dsn: str) -> None:
    pool = await storage.create_pool(
        dsn, role="worker", schema="taskq", group="g", min_size=1, max_size=2, command_timeout=5, pinned=True
    )
    async with pool:
        for _ in range(2):
            async with pool.acquire() as conn:
                assert await conn.fetchval("show application_name") == "taskqd/taskq/g/worker"
                assert await conn.fetchval("show enable_seqscan") == "off"
        async with pool.acquire() as conn:
            assert await conn.fetchval("select count(*) from pg_prepared_statements") > 0


async def test_what_is_planned_once_is_not_planned_anew_for_few_rows(dsn: str) -> None:
    sort = "select * from unnest($1::int[]) n order by n"
    for planned_once in (True, False):
        pool = await storage.create_pool(
            dsn,
            role="dispatch",
            schema="taskq",
            group="",
            min_size=1,
            max_size=1,
            command_timeout=5,
            planned_once=planned_once,
        )
        async with pool:
            for _ in range(10):
                await pool.fetch(sort, [1])
            anew = "select custom_plans from pg_prepared_statements where statement = $1"
            assert (await pool.fetchval(anew, sort) == 0) is planned_once


async def test_a_release_costs_no_round_trip(dsn: str) -> None:
    pool = await storage.create_pool(
        dsn, role="client", schema="taskq", group="", min_size=1, max_size=1, command_timeout=5
    )
    async with pool:
        last = "select query from pg_stat_activity where application_name = 'taskqd/taskq//client'"
        await pool.fetchval("select 'ours'")
        async with connected(dsn) as other:
            assert await other.fetchval(last) == "select 'ours'"


async def test_behind_a_pooler_nothing_is_cached_and_nothing_set_but_the_name(dsn: str) -> None:
    pool = await storage.create_pool(
        dsn,
        role="worker",
        schema="taskq",
        group="",
        min_size=1,
        max_size=1,
        command_timeout=5,
        is_pooled=True,
        pinned=True,
    )
    async with pool, pool.acquire() as conn:
        sent = await settings_we_sent(conn)
        assert sent["application_name"] == "taskqd/taskq//worker"
        assert not ({"jit", *PINNED, *KEEPALIVE} & set(sent))
        assert await conn.fetchval("select count(*) from pg_prepared_statements where name <> ''") == 0


# -- a database that is not there -----------------------------------------------------------------


async def retry(dsn: str, **options: object) -> asyncpg.Connection:
    return await storage.connect_with_retry(dsn, **{"role": "test", "schema": "taskq", **options})


async def test_a_server_that_comes_up_late_is_waited_for(running: Server) -> None:
    running.stop()
    reasons: list[str] = []
    starting: list[asyncio.Task[None]] = []

    def on_retry(why: str, pause: float) -> None:
        reasons.append(why)
        assert 0 < pause < 3
        if len(reasons) == 2:
            starting.append(asyncio.create_task(asyncio.to_thread(running.start)))

    conn = await retry(running.dsn(), boot_timeout=60, on_retry=on_retry)
    assert await conn.fetchval("select 1") == 1
    await storage.close(conn)
    await starting[0]
    assert len(reasons) >= 2
    assert "is not reachable" in reasons[0]


async def test_a_server_that_shuts_down_is_tried_again(running: Server) -> None:
    lingering = await asyncpg.connect(running.dsn())
    running.run("pg_ctl", "stop", "-W", "-m", "smart", "-D", str(running.data))
    reasons: list[str] = []

    async def restart() -> None:
        await lingering.close()
        deadline = time.monotonic() + 60
        while running.running and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(running.start)

    restarts: list[asyncio.Task[None]] = []

    def on_retry(why: str, pause: float) -> None:
        reasons.append(why)
        if "shutting down" in why and not restarts:
            restarts.append(asyncio.create_task(restart()))

    # A connection that Postgres admits before it heeds the signal is let go again.
    deadline = time.monotonic() + 60
    while not restarts:
        assert time.monotonic() < deadline
        await storage.close(await retry(running.dsn(), boot_timeout=60, on_retry=on_retry))
    await restarts[0]
    assert any("the database system is shutting down" in why for why in reasons)


async def test_a_full_server_is_tried_again_until_a_place_is_free(running: Server) -> None:
    dsn = running.dsn("narrow")
    first = await retry(dsn, boot_timeout=0)
    closing: list[asyncio.Task[None]] = []

    def on_retry(why: str, pause: float) -> None:
        assert 'too many connections for role "narrow"' in why
        if not closing:
            closing.append(asyncio.create_task(storage.close(first)))

    second = await retry(dsn, boot_timeout=60, on_retry=on_retry)
    assert closing
    await storage.close(second)


async def test_a_read_only_server_is_tried_again_until_it_can_be_written(running: Server) -> None:
    dsn, whole = running.dsn("reader"), await asyncpg.connect(running.dsn())
    await whole.execute("create role reader login; alter role reader set default_transaction_read_only = on")
    try:
        with pytest.raises(DatabaseUnavailableError, match="is read-only: a standby, or default_transaction_read_only"):
            await retry(dsn, boot_timeout=0)
        await storage.close(await retry(dsn, boot_timeout=0, writable=False))
        promoting: list[asyncio.Task[str]] = []

        def on_retry(_why: str, _pause: float) -> None:
            if not promoting:
                promoting.append(asyncio.create_task(whole.execute("alter role reader reset all")))

        await storage.close(await retry(dsn, boot_timeout=60, on_retry=on_retry))
        await promoting[0]
    finally:
        await whole.execute("drop role reader")
        await whole.close()


async def test_our_isolation_holds_whatever_the_role_is_set_to(running: Server) -> None:
    whole = await asyncpg.connect(running.dsn())
    await whole.execute("create role strict login; alter role strict set default_transaction_isolation = serializable")
    try:
        async with connected(running.dsn("strict")) as conn:
            assert await conn.fetchval("show transaction_isolation") == "read committed"
    finally:
        await whole.execute("drop role strict")
        await whole.close()


async def test_the_wait_for_a_refused_connection_ends_with_one_clear_message(free_port: int) -> None:
    dsn = f"postgresql://app:{SECRET}@127.0.0.1:{free_port}/jobs"
    started = time.monotonic()
    with pytest.raises(DatabaseUnavailableError) as caught:
        await retry(dsn, boot_timeout=0.5)
    assert 0.4 < time.monotonic() - started < 20
    message = str(caught.value)
    assert f"app@127.0.0.1:{free_port}/jobs is not reachable: connection refused" in message
    assert re.search(r"\(tried \d+ times in \d+\.\d s\)$", message)
    assert "\n" not in message
    assert SECRET not in everything_shown(caught.value)
    assert caught.value.exit_code is ExitCode.UNAVAILABLE


async def test_with_no_boot_timeout_there_is_one_attempt(free_port: int) -> None:
    with pytest.raises(DatabaseUnavailableError, match=r"tried once in \d+\.\d s"):
        await retry(f"postgresql://app@127.0.0.1:{free_port}/jobs", boot_timeout=0)


async def test_a_host_that_does_not_resolve_is_named() -> None:
    with pytest.raises(DatabaseUnavailableError, match=r"app@db\.invalid:5432/jobs is not reachable: \S"):
        await retry(f"postgresql://app:{SECRET}@db.invalid/jobs", boot_timeout=0.2)


async def test_a_host_that_never_answers_costs_no_more_than_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        dsn = f"postgresql://app:{SECRET}@127.0.0.1:{silent.getsockname()[1]}/jobs"
        started = time.monotonic()
        with pytest.raises(DatabaseUnavailableError, match="no answer in time"):
            await retry(dsn, boot_timeout=0.5, timeout=0.2)
        assert time.monotonic() - started < 10


# -- a database that refuses us -------------------------------------------------------------------


async def test_a_right_password_is_accepted(running: Server) -> None:
    conn = await retry(running.dsn(PASSWORD_ROLE, SECRET), boot_timeout=5)
    assert await conn.fetchval("select current_user") == PASSWORD_ROLE
    await storage.close(conn)


@pytest.mark.parametrize(
    ("user", "password", "database", "reason"),
    [
        (PASSWORD_ROLE, "wr0ng-word", "postgres", f'password authentication failed for user "{PASSWORD_ROLE}"'),
        ("nobody", "wr0ng-word", "postgres", 'role "nobody" does not exist'),
        ("postgres", "wr0ng-word", "nowhere", 'database "nowhere" does not exist'),
        ("outsider", "wr0ng-word", "closed", 'permission denied for database "closed"'),
    ],
)
async def test_a_refusal_is_final_and_says_why(
    running: Server, user: str, password: str, database: str, reason: str
) -> None:
    dsn = running.dsn(user, password, database)
    attempts: list[str] = []
    with pytest.raises(DatabaseAuthError) as caught:
        await retry(dsn, boot_timeout=60, on_retry=lambda why, pause: attempts.append(why))
    assert attempts == []
    assert reason in str(caught.value)
    assert describe_dsn(dsn) in str(caught.value)
    assert password not in everything_shown(caught.value)
    assert caught.value.exit_code is ExitCode.REFUSED


async def test_a_pool_explains_its_failure_too(running: Server) -> None:
    options = {"role": "r", "schema": "s", "group": "", "min_size": 1, "max_size": 1, "command_timeout": 5}
    with pytest.raises(DatabaseAuthError, match="password authentication failed"):
        await storage.create_pool(running.dsn(PASSWORD_ROLE, "wr0ng-word"), **options)
    with pytest.raises(DatabaseUnavailableError, match="no server listens on that socket"):
        await storage.create_pool(f"postgresql://app@/db?host=/nowhere-{uuid.uuid4().hex}", **options)


async def test_a_password_that_is_missing_is_a_refusal(running: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", "/nowhere/pgpass")
    with pytest.raises(DatabaseAuthError, match="password authentication failed"):
        await retry(running.dsn(PASSWORD_ROLE), boot_timeout=60)


def test_a_default_that_nobody_meant_is_named() -> None:
    unset = storage.explain(ConnectionRefusedError("refused"), DEFAULT_DSN)
    assert str(unset).endswith("; TASKQ_PG_DSN is not set, and this is its default")
    meant = storage.explain(ConnectionRefusedError("refused"), DEFAULT_DSN.replace("localhost", "127.0.0.1"))
    assert "TASKQ_PG_DSN" not in str(meant)
