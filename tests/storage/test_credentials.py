"""Credentials from files and commands: read when needed, bounded, and never shown."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import time
import traceback
from pathlib import Path

import asyncpg
import psutil
import pytest

from taskqd.domain.errors import DatabaseAuthError, DatabaseUnavailableError
from taskqd.settings import Settings
from taskqd.storage import credentials
from taskqd.storage.connect import connect, create_pool
from taskqd.storage.credentials import (
    LARGEST,
    CommandLogin,
    Credential,
    CredentialError,
    FileLogin,
    choose_source,
    login_of,
)
from tests.support import eventually

HIDDEN = "hunter2-never-shown"


def program(directory: Path, body: str) -> list[str]:
    """Return a command that runs ``body`` in Python."""
    path = directory / "command"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    path.chmod(stat.S_IRWXU)
    return [str(path)]


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("secret", Credential("secret")),
        ("secret\n", Credential("secret")),
        ("secret\r\n", Credential("secret")),
        (" with blanks ", Credential(" with blanks ")),
        ("pä ss\"'%:/@", Credential("pä ss\"'%:/@")),
        ('{"password": "p"}', Credential("p")),
        (' {"username": "u", "password": "{p", "other": 1}\n', Credential("{p", "u")),
        ('{"password": "p", "username": null, "expires_at": null}', Credential("p")),
        ('{"password": "p", "expires_at": 12.5}', Credential("p", None, 12.5)),
        ('{"password": "p", "expires_at": "1970-01-01T00:01:00Z"}', Credential("p", None, 60)),
        ('{"password": "p", "expires_at": "1970-01-01T01:00:00+01:00"}', Credential("p", None, 0)),
        ('{"password": "p", "expires_at": "1970-01-01T00:00:07"}', Credential("p", None, 7)),
    ],
)
async def test_a_file_holds_a_password_or_a_json_object(tmp_path: Path, content: str, wanted: Credential) -> None:
    path = tmp_path / "secret"
    path.write_text(content, newline="")
    assert await FileLogin(str(path)).current() == wanted


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "the password must be one line of text"),
        (b"\n", "the password must be one line of text"),
        (b"one\ntwo\n", "the password must be one line of text"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"x" * (LARGEST + 1), f"is larger than {LARGEST} bytes"),
        (b'{"password": "hunter2-never-shown"', "is not a JSON object with 'password'"),
        (b'{"username": "hunter2-never-shown"}', "'password' must be one line of text"),
        (b'{"password": ["hunter2-never-shown"]}', "'password' must be one line of text"),
        (b'{"password": "p", "username": ""}', "'username' must be one line of text"),
        (b'{"password": "hunter2-never-shown", "expires_at": "soon"}', "'expires_at' must be an ISO 8601 time"),
        (b'{"password": "hunter2-never-shown", "expires_at": true}', "'expires_at' must be an ISO 8601 time"),
    ],
)
async def test_what_is_wrong_with_a_file_is_said_without_what_it_holds(
    tmp_path: Path, content: bytes, why: str
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(CredentialError) as caught:
        await FileLogin(str(path)).current()
    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    assert HIDDEN not in "".join(traceback.format_exception(caught.value))


async def test_a_missing_file_is_a_database_that_is_away_in_one_message(tmp_path: Path, dsn: str) -> None:
    login = FileLogin(str(tmp_path / "gone"))
    with pytest.raises(DatabaseUnavailableError, match=r"the credential file '.*gone': No such file or directory"):
        await connect(dsn, role="t", schema="s", login=login)
    with pytest.raises(DatabaseUnavailableError, match="No such file or directory"):
        await create_pool(dsn, role="t", schema="s", group="", min_size=1, max_size=1, command_timeout=5, login=login)


async def test_a_swapped_link_holds_for_the_next_session(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "password").write_text(name)
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "password").symlink_to("..data/password")
    login = FileLogin(str(tmp_path / "password"))
    assert (await login.current()).password == "one"
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert (await login.current()).password == "two"


# -- commands -------------------------------------------------------------------------------------


async def test_a_command_is_run_once_for_many_sessions_and_again_when_asked(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    command = program(tmp_path, f"open({str(runs)!r}, 'a').write('x'); print(json.dumps({{'password': 'p'}}))")
    login = CommandLogin(command, 20)
    assert await asyncio.gather(*(login.current() for _ in range(8))) == [Credential("p")] * 8
    assert runs.read_text() == "x"
    await asyncio.gather(*(login.current(fresh=True) for _ in range(2)))
    assert 2 <= len(runs.read_text()) <= 3
    await login.current()
    assert len(runs.read_text()) <= 3


async def test_a_credential_that_ends_soon_is_not_used_for_another_session(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    body = (
        f"open({str(runs)!r}, 'a').write('x')\n"
        "print(json.dumps({'password': 'p', 'expires_at': time.time() + float(sys.argv[1])}))"
    )
    for lifetime, expected in (("3600", "x"), ("20", "xxx")):
        runs.write_text("")
        login = CommandLogin([*program(tmp_path, body), lifetime], 20)
        await login.current()
        await login.current()
        await login.current()
        assert runs.read_text() == expected


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"print('{HIDDEN}'); sys.exit(3)", "ended with 3"),
        (f"print('{HIDDEN}')", "is not a JSON object with 'password'"),
        (f"sys.stderr.write('{HIDDEN}'); sys.exit(1)", "ended with 1"),
        ("os.kill(os.getpid(), 9)", "ended with -9"),
        (f"sys.stdout.write('{HIDDEN}' * 10_000)", f"is larger than {LARGEST} bytes"),
        (f"print(json.dumps({{'password': '{HIDDEN}', 'username': 5}}))", "'username' must be one line of text"),
    ],
)
async def test_what_is_wrong_with_a_command_is_said_without_what_it_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, why: str
) -> None:
    with pytest.raises(CredentialError) as caught:
        await CommandLogin([*program(tmp_path, body), HIDDEN], 20).current()
    assert why in str(caught.value)
    assert HIDDEN not in "".join(traceback.format_exception(caught.value))
    assert HIDDEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize("command", [["/nonexistent/program"], ["/"], ["/etc/hostname"]])
async def test_a_command_that_cannot_be_run_is_named(command: list[str]) -> None:
    with pytest.raises(CredentialError, match=f"the credential command '{command[0]}' cannot be run"):
        await CommandLogin(command, 5).current()


@pytest.mark.parametrize(
    "body",
    ["time.sleep(1000)", "os.close(1); time.sleep(1000)", "os.fork() and os._exit(0); time.sleep(8)"],
    ids=["silent", "closed", "grandchild"],
)
async def test_a_command_that_takes_too_long_is_ended(tmp_path: Path, body: str) -> None:
    began = time.monotonic()
    with pytest.raises(CredentialError, match=r"took longer than 0\.5 s and was ended"):
        await CommandLogin(program(tmp_path, body), 0.5).current()
    assert time.monotonic() - began < 5
    assert not [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


async def test_those_who_wait_for_a_command_that_fails_do_not_run_it_again(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    body = f"open({str(runs)!r}, 'a').write('x'); time.sleep(1); sys.exit(1)"
    login = CommandLogin(program(tmp_path, body), 20)
    results = await asyncio.gather(*(login.current() for _ in range(6)), return_exceptions=True)
    assert all(isinstance(result, CredentialError) for result in results)
    assert runs.read_text() == "x"
    with pytest.raises(CredentialError):
        await login.current()
    assert runs.read_text() == "xx"


async def test_a_command_gets_no_link_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKQD_CONTROL_FD", "3")
    monkeypatch.setenv("PATH_TO_SOMETHING", "kept")
    body = "print(json.dumps({'password': ' '.join(k for k in os.environ if k[:6] in ('TASKQD', 'PATH_T'))}))"
    assert (await CommandLogin(program(tmp_path, body), 20).current()).password == "PATH_TO_SOMETHING"


# -- sessions -------------------------------------------------------------------------------------


def test_nothing_shows_a_password() -> None:
    assert HIDDEN not in repr(Credential(HIDDEN, "u"))
    assert HIDDEN not in f"{Credential(HIDDEN)}"


@pytest.fixture
async def role(conn: asyncpg.Connection) -> str:
    """A role of the server, which trusts it."""
    name = "taskqd_credential_user"
    if not await conn.fetchval("select exists (select from pg_roles where rolname = $1)", name):
        await conn.execute(f"create role {name} login")
    return name


async def test_the_name_of_the_credential_wins_over_the_dsn(tmp_path: Path, dsn: str, role: str) -> None:
    path = tmp_path / "secret"
    path.write_text(json.dumps({"username": role, "password": "p"}))
    session = await connect(dsn, role="t", schema="s", login=FileLogin(str(path)))
    try:
        assert await session.fetchval("select current_user") == role
    finally:
        await session.close()


async def test_a_pool_asks_anew_for_each_session(tmp_path: Path, dsn: str, role: str) -> None:
    path = tmp_path / "secret"
    path.write_text('{"password": "p"}')
    pool = await create_pool(
        dsn, role="t", schema="s", group="", min_size=1, max_size=2, command_timeout=5, login=FileLogin(str(path))
    )
    try:
        async with pool.acquire() as first:
            path.write_text(json.dumps({"username": role, "password": "p"}))
            async with pool.acquire() as second:
                assert await first.fetchval("select current_user") == "postgres"
                assert await second.fetchval("select current_user") == role
    finally:
        await pool.close()


class Rotating(credentials.Login):
    """Hands out a name that is refused until it is asked for a fresh one."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.asked: list[bool] = []

    def _read(self, fresh: bool, asked_at: float) -> Credential:
        self.asked.append(fresh)
        if fresh and len(self.names) > 1:
            self.names.pop(0)
        return Credential("p", self.names[0])


async def test_a_refused_credential_is_asked_for_once_more(dsn: str, role: str) -> None:
    login = Rotating("no_such_role_here", role)
    session = await connect(dsn, role="t", schema="s", login=login)
    try:
        assert await session.fetchval("select current_user") == role
    finally:
        await session.close()
    assert login.asked == [False, True]


async def test_one_that_stays_refused_is_said_once(dsn: str) -> None:
    login = Rotating("no_such_role_here")
    with pytest.raises(DatabaseAuthError, match="refused the connection"):
        await connect(dsn, role="t", schema="s", login=login)
    assert login.asked == [False, True]


async def test_a_login_that_hangs_is_bounded_by_the_time_to_connect(tmp_path: Path, dsn: str) -> None:
    login = CommandLogin(program(tmp_path, "time.sleep(3); print(json.dumps({'password': 'p'}))"), 20)
    with pytest.raises(DatabaseUnavailableError, match="no answer in time"):
        await connect(dsn, role="t", schema="s", login=login, timeout=0.3)
    session = await eventually(lambda: _try(dsn, login), 20)
    await session.close()


async def _try(dsn: str, login: CommandLogin) -> asyncpg.Connection | None:
    try:
        return await connect(dsn, role="t", schema="s", login=login, timeout=0.3)
    except DatabaseUnavailableError:
        return None


def test_the_provider_of_the_settings_is_one_for_the_process() -> None:
    assert login_of(Settings()) is None
    by_file = Settings(pg_credential_provider="file", pg_credential_path="/x")
    assert login_of(by_file) is login_of(by_file) is not None
    by_command = Settings(pg_credential_provider="exec", pg_credential_command="a 'b c'")
    assert by_command.pg_credential_command == ("a", "b c")
    assert login_of(by_command) is login_of(by_command) is not login_of(by_file)


async def test_a_source_is_replaced_under_those_who_use_it_unless_the_new_one_has_nothing(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("first")
    settings = Settings(pg_credential_provider="file", pg_credential_path=str(one))
    login = login_of(settings)
    assert login is not None
    assert (await login.current()).password == "first"
    new = {"provider": "file", "path": str(other), "command": None, "timeout": 10.0}
    with pytest.raises(CredentialError, match="No such file"):
        await choose_source(settings, new)
    assert (await login.current()).password == "first"
    other.write_text("second")
    await choose_source(settings, new)
    assert (await login.current()).password == "second"
    command = program(tmp_path, "print(json.dumps({'password': 'third'}))")
    await choose_source(settings, {"provider": "exec", "path": None, "command": command, "timeout": 20.0})
    assert (await login.current()).password == "third"
