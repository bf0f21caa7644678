"""The group's own series, in the Prometheus text format."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import taskqd
from taskqd.supervisor.child import Child
from taskqd.supervisor.slot import State

if TYPE_CHECKING:
    from taskqd.supervisor.board import Board

_CONNECTIONS = {"need": "required", "peak": "peak", "limit": "available", "taken": "taken"}

Sample = tuple[str, float | None]


def own_series(board: Board, now: float) -> str:
    """Return the state of the group, without what its processes say themselves."""
    python = ".".join(map(str, sys.version_info[:3]))
    version = f'{{version="{taskqd.__version__}",python="{python}"}}'
    lines = [
        *series("taskqd_build_info", "The version that runs.", [(version, 1)]),
        *series("taskqd_group_ready", "1 while the group is ready.", [("", int(board.is_ready))]),
        *series(
            "taskqd_generation", "Counts the reloads and restarts that started processes.", [("", board.generation())]
        ),
        *_per_child(board, now),
        *_of_the_machine(board),
        *_preload(board.preload()),
        *series(
            "taskqd_connections_budget",
            "Database connections: needed at most, in a roll with new credentials, available, and taken by others.",
            [(f'{{kind="{kind}"}}', board.budget.get(key)) for kind, key in _CONNECTIONS.items()],
        ),
        *series(
            "taskqd_unknown_reaped_total",
            "Ended processes that came to the supervisor as init.",
            [("", board.unknown_reaped())],
            "counter",
        ),
        *series(
            "taskqd_log_dropped_total",
            "Lines of the supervisor's log that standard error did not take.",
            [("", board.lines_dropped())],
            "counter",
        ),
        *board.tally.lines(),
    ]
    return "\n".join(lines) + "\n"


def series(name: str, meaning: str, samples: Iterable[Sample], kind: str = "gauge") -> list[str]:
    """Return one metric; nothing when it has no sample."""
    values = [f"{name}{labels} {value}" for labels, value in samples if value is not None]
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *values] if values else []


def _per_child(board: Board, now: float) -> list[str]:
    gauges: dict[str, tuple[str, Callable[[Child], float | None]]] = {
        "up": ("1 while the process is ready.", lambda child: int(child.slot.state is State.READY)),
        "degraded": ("1 while it fails again and again.", lambda child: int(child.slot.degraded)),
        "beat_age_seconds": (
            "Seconds since its last beat.",
            lambda child: None if child.beat_at is None else round(now - child.beat_at, 3),
        ),
        "loop_lag_seconds": ("Lag of its event loop.", lambda child: _number(child, "lag_ms", 1000)),
        "claim_age_seconds": (
            "Seconds for which a worker that could has not looked for work.",
            lambda child: None if (age := board.claim_age(child, now)) is None else round(age, 3),
        ),
        "inflight": ("Jobs it runs.", lambda child: _number(child, "inflight")),
        "slots": ("Jobs it may run at once.", lambda child: _number(child, "slots")),
        "pool_in_use": (
            "Database connections of its pools that are in use.",
            lambda child: _number(child, "pool_in_use"),
        ),
        "pool_size": ("Database connections that its pools may hold.", lambda child: _number(child, "pool_size")),
        "private_bytes": (
            "Memory that it shares with no other process.",
            lambda child: None if child.held is None else child.held.private,
        ),
        "credentials_age_seconds": (
            "Seconds since its sessions were opened or renewed.",
            lambda child: _number(child, "credential_age_s"),
        ),
        "credentials_ttl_seconds": (
            "Seconds for which the credential that they use was good when it was taken.",
            lambda child: _number(child, "credential_ttl_s"),
        ),
        "credentials_stale": (
            "1 while some of its sessions could not be renewed.",
            lambda child: int(bool(child.beat.get("credentials_stale"))),
        ),
    }
    states = [(_labels(child, state), int(child.slot.state is state)) for child in board.children for state in State]
    lines = series("taskqd_child_state", "1 for the state that the process is in.", states)
    for name, (meaning, value) in gauges.items():
        lines += series(f"taskqd_child_{name}", meaning, [(_labels(child), value(child)) for child in board.children])
    return lines


def _of_the_machine(board: Board) -> list[str]:
    machine = board.machine
    if machine is None:
        return []
    memory = machine.memory
    return [
        *series(
            "taskqd_cpu_throttled_ratio",
            "The share of the time in which the control group had to wait for the processor.",
            [("", round(machine.throttled, 3))],
        ),
        *series(
            "taskqd_memory_bytes",
            "What the control group holds, without what the kernel can drop, and its limit.",
            [] if memory is None else [('{kind="used"}', memory.used), ('{kind="limit"}', memory.limit)],
        ),
    ]


def _preload(status: dict[str, Any]) -> list[str]:
    if not status:
        return []
    started = [(f'{{way="{way}"}}', status[f"{way}ed"]) for way in ("fork", "exec")]
    return [
        *series(
            "taskqd_preload_ready",
            "1 while workers can be forked from a process that has imported their actors.",
            [("", int(status["state"] == "ready"))],
        ),
        *series("taskqd_preload_restarts_total", "New starts of that process.", [("", status["restarts"])], "counter"),
        *series("taskqd_workers_started_total", "Workers started, by the way they were.", started, "counter"),
    ]


def _labels(child: Child, state: State | None = None) -> str:
    more = "" if state is None else f',state="{state}"'
    return f'{{name="{child.spec.name}",index="{child.index}"{more}}}'


def _number(child: Child, key: str, divided_by: float = 1) -> float | None:
    value = child.beat.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if divided_by == 1 else value / divided_by
