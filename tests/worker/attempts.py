"""Attempts for tests, made from claimed rows or out of nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import asyncpg

from taskqd.domain.ids import new_uuid
from taskqd.worker.attempt import Attempt
from tests.apps import basic

REFS = {ref.name: ref for ref in basic.actors}


def attempt_of(record: asyncpg.Record) -> Attempt:
    """The attempt of a row that the claim statement answered."""
    return Attempt(
        record["id"],
        record["epoch"],
        REFS[record["actor"]],
        record["payload"],
        record["attempt"],
        record["route"],
        record["scheduled_at"],
        record["batch_id"],
        record["start_to_close"],
        record["progress_state"],
        record["progress_seq"],
    )


def make_attempt(actor: str = "succeed", payload: str = "{}", **fields: Any) -> Attempt:
    """An attempt that no database knows."""
    values: dict[str, Any] = {"number": 1, "start_to_close": None, **fields}
    return Attempt(
        new_uuid(),
        1,
        REFS[actor],
        payload,
        values["number"],
        "default",
        datetime.now(UTC),
        None,
        values["start_to_close"],
        None,
        0,
    )
