"""The time of a stop, for a person: ``taskqd budget --time`` and ``taskqd check``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from taskqd.cli.columns import columns


def stop_table(report: dict[str, Any]) -> str:
    """Return what each process may take of a stop, and whom it interrupts."""
    stop = report["stop"]
    rows: list[tuple[str, ...]] = [("PROCESS", "REPLICAS", "DRAIN", "CANCEL", "FORCE", "ENDS BY", "KILLED AT")]
    for process in stop["processes"]:
        times = [f"{process[key]:g}" for key in ("drain", "cancel", "force", "ends_by", "killed_at")]
        rows.append((process["name"], str(process["replicas"]), *times))
    grace, worst = stop["platform_grace"], stop["worst_case"]
    lines = [
        f"stop: {worst:g} s at worst, of the {grace:g} s that the platform grants: {stop['for_processes']:g} s for "
        f"the processes, {stop['reserve']:g} s for the supervisor after them",
        *interrupted_lines(report),
    ]
    return "\n".join([columns(rows), "", *lines])


def interrupted_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each actor whose attempts a stop may interrupt, and one for all that have no limit."""
    unlimited = []
    for each in report["interrupted"]:
        if each["start_to_close"] is None:
            unlimited.append(f"{each['actor']} ({each['worker']})")
        else:
            yield (
                f"interrupted by a stop: {each['actor']} on {each['worker']} may run {each['start_to_close']:g} s, "
                f"a stop waits {each['drain']:g} s"
            )
    if unlimited:
        yield f"no start_to_close, interrupted if still running: {shorten(unlimited)}"


def shorten(names: Sequence[str], most: int = 8) -> str:
    """Return the names with commas, and how many more there are than ``most``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
