"""Fixtures for the tests of the migration runner."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncpg
import pytest

from tests.storage.migrations import (
    ADD_NAME,
    CREATE_THINGS,
    DROP_NAME,
    Migrations,
)


@pytest.fixture
def files(tmp_path: Path) -> Migrations:
    """An empty directory for migrations."""
    return Migrations(tmp_path)


@pytest.fixture
def three(files: Migrations) -> Migrations:
    """Three migrations: create a table, add a column, and, after the roll-out, drop it again."""
    files.write("0001_things.pre.sql", CREATE_THINGS)
    files.write("0002_name.pre.sql", ADD_NAME)
    files.write("0002_name.post.sql", DROP_NAME)
    return files


@pytest.fixture
async def fresh(conn: asyncpg.Connection) -> AsyncIterator[Callable[[], str]]:
    """Names for schemas that do not exist yet; what became of them is dropped after the test."""
    names: list[str] = []

    def name() -> str:
        names.append(f"m_{uuid.uuid4().hex[:12]}")
        return names[-1]

    yield name
    for each in names:
        await conn.execute(f"drop schema if exists {each} cascade")


@pytest.fixture
def name(fresh: Callable[[], str]) -> str:
    """The name of one schema that does not exist yet."""
    return fresh()
