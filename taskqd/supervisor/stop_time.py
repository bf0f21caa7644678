"""The worst case of a stop, in seconds from the signal on: what ``taskqd budget --time`` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.stopping import RESERVE, SLACK, TAIL, deadlines, last_moment


def describe_stop(grace: float, children: Sequence[ChildSpec]) -> dict[str, Any]:
    """Return the stop of a group as JSON values, every time in seconds after the request.

    Each process is asked at the same moment, so that the group takes as long as its slowest process and not their
    sum. ``ends_by`` is when a process is gone whose jobs end when they are cancelled; ``killed_at`` is when one is
    killed that is not. ``worst_case`` is when the supervisor itself is gone, whatever its processes do.
    """
    return {
        "platform_grace": grace,
        "slack": SLACK,
        "reserve": RESERVE,
        "worst_case": last_moment(0.0, grace),
        "left_of_grace": grace - last_moment(0.0, grace),
        "processes": [_process(grace, child) for child in children],
    }


def _process(grace: float, child: ChildSpec) -> dict[str, Any]:
    times = deadlines(0.0, grace, child.graces)
    return {
        "name": child.name,
        "replicas": child.replicas,
        "drain": times.cancel,
        "cancel": times.force - times.cancel,
        "force": times.gone - times.force,
        "ends_by": min(times.force + TAIL, times.gone),
        "killed_at": times.kill,
    }
