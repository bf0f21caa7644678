"""The migration files: ``NNNN_name.pre.sql`` runs before new code is rolled out, ``NNNN_name.post.sql``
after.

The head of a file is comment lines, among them ``-- min_code: N`` (the lowest code level that can run on the
schema once the file is applied) and, where a statement such as ``create index concurrently`` demands it, ``--
taskqd: no-transaction``. Such a file is sent statement by statement and must be safe to run again after it
stopped half-way: drop an invalid index before building it. SQL names everything with ``{schema}.``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from taskqd.domain.errors import ConfigError

PHASES = ("pre", "post")

_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9][a-z0-9_]*)\.(pre|post)\.sql")
_MIN_CODE = re.compile(r"--\s*min_code:\s*(.*?)\s*")
_OPTION = re.compile(r"--\s*taskqd:\s*(.*?)\s*")
_NO_TRANSACTION = "no-transaction"
_TRANSACTION_CONTROL = re.compile(r"(begin|start\s+transaction|commit|rollback|abort)\b", re.IGNORECASE)
# What may hide a semicolon: comments, strings (with backslash escapes after E), quoted names, dollar quotes.
_SQL_TOKEN = re.compile(
    r"""--[^\n]* | /\*.*?\*/ | \b[eE]'(?:[^'\\]|\\.|'')*' | '(?:[^']|'')*' | "(?:[^"]|"")*"
      | \$(?P<tag>[A-Za-z_]\w*|)\$.*?\$(?P=tag)\$ | (?P<end>;)""",
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True)
class MigrationFile:
    """One migration: its place in the order, its SQL and what its head declares."""

    version: int
    name: str
    phase: str
    sql: str = field(repr=False)
    checksum: str
    """SHA-256 of the text with LF line ends, before the schema name is filled in."""
    min_code: int
    in_transaction: bool

    @property
    def filename(self) -> str:
        return f"{self.version:04d}_{self.name}.{self.phase}.sql"


def default_directory() -> Path:
    """Return where the migrations are: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "migrations"
    return installed if installed.is_dir() else package.parent / "migrations"


def read_migrations(directory: Path | None = None) -> list[MigrationFile]:
    """Return the migrations of ``directory`` in the order in which they are applied.

    Raises ``ConfigError`` for a missing directory, a ``.sql`` file with another name, a version that is
    missing or used twice, and a head that does not declare ``min_code``.
    """
    directory = default_directory() if directory is None else directory
    if not directory.is_dir():
        raise ConfigError(f"migration directory {str(directory)!r} does not exist; the installation is incomplete")
    found = [_read(path) for path in sorted(directory.glob("*.sql"))]
    found.sort(key=lambda file: (file.version, PHASES.index(file.phase)))
    expected = 1
    for file in found:
        if file.version > expected:
            raise ConfigError(f"migration {expected:04d} is missing: the next file is {file.filename}")
        expected = file.version + 1
    for one, other in pairwise(found):
        if one.version == other.version and (one.phase == other.phase or one.name != other.name):
            raise ConfigError(f"migration {one.version:04d} exists twice: {one.filename} and {other.filename}")
    return found


def split_statements(sql: str) -> list[str]:
    """Return the statements of ``sql`` that are more than comments. Knows no ``begin atomic`` bodies."""
    statements, start = [], 0
    for token in _SQL_TOKEN.finditer(sql):
        if token["end"]:
            statements.append(sql[start : token.start()].strip())
            start = token.end()
    statements.append(sql[start:].strip())
    return [statement for statement in statements if _without_comments(statement)]


def _read(path: Path) -> MigrationFile:
    match = _FILE_NAME.fullmatch(path.name)
    if match is None or match[1] == "0000":
        raise ConfigError(f"migration file {path.name!r} is misnamed: expected NNNN_name.pre.sql or NNNN_name.post.sql")
    text = path.read_text(encoding="utf-8")  # any line end reads as LF
    min_code, options = _read_head(path.name, text)
    statements = split_statements(text)
    if not statements:
        raise ConfigError(f"migration {path.name} holds no SQL")
    for statement in statements:
        if control := _TRANSACTION_CONTROL.match(_without_comments(statement)):
            raise ConfigError(
                f"migration {path.name} must not contain {control[0].upper()}: "
                "the runner opens and ends the transaction"
            )
    return MigrationFile(
        version=int(match[1]),
        name=match[2],
        phase=match[3],
        sql=text,
        checksum=hashlib.sha256(text.encode()).hexdigest(),
        min_code=min_code,
        in_transaction=_NO_TRANSACTION not in options,
    )


def _read_head(name: str, text: str) -> tuple[int, list[str]]:
    min_code, options = 0, []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        if match := _MIN_CODE.fullmatch(line):
            if not re.fullmatch(r"[1-9]\d{0,8}", match[1]):
                raise ConfigError(f"migration {name}: min_code {match[1]!r} is not a whole number from 1")
            min_code = int(match[1])
        elif match := _OPTION.fullmatch(line):
            if match[1] != _NO_TRANSACTION:
                raise ConfigError(f"migration {name}: unknown option {match[1]!r}; the only one is {_NO_TRANSACTION!r}")
            options.append(match[1])
    if min_code == 0:
        raise ConfigError(f"migration {name} does not declare '-- min_code: N' in its head")
    return min_code, options


def _without_comments(statement: str) -> str:
    return re.sub(r"--[^\n]*|/\*.*?\*/", "", statement, flags=re.DOTALL).strip()
