"""A job as it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from taskqd.domain.status import TERMINAL, JobStatus


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job's row. Times are the database's, timezone-aware; ``payload``, ``result``, ``metadata`` decoded JSON."""

    id: UUID
    actor: str
    queue: str
    route: str
    status: JobStatus
    priority: int
    attempt: int
    max_attempts: int
    epoch: int
    interrupt_count: int
    snooze_count: int
    created_at: datetime
    scheduled_at: datetime
    claimed_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    schedule_to_close: datetime | None
    worker_id: UUID | None
    batch_id: UUID | None
    idempotency_scope: str
    idempotency_key: str | None
    payload: Any
    result: Any
    metadata: Any
    tags: list[str] | None
    error_class: str | None
    error_message: str | None
    error_traceback: str | None
    result_text: str | None
    """The result as stored, for decoding with the actor's own type."""

    @property
    def is_terminal(self) -> bool:
        """True when the job has ended."""
        return self.status in TERMINAL

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> JobRow:
        """Return the row of a record of the statement ``job``."""
        values = dict(record)
        values["status"] = JobStatus(values["status"])
        values["result_text"] = values["result"]
        for column in ("payload", "result", "metadata"):
            values[column] = None if values[column] is None else json.loads(values[column])
        return cls(**values)
