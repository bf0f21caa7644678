"""What is limited, paused or takes turns, as stored in the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from taskqd.storage.statements import Statements

FRESH = 2.0
"""Seconds after which a worker reads them again, once it has claimed."""
MAX_AGE = 4.5
"""Seconds after which it reads them again before it claims: a change is live within 5."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The stored rules of this worker's queues and actors at one moment."""

    plain: list[str]
    """Its actors that nothing limits."""
    limited: dict[str, list[str]] = field(default_factory=dict)
    """The gates of those that something does."""
    capped: frozenset[str] = frozenset()
    """Queues with a limit of their own."""
    round_robin: frozenset[str] = frozenset()
    paused: frozenset[str] = frozenset()

    @classmethod
    async def read(
        cls, pool: Any, sql: Statements, queues: Sequence[str], actors: Sequence[str], timeout: float
    ) -> Rules:
        """Read them; each statement within ``timeout`` seconds."""
        stored = await pool.fetch(sql.actor_rules, actors, timeout=timeout)
        limited = {
            record["actor"]: [f"a:{record['actor']}"] * record["capped"]
            + [f"r:{name}" for name in record["reservations"]]
            for record in stored
        }
        rows = await pool.fetch(sql.queue_rules, queues, timeout=timeout)
        return cls(
            [actor for actor in actors if actor not in limited],
            limited,
            frozenset(row["name"] for row in rows if row["capped"]),
            frozenset(row["name"] for row in rows if row["round_robin"]),
            frozenset(row["name"] for row in rows if row["paused"]),
        )

    def gates(self, route: str, actor: str | None = None) -> list[str]:
        """The buckets that a job of ``route``, and of ``actor`` where its lane is of one actor, must pass."""
        own = [] if actor is None else self.limited.get(actor, [])
        return own + [f"q:{route}"] * (route in self.capped)

    def is_plain(self, route: str) -> bool:
        """Whether the plain lane of ``route`` is served head first, without a limit."""
        return route not in self.capped and route not in self.round_robin
