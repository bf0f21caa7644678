"""Named SQL statements, read from ``taskqd/storage/sql/*.sql``.

A file is a row of blocks. Each block is headed by ``-- name: <statement_name>``, then comment lines that say
what the statement is for, which index serves it and in which order it locks, then one SQL statement::

    -- name: count_pending
    -- For `queue status`. Served by jobs_claim. Locks nothing.
    select count(*) from {schema}.jobs where status = 'pending'

``{schema}`` becomes the quoted schema name, ``{schema_literal}`` the same name as a string literal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files

from taskqd.domain.names import nearest
from taskqd.storage.schema_name import render

_HEADER = re.compile(r"^--[ \t]*name:[ \t]*(\S*)[ \t]*$", re.MULTILINE)
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Statements(Mapping[str, str]):
    """The statements of one file for one schema: ``stmts.claim`` or ``stmts["claim"]``. Immutable."""

    def __init__(self, file: str, sql: Mapping[str, str]) -> None:
        self.__dict__.update(sql, _file=file, _names=tuple(sql))

    def __getattr__(self, name: str) -> str:
        # Reached only when the instance dictionary has no such name.
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{self._file}.sql has no statement {name!r}{nearest(name, self)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the statements of {self._file}.sql are immutable")

    def __getitem__(self, name: str) -> str:
        if name not in self._names:
            raise KeyError(name)
        sql: str = self.__dict__[name]
        return sql

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Statements({self._file!r}, {list(self._names)})"


@lru_cache(maxsize=256)
def load(file: str, schema: str) -> Statements:
    """Return the statements of ``sql/<file>.sql`` for ``schema``, cached.

    Raises ``ConfigError`` for an invalid schema name, ``FileNotFoundError`` for an unknown file and
    ``ValueError`` for a malformed one (duplicate or invalid name, a block without a statement).
    """
    text = files("taskqd.storage").joinpath("sql", f"{file}.sql").read_text(encoding="utf-8")
    return parse(file, render(text, schema))


def parse(file: str, text: str) -> Statements:
    """Return the statements of ``text``; ``file`` names them in errors."""
    preamble, *parts = _HEADER.split(text)
    if _without_comments_around(preamble):
        raise ValueError(f"{file}.sql: SQL before the first '-- name:' line")
    statements: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if not _NAME.fullmatch(name) or hasattr(Statements, name):
            raise ValueError(f"{file}.sql: {name!r} cannot name a statement")
        if name in statements:
            raise ValueError(f"{file}.sql: statement {name!r} is defined twice")
        sql = _without_comments_around(body).removesuffix(";").rstrip()
        if not sql:
            raise ValueError(f"{file}.sql: statement {name!r} is empty")
        statements[name] = sql
    return Statements(file, statements)


def _without_comments_around(text: str) -> str:
    lines = text.splitlines()
    while lines and _is_comment(lines[0]):
        lines.pop(0)
    while lines and _is_comment(lines[-1]):
        lines.pop()
    return "\n".join(lines).strip()


def _is_comment(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("--")
