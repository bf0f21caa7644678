"""Bringing a schema to the level of this code, and telling whether it is there.

The ledger ``{schema}.schema_migrations`` records every applied file with its checksum and the lowest code
level that can run on the schema from then on. A process starts only where the newest applied ``pre``
migration is at least ``MIN_SCHEMA`` and no applied file demands more than ``CODE_LEVEL``. Pending ``post``
migrations do not matter to it: they are applied, by hand, once no older code runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from taskqd.domain.errors import (
    ConfigError,
    MigrationChecksumError,
    MigrationLockTimeoutError,
    SchemaNotMigratedError,
    SchemaOutOfRangeError,
    TaskQError,
)
from taskqd.storage.connect import SESSION_LOST
from taskqd.storage.migration_files import PHASES, MigrationFile, read_migrations, split_statements
from taskqd.storage.migration_ledger import LedgerRow, Reader, create_ledger, ledger_exists, read_ledger, record
from taskqd.storage.migration_lock import (
    bounded_session,
    bounded_transaction,
    describe_blockers,
    migration_lock,
)
from taskqd.storage.schema_name import check_schema_name, render

CODE_LEVEL = 1
"""The level of this code; a schema whose ledger demands more is too new for it."""
MIN_SCHEMA = 1
"""The ``pre`` migration that this code cannot run without."""

_LONGEST_LOCK_TIMEOUT = 3600.0
_DEFAULT_SCHEMA = "taskq"


class MigrationFailedError(TaskQError):
    """Postgres refused a statement of a migration."""


@dataclass(frozen=True)
class Applied:
    """A migration that this run applied, and how long it took in seconds."""

    file: MigrationFile
    seconds: float


@dataclass(frozen=True)
class Status:
    """What is applied, what is not, and which applied files no longer have the text that was applied."""

    applied: list[LedgerRow]
    pending: list[MigrationFile]
    drift: list[LedgerRow]

    @property
    def version(self) -> int:
        """The newest applied ``pre`` migration; 0 for an empty schema."""
        return _newest_pre(self.applied)


async def migrate_up(
    conn: asyncpg.Connection,
    schema: str,
    *,
    target: int | None = None,
    max_steps: int | None = None,
    phase: str | None = None,
    lock_timeout: float = 30.0,
    directory: Path | None = None,
    on_applied: Callable[[Applied], None] | None = None,
) -> list[Applied]:
    """Apply the pending migrations in order, each in a transaction of its own, and return them.

    ``conn`` is a direct connection outside a transaction: the migration lock belongs to its session.
    ``target`` is the last version to apply, ``max_steps`` the most files, ``phase`` limits to ``pre`` or
    ``post`` files. ``lock_timeout`` (seconds) bounds the wait for the migration lock and every wait for a
    lock inside a file. ``on_applied`` is called after each file. What was applied before an error stays
    applied; run again to go on.

    Raises ``MigrationLockTimeoutError``, ``MigrationChecksumError`` (an applied file was edited),
    ``SchemaOutOfRangeError`` (the schema is too new for this code), ``MigrationFailedError`` and
    ``ConfigError``. The error of a lost connection is passed on as it is.
    """
    check_schema_name(schema)
    files = read_migrations(directory)
    _check_arguments(files, target, max_steps, phase, lock_timeout)
    if conn.is_in_transaction():
        raise ConfigError("a migration needs a connection outside a transaction")
    done: list[Applied] = []
    async with migration_lock(conn, schema, lock_timeout):
        await _ensure_ledger(conn, schema, lock_timeout)
        status = _compare(await read_ledger(conn, schema), files)
        _refuse_too_new(status.applied, schema)
        _refuse_drift(status.drift, schema)
        for file in _select(status.pending, target, phase)[:max_steps]:
            if file.min_code > CODE_LEVEL:
                raise ConfigError(f"migration {file.filename} needs code level {file.min_code}, this is {CODE_LEVEL}")
            started = time.monotonic()
            await _apply(conn, schema, file, lock_timeout)
            done.append(Applied(file, time.monotonic() - started))
            if on_applied is not None:
                on_applied(done[-1])
    return done


async def migrate_status(conn: asyncpg.Connection, schema: str, directory: Path | None = None) -> Status:
    """Compare the ledger of ``schema`` with the files. Takes no lock and changes nothing."""
    return _compare(await read_ledger(conn, schema), read_migrations(directory))


async def check_schema(conn: Reader, schema: str) -> None:
    """Return when this code can run on ``schema``.

    Raises ``SchemaNotMigratedError`` for an empty one, ``SchemaOutOfRangeError`` for one too old or too new.
    """
    rows = await read_ledger(conn, schema)
    if not rows:
        raise SchemaNotMigratedError(f"schema {schema!r} is not migrated: run {_up(schema)}")
    _refuse_too_new(rows, schema)
    if _newest_pre(rows) < MIN_SCHEMA:
        raise SchemaOutOfRangeError(
            f"schema {schema!r} is too old for this code: it is at migration {_newest_pre(rows)}, "
            f"{MIN_SCHEMA} is needed: run {_up(schema)}"
        )


# -- the parts of a run ---------------------------------------------------------------------------


async def _ensure_ledger(conn: asyncpg.Connection, schema: str, lock_timeout: float) -> None:
    if await ledger_exists(conn, schema):
        return
    try:
        async with bounded_transaction(conn, schema, lock_timeout):
            await create_ledger(conn, schema)
    except asyncpg.InsufficientPrivilegeError as error:
        raise MigrationFailedError(f"schema {schema!r} cannot be prepared: {error.args[0]}") from None


async def _apply(conn: asyncpg.Connection, schema: str, file: MigrationFile, lock_timeout: float) -> None:
    sql = render(file.sql, schema)
    try:
        if file.in_transaction:
            async with bounded_transaction(conn, schema, lock_timeout):
                await conn.execute(sql)
                await record(conn, schema, file)
        else:
            async with bounded_session(conn, schema, lock_timeout):
                for statement in split_statements(sql):
                    await conn.execute(statement)
                await record(conn, schema, file)
    except asyncpg.LockNotAvailableError:
        blockers = await describe_blockers(conn, schema, lock_timeout)
        raise MigrationLockTimeoutError(
            f"migration {file.filename} waited {lock_timeout:g} s for a lock {blockers}; {_aftermath(file)}"
        ) from None
    except SESSION_LOST:
        raise
    except asyncpg.PostgresError as error:
        raise MigrationFailedError(
            f"migration {file.filename} failed{_at_line(error, file, sql)}: {error.args[0]} "
            f"(SQLSTATE {error.sqlstate}); {_aftermath(file)}"
        ) from None


def _check_arguments(
    files: Sequence[MigrationFile],
    target: int | None,
    max_steps: int | None,
    phase: str | None,
    lock_timeout: float,
) -> None:
    newest = files[-1].version if files else 0
    if target is not None and not 1 <= target <= newest:
        raise ConfigError(f"target {target} is not a migration: allowed are 1 to {newest}")
    if max_steps is not None and max_steps < 1:
        raise ConfigError(f"max steps {max_steps} must be at least 1")
    if phase is not None and phase not in PHASES:
        raise ConfigError(f"phase {phase!r} must be 'pre' or 'post'")
    if not 0 < lock_timeout <= _LONGEST_LOCK_TIMEOUT:
        raise ConfigError(f"lock timeout {lock_timeout:g} s must be above 0 and at most {_LONGEST_LOCK_TIMEOUT:g}")


def _compare(rows: Sequence[LedgerRow], files: Sequence[MigrationFile]) -> Status:
    known = {(file.version, file.phase): file for file in files}
    applied = {(row.version, row.phase) for row in rows}
    return Status(
        applied=list(rows),
        pending=[file for key, file in known.items() if key not in applied],
        drift=[
            row
            for row in rows
            if (file := known.get((row.version, row.phase))) is not None and file.checksum != row.checksum
        ],
    )


def _select(pending: Sequence[MigrationFile], target: int | None, phase: str | None) -> list[MigrationFile]:
    wanted = [
        file
        for file in pending
        if (target is None or file.version <= target) and (phase is None or file.phase == phase)
    ]
    if phase == "post" and wanted:
        missing = [file for file in pending if file.phase == "pre" and file.version <= wanted[-1].version]
        if missing:
            raise ConfigError(f"{wanted[-1].filename} cannot be applied before {missing[0].filename}: use phase 'pre'")
    return wanted


def _refuse_too_new(rows: Sequence[LedgerRow], schema: str) -> None:
    for row in rows:
        if row.min_code > CODE_LEVEL:
            raise SchemaOutOfRangeError(
                f"schema {schema!r} is too new for this code: {row.filename} needs code level "
                f"{row.min_code}, this is {CODE_LEVEL}: upgrade taskqd"
            )


def _refuse_drift(drift: Sequence[LedgerRow], schema: str) -> None:
    if drift:
        raise MigrationChecksumError(
            f"{', '.join(row.filename for row in drift)} changed after it was applied to schema {schema!r}: "
            "restore the applied text and put the change into a new migration"
        )


def _newest_pre(rows: Sequence[LedgerRow]) -> int:
    return max((row.version for row in rows if row.phase == "pre"), default=0)


def _up(schema: str) -> str:
    return "`taskqd migrate up`" if schema == _DEFAULT_SCHEMA else f"`taskqd migrate up --schema {schema}`"


def _aftermath(file: MigrationFile) -> str:
    if file.in_transaction:
        return "it was rolled back and can be run again"
    return "it runs outside a transaction: what came before stays, run it again"


def _at_line(error: asyncpg.PostgresError, file: MigrationFile, sql: str) -> str:
    if error.position is None or not file.in_transaction:
        return ""
    return f" at line {sql.count(chr(10), 0, int(error.position) - 1) + 1}"
