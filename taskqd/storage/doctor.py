"""What a doctor looks at, and what it says: each check answers findings, and none of them changes anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import asyncpg

from taskqd.domain.errors import TaskQError
from taskqd.storage.connect import SESSION_LOST
from taskqd.storage.statements import Statements, load

if TYPE_CHECKING:
    from taskqd.settings import Settings

STATEMENT_TIMEOUT = 20.0
"""Seconds that one statement of a check may take."""
LOCK_TIMEOUT = 2.0
MAX_NAMED = 5
"""Names that one finding lists; the rest is counted."""


class Severity(Enum):
    """How bad it is. Anything but OK makes the doctor's answer ``degraded``."""

    OK = "ok"
    """As it should be, or worth knowing."""
    WARN = "warn"
    """It works, and will hurt."""
    FAIL = "fail"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say."""

    check: str
    severity: Severity
    where: str
    """The table, queue, actor, session … it is about; empty: the whole installation."""
    what: str
    why: str = ""
    """Why it matters."""
    do: str = ""
    """What to do about it."""
    fix: str = ""
    """A statement that sets it right, where there is one."""

    def to_dict(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return {
            "check": self.check,
            "severity": self.severity.value,
            "where": self.where,
            "what": self.what,
            "why": self.why,
            "do": self.do,
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Patient:
    """What is looked at: one installation, through one session that may not write."""

    conn: asyncpg.Connection
    settings: Settings
    sql: Statements = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sql", load("doctor", self.schema))

    @property
    def schema(self) -> str:
        """The schema of the installation."""
        return self.settings.schema_name

    async def rows(self, name: str, *arguments: Any) -> list[asyncpg.Record]:
        """Return the rows of a statement of ``doctor.sql``."""
        return list(await self.conn.fetch(self.sql[name], *arguments))

    async def row(self, name: str, *arguments: Any) -> asyncpg.Record:
        """Return its one row."""
        return (await self.rows(name, *arguments))[0]


Check = Callable[[Patient], Awaitable[list[Finding]]]


async def examine(conn: asyncpg.Connection, settings: Settings, checks: Sequence[tuple[str, Check]]) -> list[Finding]:
    """Return what ``checks`` find, in their order. One that cannot look says so and keeps no other from looking.

    ``conn`` is a direct session outside a transaction; it is left read-only. A lost session is raised as it is.
    """
    await conn.execute(
        f"set statement_timeout = {round(STATEMENT_TIMEOUT * 1000)}; set lock_timeout = {round(LOCK_TIMEOUT * 1000)}; "
        "set default_transaction_read_only = on"
    )
    # A backlog that the statistics do not know of must be neither sorted nor walked as a whole.
    await conn.execute("set enable_sort = off; set enable_bitmapscan = off; set enable_seqscan = off")
    patient = Patient(conn, settings)
    found: list[Finding] = []
    for name, check in checks:
        try:
            found += await check(patient)
        except SESSION_LOST:
            if conn.is_closed():
                raise
            found.append(_blind(name, "the session was lost"))
        except (asyncpg.PostgresError, TaskQError) as error:
            found.append(_blind(name, str(error.args[0]) if error.args else type(error).__name__))
    return found


def ok(check: str, what: str, where: str = "") -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Severity.OK, where, what)


def warn(check: str, where: str, what: str, why: str, do: str, fix: str = "") -> Finding:
    """Return a finding that something will hurt."""
    return Finding(check, Severity.WARN, where, what, why, do, fix)


def fail(check: str, where: str, what: str, why: str, do: str, fix: str = "") -> Finding:
    """Return a finding that something does not work."""
    return Finding(check, Severity.FAIL, where, what, why, do, fix)


def listed(names: Iterable[str]) -> str:
    """Return the first names, and how many there are more."""
    every = list(names)
    rest = len(every) - MAX_NAMED
    return ", ".join(every[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def span(seconds: float) -> str:
    """Return a time as a person would say it."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _blind(check: str, why: str) -> Finding:
    do = "run it as a role that may read this, or when the database is less busy"
    return warn(check, "", f"could not be looked at: {why}", "what nobody looks at is not known to be well", do)
