"""The ledger of applied migrations: one append-only table in the schema it describes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import asyncpg

from taskqd.domain.errors import ConfigError, DatabaseAuthError
from taskqd.storage.migration_files import MigrationFile
from taskqd.storage.statements import load

_QUERY_TIMEOUT = 30.0

Reader = asyncpg.Connection | asyncpg.Pool
"""Whatever answers a query."""


@dataclass(frozen=True)
class LedgerRow:
    """One applied migration."""

    version: int
    phase: str
    name: str
    checksum: str
    min_code: int
    applied_at: datetime
    applied_by: str

    @property
    def filename(self) -> str:
        """The name of the file that was applied."""
        return f"{self.version:04d}_{self.name}.{self.phase}.sql"


async def ledger_exists(conn: Reader, schema: str) -> bool:
    """Tell whether ``schema`` has a ledger; needs no privilege on it."""
    return bool(await conn.fetchval(load("migrate", schema).ledger_exists, timeout=_QUERY_TIMEOUT))


async def create_ledger(conn: asyncpg.Connection, schema: str) -> None:
    """Create the ledger, and the schema when it is missing. Call it under the lock, in a transaction."""
    statements = load("migrate", schema)
    if not await conn.fetchval(statements.schema_exists, timeout=_QUERY_TIMEOUT):
        await conn.execute(statements.create_schema, timeout=_QUERY_TIMEOUT)
    await conn.execute(statements.create_ledger, timeout=_QUERY_TIMEOUT)


async def read_ledger(conn: Reader, schema: str) -> list[LedgerRow]:
    """Return the applied migrations in order; none where there is no ledger. ``conn`` is in no transaction.

    Raises ``DatabaseAuthError`` when this role may not read it and ``ConfigError`` when the table is not
    ours.
    """
    try:
        rows = await conn.fetch(load("migrate", schema).read_ledger, timeout=_QUERY_TIMEOUT)
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return []
    except asyncpg.InsufficientPrivilegeError as error:
        raise DatabaseAuthError(f"the ledger of schema {schema!r} cannot be read: {error.args[0]}") from None
    except asyncpg.UndefinedColumnError:
        raise ConfigError(
            f"schema {schema!r} holds a schema_migrations table of another program: choose another schema"
        ) from None
    return [LedgerRow(**dict(row)) for row in rows]


async def record(conn: asyncpg.Connection, schema: str, file: MigrationFile) -> None:
    """Add ``file`` to the ledger."""
    await conn.execute(
        load("migrate", schema).record,
        file.version,
        file.phase,
        file.name,
        file.checksum,
        file.min_code,
        timeout=_QUERY_TIMEOUT,
    )
