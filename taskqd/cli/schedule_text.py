"""What ``taskqd schedule`` prints of plans and schedules."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from taskqd.cli.columns import columns
from taskqd.scheduler.manifest import SchedulePlan
from taskqd.storage.schedules import StoredSchedule


def plan_text(found: SchedulePlan, *, done: bool = False) -> str:
    """Return a plan for a person; ``done`` where it was applied."""
    rows = [("SCHEDULE", "CHANGE", ""), *((one.wanted.name, one.action, one.why) for one in found.changes)]
    lines = [columns(rows, left=range(3))]
    lines += [f"{name} is declared no more; it stays until `taskqd schedule retire {name}`" for name in found.left]
    counts = {
        action: sum(one.action == action for one in found.changes)
        for action in ("create", "change", "unchanged", "refused")
    }
    told = ", ".join(f"{count} {action}" for action, count in counts.items() if count)
    return "\n".join([*lines, f"applied: {told}" if done else f"plan {found.digest}: {told}"])


def plan_object(found: SchedulePlan) -> dict[str, Any]:
    """Return a plan for a program."""
    return {
        "plan": found.digest,
        "source": found.source,
        "changes": [{"name": one.wanted.name, "action": one.action, "why": one.why} for one in found.changes],
        "left": list(found.left),
    }


def schedule_object(one: StoredSchedule) -> dict[str, Any]:
    """Return a schedule for a program."""
    definition = one.definition
    return {
        "name": one.name,
        "state": one.state,
        "source": one.source,
        "version": one.version,
        "actor": one.actor,
        "when": when_text(one),
        "timezone": one.timezone,
        "next_fire_at": _iso(one.next_fire_at),
        "last_fired_at": _iso(one.last_fired_at),
        "last_job_id": None if one.last_job_id is None else str(one.last_job_id),
        "consecutive_failures": one.failures,
        "last_error": one.last_error or one.problem or None,
        **(
            {}
            if definition is None
            else {
                "dst_strategy": definition.dst_strategy,
                "catch_up": definition.catch_up,
                "catch_up_max": definition.catch_up_max,
                "catch_up_window": definition.catch_up_window,
                "overlap": definition.overlap,
                "smear": definition.smear,
                "payload": None if definition.payload is None else json.loads(definition.payload),
                "payload_factory": definition.payload_factory,
                "options": dict(definition.options),
                "identity_key": definition.identity_key,
            }
        ),
    }


def when_text(one: StoredSchedule) -> str:
    """Return when it is due."""
    return one.expression if one.definition is None else one.definition.when


def time_text(moment: datetime | None) -> str:
    """Return a moment in UTC for a person."""
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
