"""Prints docs/life.md: every transition of a job. Run it by scripts/docs."""

from __future__ import annotations

from collections.abc import Iterable

from taskqd.domain.status import TERMINAL, JobStatus
from taskqd.domain.transitions import TRANSITIONS

HEAD = """\
# The life of a job, in full

<!-- Written by scripts/docs from taskqd/domain/transitions.py; change it there. -->

Every way from one status to another; there is no other. The SQL is tested against this table, step by step, with
writers that are late or say the same thing twice. *Attempt* is what it does to the number of attempts that count
against `max_attempts`. *Fences* says whether it raises the job's epoch, so that whoever held the job before changes
nothing any more.

```mermaid
stateDiagram-v2
"""
TABLE = """\
```

| Event | From | To | Attempt | Fences | What has happened |
|---|---|---|---|---|---|
"""


def render() -> str:
    """Return the page."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for one in TRANSITIONS:
        for source in one.sources:
            for target in one.targets:
                if source != target:
                    arrows.setdefault((source, target), []).append(one.event)
    enqueue = "    [*] --> scheduled: enqueue for later\n    [*] --> pending: enqueue\n"
    drawing = "".join(
        f"    {source} --> {target}: {', '.join(sorted(events))}\n"
        for (source, target), events in sorted(arrows.items())
    )
    rows = "".join(
        f"| {one.event} | {_names(one.sources)} | {_names(one.targets)} | {one.attempt} "
        f"| {'yes' if one.raises_epoch else ''} | {one.meaning} |\n"
        for one in TRANSITIONS
    )
    return HEAD + enqueue + drawing + TABLE + rows


def _names(statuses: Iterable[JobStatus]) -> str:
    statuses = frozenset(statuses)
    return "any end" if statuses == TERMINAL else ", ".join(f"`{one}`" for one in JobStatus if one in statuses)


if __name__ == "__main__":
    print(render(), end="")
