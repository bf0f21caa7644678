"""The database address: checked before use, and described without its password."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from taskqd.domain.errors import ConfigError

_UNREADABLE = "a database DSN that cannot be read"


@dataclass(frozen=True)
class Address:
    """Who connects where: what a message may say about a DSN."""

    user: str
    hosts: tuple[tuple[str, str], ...]
    """Pairs of host (or socket directory) and port."""
    database: str

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if host.count(":") > 1 else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.user}@{hosts}/{self.database}"


def parse_dsn(dsn: str) -> Address:
    """Return the address in ``dsn``; what it omits comes from ``PGHOST``, ``PGPORT``, ``PGUSER``,
    ``PGDATABASE``.

    Raises ``ConfigError`` for a DSN that is not a ``postgresql://`` URL, whose port is not a number, or which
    is ambiguous because a special character of the password is not percent-encoded. The message never quotes
    the DSN: a wrongly encoded password may stand in any of its parts.
    """
    try:
        url = urlsplit(dsn)
        query = dict(parse_qsl(url.query, strict_parsing=True)) if url.query else {}
    except ValueError:
        raise ConfigError(
            "the database DSN is not a valid URL: expected postgresql://user:password@host:port/database, "
            "with special characters percent-encoded"
        ) from None
    if url.scheme not in ("postgresql", "postgres"):
        raise ConfigError("the database DSN must begin with postgresql:// (or postgres://)")
    if _is_ambiguous(url):
        raise ConfigError(
            "the database DSN is ambiguous: percent-encode the special characters of user, password and "
            "parameters ('@' as %40, '/' as %2F, '?' as %3F, '#' as %23)"
        )
    auth, _, hosts = url.netloc.rpartition("@")
    user = unquote(auth.partition(":")[0]) or query.get("user") or os.environ.get("PGUSER") or _os_user()
    return Address(
        user=user,
        hosts=_hosts(unquote(hosts) or query.get("host") or os.environ.get("PGHOST", ""), query.get("port", "")),
        database=unquote(url.path.removeprefix("/"))
        or query.get("dbname")
        or query.get("database")
        or os.environ.get("PGDATABASE")
        or user,
    )


def describe_dsn(dsn: str) -> str:
    """Return ``user@host:port/database`` for logs and messages: never the password, never an error."""
    try:
        return str(parse_dsn(dsn))
    except ConfigError:
        return _UNREADABLE


def _is_ambiguous(url: SplitResult) -> bool:
    if url.netloc.count("@") > 1 or url.fragment or "@" in url.path:
        return True
    return bool(url.netloc) and "@" in url.query


def _hosts(hosts: str, ports: str) -> tuple[tuple[str, str], ...]:
    names, own_ports = [], []
    for host in (hosts or "local socket").split(","):
        if host.startswith("["):
            name, _, port = host[1:].partition("]")
            port = port.removeprefix(":")
        elif host.startswith("/"):
            name, port = host, ""
        else:
            name, _, port = host.partition(":")
        names.append(name)
        own_ports.append(port)
    default = (ports or os.environ.get("PGPORT") or "5432").split(",")
    if len(default) == 1:
        default *= len(names)
    if len(default) != len(names):
        raise ConfigError(f"the database DSN names {len(names)} hosts but {len(default)} ports")
    chosen = [own or other for own, other in zip(own_ports, default, strict=True)]
    for port in chosen:
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError("the port in the database DSN must be a number from 1 to 65535")
    return tuple(zip(names, chosen, strict=True))


def _os_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):  # no such user id in the password database
        return "unknown user"
