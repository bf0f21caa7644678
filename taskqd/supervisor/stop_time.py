"""The worst case of a stop, in seconds from the signal on: what ``taskqd budget --time`` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.stopping import CLOSING, TAIL, child_time, deadlines, last_moment


def describe_stop(grace: float, children: Sequence[ChildSpec]) -> dict[str, Any]:
    """Return the stop of a group as JSON values, every time in seconds after the request.

    Each process is asked at the same moment, so that the group takes as long as its slowest process and not their
    sum. ``ends_by`` is when a process is gone whose jobs end when they are cancelled; ``killed_at`` is when one is
    killed that is not. ``reserve`` is what the supervisor takes after them: to kill, to reap, to close. ``worst_case``
    is when it is gone itself, whatever its processes do.
    """
    worst = last_moment(0.0, grace) + CLOSING
    return {
        "platform_grace": grace,
        "for_processes": child_time(grace),
        "reserve": worst - child_time(grace),
        "worst_case": worst,
        "left_of_grace": grace - worst,
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
