"""Which jobs to list or to cancel, and the pages they come in."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from taskqd.client.rows import JobRow
from taskqd.domain.arguments import check_flag, check_id, check_text, check_whole
from taskqd.domain.names import nearest
from taskqd.domain.status import ACTIVE, TERMINAL, JobStatus

MAX_PAGE = 1000


class JobOrder(StrEnum):
    """In which order jobs are listed."""

    SCHEDULED_AT_ASC = "scheduled"
    """As they are due: higher priority first, then the earlier, then the older."""
    CREATED_AT_DESC = "created"
    """The newest first."""
    FINISHED_AT_DESC = "finished"
    """Ended jobs alone, the last that ended first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs: those that fit everything that is given; None, or nothing, takes all.

    ``status``
        One :class:`JobStatus`, or several.
    ``active``
        True: those that have not ended; False: those that have.
    ``queue``, ``actor``, ``identity_key``, ``batch_id``
        The jobs of that one.
    ``tags``
        Jobs with at least one of these.
    ``order_by``, ``limit``, ``cursor``
        For listing: a :class:`JobOrder`, 1 to 1,000 jobs (default 100), and the ``next_cursor`` of the page before.

    An identity is found quickest together with its actor. ``SCHEDULED_AT_ASC`` sorts all jobs that fit, so give it
    something that only some fit. Raises ``ValueError``.
    """

    queue: str | None = None
    status: JobStatus | Sequence[JobStatus] | None = None
    active: bool | None = None
    actor: str | None = None
    identity_key: str | None = None
    batch_id: UUID | None = None
    tags: Sequence[str] = ()
    order_by: JobOrder = JobOrder.SCHEDULED_AT_ASC
    limit: int = 100
    cursor: str | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("queue", self.queue),
            ("actor", self.actor),
            ("identity_key", self.identity_key),
            ("cursor", self.cursor),
        ):
            check_text(name, value, optional=True)
        if self.active is not None:
            check_flag("active", self.active)
        check_id("batch_id", self.batch_id, optional=True)
        if not isinstance(self.tags, (list, tuple, set, frozenset)):
            raise TypeError(f"tags = {self.tags!r} must be a list or a tuple of words")
        for tag in self.tags:
            check_text("one of tags", tag)
        check_whole("limit", self.limit, 1, MAX_PAGE)
        if not isinstance(self.order_by, str) or self.order_by not in set(JobOrder):
            raise ValueError(f"order_by = {self.order_by!r} must be {_or(JobOrder)}{_nearest(self.order_by, JobOrder)}")
        _ = self.statuses

    @property
    def statuses(self) -> list[str] | None:
        """The statuses that fit, None for all."""
        if self.status is None:
            wanted = set(JobStatus)
        else:
            given = [self.status] if isinstance(self.status, str) else self.status
            if not isinstance(given, (list, tuple, set, frozenset)):
                raise TypeError(f"status = {given!r} must be a JobStatus, or a list or a tuple of them")
            for one in given:
                if not isinstance(one, str) or one not in set(JobStatus):
                    raise ValueError(f"status = {one!r} must be {_or(JobStatus)}{_nearest(one, JobStatus)}")
            wanted = {JobStatus(one) for one in given}
        if self.active is not None:
            wanted &= ACTIVE if self.active else TERMINAL
        return None if wanted == set(JobStatus) else sorted(wanted)

    @property
    def is_empty(self) -> bool:
        """True when every job fits."""
        return self.statuses is None and not any(
            (self.queue, self.actor, self.identity_key, self.batch_id is not None, self.tags)
        )

    def arguments(self) -> tuple[Any, ...]:
        """Return what fits as the statements take it."""
        return (
            self.queue,
            self.statuses,
            self.actor,
            self.identity_key,
            self.batch_id,
            list(self.tags) if self.tags else None,
        )

    def position(self) -> tuple[int | None, datetime | None, UUID | None]:
        """Return behind which priority, time and id the page begins."""
        if self.cursor is None:
            return None, None, None
        try:
            order, priority, moment, job_id = json.loads(base64.urlsafe_b64decode(self.cursor))
            position = int(priority), datetime.fromisoformat(moment), UUID(job_id)
        except (binascii.Error, ValueError, TypeError):
            raise ValueError(f"cursor = {self.cursor!r} is not the next_cursor of a page") from None
        if order != self.order_by:
            raise ValueError(f"the cursor is of a page in the order {order!r}, not {self.order_by!s}")
        return position

    def page(self, jobs: list[JobRow]) -> JobPage:
        """Return the page that these jobs are."""
        if len(jobs) < self.limit:
            return JobPage(jobs, None)
        last = jobs[-1]
        moments = {JobOrder.CREATED_AT_DESC: last.created_at, JobOrder.FINISHED_AT_DESC: last.finished_at}
        moment = moments.get(self.order_by) or last.scheduled_at
        text = json.dumps([self.order_by, last.priority, moment.isoformat(), str(last.id)])
        return JobPage(jobs, base64.urlsafe_b64encode(text.encode()).decode())


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs, and the cursor of those that come after them, None when there are none."""

    jobs: list[JobRow]
    next_cursor: str | None


def _or(known: type[StrEnum]) -> str:
    return f"one of {', '.join(known)}"


def _nearest(given: object, known: type[StrEnum]) -> str:
    return nearest(given, known) if isinstance(given, str) else ""
