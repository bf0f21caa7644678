"""A job as it is stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from taskqd.domain.status import TERMINAL, JobStatus


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job's row. Times are the database's, timezone-aware; ``payload``, ``result``, ``metadata`` decoded JSON.

    A whole number of more than 4,300 digits comes as a ``Decimal``, and what nests too deeply for Python as its text.
    """

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
    identity_key: str | None
    fairness_key: str | None
    payload: Any
    result: Any
    metadata: Any
    tags: list[str] | None
    error_class: str | None
    error_message: str | None
    error_traceback: str | None
    progress_seq: int
    """Rises with every report of the job's actors that was stored."""
    progress_state: Any
    """What the actors reported last: ``step``, ``percent``, ``detail``, ``data``; None when nothing was."""
    result_text: str | None
    """The result as stored, for decoding with the actor's own type."""
    archived_at: datetime | None = None
    """When retention moved it to the archive, where it can only be looked at; None while it is among the jobs."""

    @property
    def is_terminal(self) -> bool:
        """True when the job has ended."""
        return self.status in TERMINAL

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> JobRow:
        """Return the row of a record of the statement ``job``, or ``archived_job``."""
        values = dict(record)
        values["status"] = JobStatus(values["status"])
        values["result_text"] = values["result"]
        for column in ("payload", "result", "metadata", "progress_state"):
            values[column] = None if values[column] is None else _decoded(values[column])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job has come: its status, and what its actors reported last; ``seq`` rises with every report."""

    status: JobStatus
    seq: int
    state: Any

    @property
    def is_terminal(self) -> bool:
        """True when the job has ended."""
        return self.status in TERMINAL

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> JobProgress:
        """Return the progress of a record of the statement ``job_progress``."""
        state = record["progress_state"]
        return cls(JobStatus(record["status"]), record["progress_seq"], None if state is None else _decoded(state))


def _decoded(text: str) -> Any:
    """Return JSON as objects; what SQL has stored and Python cannot hold must not keep a whole page from being read."""
    try:
        return json.loads(text, parse_int=_whole)
    except RecursionError:  # nested too deeply: left as text
        return text


def _whole(digits: str) -> int | Decimal:
    try:
        return int(digits)
    except ValueError:  # longer than the interpreter reads
        return Decimal(digits)
