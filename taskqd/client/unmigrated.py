"""Says plainly that a schema holds no tables of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from taskqd.domain.errors import SchemaNotMigratedError


@contextmanager
def explain_unmigrated(schema: str) -> Iterator[None]:
    """Turn Postgres' complaint about a missing table of ``schema`` into ``SchemaNotMigratedError``."""
    try:
        yield
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        raise SchemaNotMigratedError(
            f"schema {schema!r} holds no taskqd tables; run 'taskqd migrate up --schema {schema}', "
            "or name the schema that the workers use"
        ) from None
