"""Who connects: the user and the password of a session, from the DSN, from a file, or from a command."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskqd.settings import Settings

LARGEST = 64 * 1024
"""Bytes that a file or a command may hold or print."""
EXPIRY_MARGIN = 30.0
"""Seconds before its end from which a command's credential is not used for a new session."""


class CredentialError(ConnectionError):
    """The credential cannot be had now; as good as a database that is away. Holds nothing of what was read."""


@dataclass(frozen=True, slots=True)
class Credential:
    """What a session logs in with. ``username`` None: the one in the DSN. ``expires_at``: seconds since the epoch."""

    password: str = field(repr=False)
    username: str | None = None
    expires_at: float | None = None

    def arguments(self) -> dict[str, str]:
        """Return what ``asyncpg.connect`` takes; these win over the DSN."""
        return {"password": self.password} | ({} if self.username is None else {"user": self.username})


class Login(ABC):
    """A source of credentials, safe to ask from any thread and any event loop."""

    async def current(self, *, fresh: bool = False) -> Credential:
        """Return the credential for a new session; a ``fresh`` one was read now. Raises ``CredentialError``."""
        return await asyncio.to_thread(self._read, fresh, time.monotonic())

    @abstractmethod
    def _read(self, fresh: bool, asked_at: float) -> Credential:
        """Return the credential, on a thread where it may block."""


class FileLogin(Login):
    """A file that holds the password alone, or a JSON object with ``password`` and maybe ``username``.

    Read for every new session and never kept, so that whatever replaces it holds at once: a rename, a write, or the
    swap of a symbolic link on its way, as Kubernetes does with a mounted secret.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def _read(self, fresh: bool, asked_at: float) -> Credential:
        try:
            with open(self._path, "rb") as file:
                content = file.read(LARGEST + 1)
        except OSError as error:
            raise CredentialError(f"the credential file {self._path!r}: {error.strerror or error}") from None
        return _parse(content, f"the credential file {self._path!r}", plain=True)


class CommandLogin(Login):
    """A command, run without a shell, that prints a JSON object: ``password``, maybe ``username`` and ``expires_at``.

    Its answer is kept until shortly before it expires; without an end until a fresh one is asked for. ``timeout``
    (seconds) ends the command. What it prints is never shown, and its standard error goes nowhere.
    """

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self._command = list(command)
        self._timeout = timeout
        self._lock = threading.Lock()
        self._kept: Credential | None = None
        self._failure: CredentialError | None = None
        self._began = self._ended = 0.0

    def _read(self, fresh: bool, asked_at: float) -> Credential:
        with self._lock:
            # Who waited here while another ran the command takes its failure, and its answer when it began after.
            if asked_at <= self._ended and self._failure is not None:
                raise CredentialError(str(self._failure))
            kept = self._kept
            if kept is not None and (asked_at <= self._began or not fresh) and not _ends_soon(kept):
                return kept
            self._began = time.monotonic()
            try:
                self._kept, self._failure = self._run(), None
            except CredentialError as error:
                self._failure = error
                raise
            finally:
                self._ended = time.monotonic()
            return self._kept

    def _run(self) -> Credential:
        name = f"the credential command {self._command[0]!r}"
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if not key.startswith("TASKQD_")},
            )
        except (OSError, ValueError) as error:
            raise CredentialError(f"{name} cannot be run: {getattr(error, 'strerror', None) or error}") from None
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            deadline = time.monotonic() + self._timeout
            content = _read_until_closed(process.stdout.fileno(), deadline)
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise CredentialError(f"{name} took longer than {self._timeout:g} s and was ended") from None
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
        if code:
            raise CredentialError(f"{name} ended with {code}")
        return _parse(content, f"what {name} printed", plain=False)


@dataclass(frozen=True, slots=True)
class Source:
    """Which file or command it is: the settings ``pg_credential_…`` of these names."""

    provider: str
    path: str | None
    command: tuple[str, ...] | None
    timeout: float

    @classmethod
    def of(cls, settings: Settings) -> Source | None:
        """Return that of a process, or None where its credential is what the DSN says."""
        if settings.pg_credential_provider == "env":
            return None
        return cls(
            settings.pg_credential_provider,
            settings.pg_credential_path,
            settings.pg_credential_command,
            settings.pg_credential_timeout,
        )

    def login(self) -> Login:
        """Return a new login that asks it."""
        if self.provider == "file":
            return FileLogin(self.path or "")
        return CommandLogin(self.command or (), self.timeout)


class ChosenLogin(Login):
    """Asks a source that can be replaced under those who use it."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._login = source.login()

    async def choose(self, source: Source) -> None:
        """Ask another source from now on. Raises ``CredentialError``, and keeps the old one, where it has nothing."""
        if source != self._source:
            login = source.login()
            await login.current()
            self._source, self._login = source, login

    def _read(self, fresh: bool, asked_at: float) -> Credential:
        return self._login._read(fresh, asked_at)


def login_of(settings: Settings) -> ChosenLogin | None:
    """Return where sessions get their credential from, or None where it is what the DSN says.

    One for the whole process, so that a command runs once for all of its sessions.
    """
    source = Source.of(settings)
    return None if source is None else _login(source)


@lru_cache(maxsize=64)
def _login(source: Source) -> ChosenLogin:
    return ChosenLogin(source)


async def choose_source(settings: Settings, source: Mapping[str, Any]) -> None:
    """Have all sessions of this process ask ``source``, the fields of one, from their next login on."""
    login = login_of(settings)
    if login is not None:
        command = source["command"]
        await login.choose(Source(**{**source, "command": None if command is None else tuple(command)}))


def _ends_soon(credential: Credential) -> bool:
    return credential.expires_at is not None and credential.expires_at - time.time() < EXPIRY_MARGIN


def _read_until_closed(pipe: int, deadline: float) -> bytes:
    """Return what comes through ``pipe``, at most one byte too many. A grandchild may hold it open: ``deadline``."""
    content = b""
    while len(content) <= LARGEST:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise TimeoutError
        part = os.read(pipe, LARGEST)
        if not part:
            break
        content += part
    return content


def _parse(content: bytes, what: str, *, plain: bool) -> Credential:
    """Return the credential in ``content``; ``plain`` allows a bare password. Errors quote nothing of it."""
    if len(content) > LARGEST:
        raise CredentialError(f"{what} is larger than {LARGEST} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise CredentialError(f"{what} is not UTF-8 text") from None
    if plain and not text.lstrip().startswith("{"):
        return Credential(_checked(text.rstrip("\r\n"), "the password", what))
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise CredentialError(f"{what} is not a JSON object with 'password'")
    username = found.get("username")
    return Credential(
        _checked(found.get("password"), "'password'", what),
        None if username is None else _checked(username, "'username'", what),
        _moment(found.get("expires_at"), what),
    )


def _checked(value: Any, name: str, what: str) -> str:
    if isinstance(value, str) and value and not any(char in value for char in "\0\r\n"):
        return value
    raise CredentialError(f"{what}: {name} must be one line of text")


def _moment(value: Any, what: str) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise CredentialError(f"{what}: 'expires_at' must be an ISO 8601 time or seconds since the epoch")
