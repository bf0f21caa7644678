"""The kinds of value that settings hold, each with its check."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

from pydantic import AfterValidator, BeforeValidator, SecretStr

from taskqd.domain.names import QUEUE_RULE, SCHEMA_RULE, is_queue_name, is_schema_name
from taskqd.settings.durations import parse_duration

MAX_SOCKET_PATH = 107 if sys.platform.startswith("linux") else 103
"""Bytes of a unix socket's path that the kernel takes."""

_ENVIRONMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
_SCHEMES = ("postgresql", "postgres")


def dsn_password(dsn: str) -> str | None:
    """Return the password that ``dsn`` carries, in its user part or as a parameter, or None."""
    parts = urlsplit(dsn)
    return parts.password or dict(parse_qsl(parts.query)).get("password") or None


def _check_dsn(secret: SecretStr | None) -> SecretStr | None:
    if secret is None:
        return None
    dsn = secret.get_secret_value()
    try:
        parts = urlsplit(dsn)
    except ValueError:
        raise ValueError("must be a Postgres URL: postgresql://user:password@host:port/database") from None
    if parts.scheme not in _SCHEMES:
        hint = "; drop the driver from the scheme" if parts.scheme.startswith(_SCHEMES) else ""
        raise ValueError(f"must be a Postgres URL: postgresql://user:password@host:port/database{hint}")
    if "@" not in parts.netloc and "@" in parts.path + parts.fragment:
        raise ValueError("holds '/', '?' or '#' before the '@': percent-encode them in user and password")
    if any(ord(char) < 33 for char in dsn):
        raise ValueError("must not hold blanks or control characters: percent-encode them")
    return secret


def _empty_is_none(value: object) -> object:
    return None if isinstance(value, str) and not value.strip() else value


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a whole number")
    return value


def _optional_duration(value: object) -> float | None:
    value = _empty_is_none(value)
    return None if value is None else parse_duration(value)


def _split_queues(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _check_queues(queues: tuple[str, ...]) -> tuple[str, ...]:
    if not queues:
        raise ValueError("must name at least one queue")
    for name in queues:
        if not is_queue_name(name):
            raise ValueError(f"queue {name!r} is invalid: must be {QUEUE_RULE}")
    return tuple(dict.fromkeys(queues))


def _check_schema(name: str) -> str:
    if not is_schema_name(name):
        raise ValueError(f"must be {SCHEMA_RULE}")
    return name


ENVIRONMENT_RULE = "must be 1 to 63 letters, digits, '_', '.' or '-', starting with a letter or a digit"


def is_environment_name(name: str) -> bool:
    """Tell whether ``name`` can name an environment."""
    return _ENVIRONMENT.fullmatch(name) is not None


def _check_environment(name: str | None) -> str | None:
    if name is not None and not is_environment_name(name):
        raise ValueError(ENVIRONMENT_RULE)
    return name


def _check_label(text: str | None) -> str | None:
    if text is not None and (not 1 <= len(text) <= 200 or not text.isprintable()):
        raise ValueError("must be 1 to 200 printable characters")
    return text


def _check_socket_path(path: str) -> str:
    size = len(os.fsencode(path))
    if not path or "\0" in path or size > MAX_SOCKET_PATH:
        raise ValueError(f"must be a path of 1 to {MAX_SOCKET_PATH} bytes, it has {size}: choose a shorter directory")
    return path


def _check_path(path: str | None) -> str | None:
    if path is not None and (not os.path.isabs(path) or not path.isprintable()):
        raise ValueError("must be an absolute path")
    return path


def _split_command(value: object) -> object:
    value = _empty_is_none(value)
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError:
            raise ValueError("must be a command whose quotes are closed") from None
    return value


def _check_command(command: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if command is not None and (not command or not command[0] or any("\0" in word for word in command)):
        raise ValueError("must be a program and its arguments")
    return command


def _upper(value: object) -> object:
    return value.strip().upper() if isinstance(value, str) else value


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


Whole = Annotated[int, BeforeValidator(_no_bool)]
OptionalWhole = Annotated[int | None, BeforeValidator(_no_bool), BeforeValidator(_empty_is_none)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]
OptionalSeconds = Annotated[float | None, BeforeValidator(_optional_duration)]
Dsn = Annotated[SecretStr, AfterValidator(_check_dsn)]
OptionalDsn = Annotated[SecretStr | None, BeforeValidator(_empty_is_none), AfterValidator(_check_dsn)]
Queues = Annotated[tuple[str, ...], BeforeValidator(_split_queues), AfterValidator(_check_queues)]
SchemaName = Annotated[str, AfterValidator(_check_schema)]
EnvironmentName = Annotated[str | None, BeforeValidator(_empty_is_none), AfterValidator(_check_environment)]
Label = Annotated[str, AfterValidator(_check_label)]
OptionalLabel = Annotated[str | None, BeforeValidator(_empty_is_none), AfterValidator(_check_label)]
OptionalUuid = Annotated[UUID | None, BeforeValidator(_empty_is_none)]
OptionalPath = Annotated[str | None, BeforeValidator(_empty_is_none), AfterValidator(_check_path)]
OptionalCommand = Annotated[tuple[str, ...] | None, BeforeValidator(_split_command), AfterValidator(_check_command)]
SocketPath = Annotated[str, AfterValidator(_check_socket_path)]
UpperCase = BeforeValidator(_upper)
LowerCase = BeforeValidator(_lower)
