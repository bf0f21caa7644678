"""What a PgBouncer says of itself, and what the budget makes of it."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskqd.storage.pooler import Console, PoolerLimits, ask_pooler
from tests.postgres import Server
from tests.support import Command, child_environment, wait_until

PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
PORT = 6432


@pytest.fixture
def pooler(server: Server, short_dir: Path) -> Iterator[str]:
    """A PgBouncer before the session's server; the DSN through it, of a user who may ask its console."""
    if PROGRAM is None:
        pytest.skip("this machine has no pgbouncer (Debian package pgbouncer)")
    directory = short_dir / "pooler"
    directory.mkdir(mode=0o755)
    (directory / "users").write_text('"postgres" ""\n"nobody" ""\n')
    (directory / "ini").write_text(
        f"[databases]\npostgres = host={server.root} dbname=postgres\n[pgbouncer]\nlisten_addr =\n"
        f"listen_port = {PORT}\nunix_socket_dir = {directory}\nauth_type = trust\nauth_file = {directory}/users\n"
        "stats_users = postgres\npool_mode = transaction\nmax_client_conn = 90\ndefault_pool_size = 7\n"
        "reserve_pool_size = 2\n"
    )
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        short_dir.chmod(0o755)
        entry = pwd.getpwnam(user)
        os.chown(directory, entry.pw_uid, entry.pw_gid)
    process = subprocess.Popen(
        [PROGRAM, "-q", str(directory / "ini")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=user,
    )
    try:
        wait_until(lambda: process.poll() is not None or (directory / f".s.PGSQL.{PORT}").exists(), 30)
        yield f"postgresql://postgres@/postgres?host={directory}&port={PORT}"
    finally:
        process.kill()
        process.wait(10)


async def test_it_says_what_it_allows(pooler: str) -> None:
    assert await ask_pooler(pooler, login=None, timeout=30) == PoolerLimits(max_client_conn=90, pool_size=9)


async def test_it_says_nothing_to_a_user_who_may_not_ask(pooler: str) -> None:
    said = await ask_pooler(pooler.replace("postgres@", "nobody@"), login=None, timeout=30)
    assert isinstance(said, str)
    assert "nobody@" in said


async def test_a_server_that_is_no_pooler_is_told_so(dsn: str) -> None:
    said = await ask_pooler(dsn, login=None, timeout=30)
    assert isinstance(said, str)
    assert 'database "pgbouncer" does not exist' in said


def test_the_budget_counts_what_the_pooler_opens_at_the_server(
    pooler: str, start: Callable[..., Command], short_dir: Path, dsn: str, schema: str
) -> None:
    (short_dir / "group.toml").write_text('actors = "a:b"\n[[workers]]\nname = "io"\nreplicas = 3\n')
    env = child_environment(TASKQ_PG_DSN=dsn, TASKQ_PG_DSN_POOLED=pooler, TASKQ_SCHEMA_NAME=schema)
    done = start("budget", "group.toml", "--json", env=env)
    assert done.wait() == 0, done.stderr
    budget = json.loads(done.stdout)
    # 3 workers of 10 direct, the leader's 2, the scheduler's 3, the preflight's 1, and the pooler's 9.
    assert (budget["direct"], budget["pooled"], budget["required"]) == (32, 36, 32 + 4 + 9)
    assert budget["pooler_limits"] == {"max_client_conn": 90, "pool_size": 9}
    assert budget["pooler_peak"] == 36 + 12 + 12
    table = start("budget", "group.toml", env=env)
    assert table.wait() == 0
    assert "max_client_conn 90, at most 60 of this group: fits; it opens up to 9 sessions" in table.stdout
    silent = start("budget", "group.toml", env={**env, "TASKQ_PG_DSN_POOLED": pooler.replace("postgres@", "nobody@")})
    assert silent.wait() == 0
    assert "the pooler did not say what it allows" in silent.stdout


# -- its answers, without it ----------------------------------------------------------------------


def row(*columns: str | None) -> bytes:
    cells = b"".join(
        struct.pack("!i", -1) if cell is None else struct.pack("!i", len(cell)) + cell.encode() for cell in columns
    )
    return message(b"D", struct.pack("!H", len(columns)) + cells)


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


async def test_an_answer_may_come_byte_by_byte() -> None:
    console = Console()
    answer = row("max_client_conn", "90", "100") + row("logfile", None) + message(b"C", b"SHOW\0") + message(b"Z", b"I")
    for number in range(len(answer)):
        console.data_received(answer[number : number + 1])
    assert await console.rows == [("max_client_conn", "90"), ("logfile", "")]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (message(b"E", b"SFATAL\0"), "refuses"),
        (b"D" + struct.pack("!I", 0xFFFFFFFF), "cannot be read"),
        (b"D" + struct.pack("!I", 0), "cannot be read"),
    ],
)
async def test_an_answer_that_is_none(answer: bytes, why: str) -> None:
    console = Console()
    console.data_received(answer)
    with pytest.raises(ConnectionError, match=why):
        await console.rows


async def test_a_console_that_goes_away() -> None:
    console = Console()
    console.connection_lost(None)
    with pytest.raises(ConnectionError, match="closed"):
        await asyncio.wait_for(console.rows, 10)
