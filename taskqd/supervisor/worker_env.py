"""What a worker's processes have in their environment for themselves: its ``env``, and the file that it names."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from taskqd.supervisor.spawn import is_kept_from_children
from taskqd.supervisor.table import Table

LARGEST = 64 * 1024
"""Bytes that an ``env_file`` may hold, and characters that an ``env`` may come to."""

GROUP_WIDE = ("pg_dsn", "pg_dsn_direct", "pg_dsn_pooled", "pg_is_pooled", "schema_name", "environment")
"""Settings that all processes of a group share."""
RESERVED = {
    "termination_grace_period": "set it in [supervisor]; it bounds the stop of the whole group",
    "workgroup_instance": "the supervisor sets it",
    "health_socket_path": "the supervisor gives each process its own socket",
    "metrics_host": "the group serves metrics on its own socket",
    "metrics_port": "the group serves metrics on its own socket; its processes cannot share a port",
}
"""Settings of no single process, and why."""

_PREFIX = "TASKQ_"
_DSNS = ("pg_dsn", "pg_dsn_direct", "pg_dsn_pooled")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SECRET_NAME = re.compile(
    r"(password|passwd|passphrase|_pwd|secret|token|apikey|(api|private|secret|access|encryption|signing|auth|master)_key)$",
    re.IGNORECASE,
)
_SECRET_PART = re.compile(r"\bpassword\s*=\s*[^\s&;]", re.IGNORECASE)
_QUOTED = re.compile(r""" "(?P<double>(?:[^"\\]|\\.)*)" | '(?P<single>[^']*)' """, re.VERBOSE)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_SHOWN = 20


class EnvFileError(Exception):
    """An ``env_file`` cannot be used. ``problems``: the line, 0 for the file itself, and what is wrong; no values."""

    def __init__(self, *problems: tuple[int, str]) -> None:
        super().__init__("; ".join(f"line {line}: {why}" if line else why for line, why in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class EnvFile:
    """A file of ``NAME=value`` lines."""

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    lines: Mapping[str, int] = field(default_factory=dict)
    """On which line each name stands."""


NO_FILE = EnvFile()


def take_env(table: Table) -> dict[str, str]:
    """Take every key of an ``env`` table as a variable. A secret is a problem: whoever reads the file would have it."""
    found: dict[str, str] = {}
    for name, value in table.rest():
        if why := refusal(name):
            table.problem(name, why)
        elif not isinstance(value, str):
            table.problem(name, "must be text: put it in quotes")
        elif "\0" in value:
            table.problem(name, "holds a NUL")
        elif is_secret(name, value):
            table.problem(
                name,
                "holds a secret, which a workgroup file must not: write it into the file that env_file names, "
                "or let [workers.credentials] fetch it if it is the database's",
            )
        else:
            found[name] = value
    if sum(map(len, found.values())) > LARGEST:
        table.problem(next(iter(found)), f"and its neighbours hold more than {LARGEST} characters")
    return found


def read_env_file(path: str) -> EnvFile:
    """Return what the file says, or raise ``EnvFileError``."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe must not wait
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise EnvFileError((0, "is no regular file"))
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise EnvFileError((0, f"cannot be read: {error.strerror or error}")) from None
    if len(content) > LARGEST:
        raise EnvFileError((0, f"is larger than {LARGEST} bytes"))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise EnvFileError((content.count(b"\n", 0, error.start) + 1, "is not UTF-8 text")) from None
    return _parse(text)


def digest(values: Mapping[str, str]) -> str:
    """Return a mark that changes with ``values``; empty when there are none."""
    if not values:
        return ""
    import hashlib  # here, as it is large, and the supervisor stays

    return hashlib.blake2b(json.dumps(sorted(values.items())).encode(), digest_size=16).hexdigest()


def refusal(name: str) -> str:
    """Return why no worker may have a variable ``name`` of its own, or an empty string."""
    if _NAME.fullmatch(name) is None:
        return "the name must be letters, digits and '_', and not start with a digit"
    setting = name.upper().removeprefix(_PREFIX).lower() if name.upper().startswith(_PREFIX) else ""
    if setting in RESERVED:
        return f"must not stand here: {RESERVED[setting]}"
    if setting in GROUP_WIDE and setting not in _DSNS:
        return "must not stand here: one group uses one database; set it in [defaults]"
    if is_kept_from_children(name):
        return "must not stand here: the supervisor sets it, or keeps it for itself"
    return ""


def is_secret(name: str, value: str) -> bool:
    """True when ``value`` is one by the name that it has, or holds a password as addresses do."""
    if not value:
        return False
    if _SECRET_NAME.search(name) or _SECRET_PART.search(value):
        return True
    from urllib.parse import urlsplit  # here, as it is large, and the supervisor stays

    try:
        return bool(urlsplit(value).password)
    except ValueError:
        return "@" in value and "://" in value  # an address that cannot be read


def _parse(text: str) -> EnvFile:
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    problems: list[tuple[int, str]] = []
    for number, line in _statements(text):
        name, sign, written = line.removeprefix("export ").partition("=")
        name, value = name.strip(), _unquote(written.strip())
        why = refusal(name)
        if not sign:
            problems.append((number, "must be NAME=value"))
        elif _NAME.fullmatch(name) is None:
            problems.append((number, why))  # without the name, which may be a part of something secret
        elif why:
            problems.append((number, f"{name}: {why}"))
        elif name in lines:
            problems.append((number, f"{name}: is set on line {lines[name]} already"))
        elif value is None:
            problems.append((number, f"{name}: must end where its quote does"))
        elif "\0" in value:
            problems.append((number, f"{name}: holds a NUL"))
        else:
            values[name], lines[name] = value, number
    if len(problems) > _SHOWN:
        more = len(problems) - _SHOWN
        problems[_SHOWN:] = [(problems[_SHOWN][0], f"and {more} more problem{'s' if more > 1 else ''} from here on")]
    if problems:
        raise EnvFileError(*problems)
    return EnvFile(values, lines)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield what is neither empty nor a comment, with the numbers of the lines."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def _unquote(text: str) -> str | None:
    """Return a value as it is meant; None when a quote is not closed, or something follows it."""
    if text[:1] not in ("'", '"'):
        return text
    quoted = re.fullmatch(_QUOTED, text)
    if quoted is None:
        return None
    if quoted["single"] is not None:
        return quoted["single"]
    return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), quoted["double"])
