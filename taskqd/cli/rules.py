"""What ``taskqd queue`` and ``taskqd actor`` have in common: one statement each, and how a limit is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from taskqd.cli.session import session
from taskqd.domain.reservation import MAX_SLOTS
from taskqd.settings import load_settings
from taskqd.storage.boot import admit
from taskqd.storage.statements import load

MAX_COUNTED = 10_000
"""Jobs of one queue that a list counts; more are told as more."""
TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit that was given; None is none."""

    value: int | None


def limit_from(least: int) -> Callable[[click.Context, click.Parameter, str | None], Limit | None]:
    """Return the callback of an option that takes a whole number from ``least`` on, or ``none``."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Limit | None:
        if value is None:
            return None
        if value == "none":
            return Limit(None)
        if value.isascii() and value.isdigit() and least <= int(value) <= MAX_SLOTS:
            return Limit(int(value))
        raise click.BadParameter(f"{value!r} must be a whole number, {least} to {MAX_SLOTS}, or none", ctx, param)

    return read


def limit_text(limit: int | None) -> str:
    """A limit as it is written."""
    return "none" if limit is None else str(limit)


def counted(number: int) -> str:
    """A count that was not carried on for ever."""
    return str(number) if number <= MAX_COUNTED else f"> {MAX_COUNTED}"


def query(name: str, *arguments: Any) -> list[Any]:
    """Run a statement of ``rules.sql`` and return its rows."""
    settings = load_settings()

    async def run() -> list[Any]:
        async with session(settings, "rules") as connection:
            await admit(connection, settings)
            sql = load("rules", settings.schema_name)
            return list(await connection.fetch(sql[name], *arguments, timeout=TIMEOUT))

    return asyncio.run(run())


def single(name: str, *arguments: Any) -> Any:
    """Run a statement of ``rules.sql`` and return its one row, None for none."""
    return next(iter(query(name, *arguments)), None)
