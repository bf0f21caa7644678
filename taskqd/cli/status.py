"""``taskqd status``: a running group on one screen. Comes at once, so it loads neither click nor the settings model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from taskqd.cli.group_socket import ask, find_socket

_COLUMNS = (
    "PROCESS", "STATE", "SINCE", "PID", "GEN", "RESTARTS", "LAST EXIT", "BEAT", "LAG", "JOBS", "OLDEST", "POOL",
    "MEMORY", "CREDS", "QUEUES",
)  # fmt: skip
_TEXT = frozenset({"PROCESS", "STATE", "LAST EXIT", "QUEUES"})
_WATCH_INTERVAL = 1.0
_THROTTLED = 0.1
"""The share of the time without the processor that is worth a word."""


def main(argv: Sequence[str]) -> int:
    """Print the state of a group once, or again and again, and return the exit code: 0 when an answer came."""
    parser = argparse.ArgumentParser(
        prog="taskqd status",
        description="Show a running group on one screen: its processes, their jobs, their memory, their last ends.",
        epilog="Ends with 0 when the group answered, whatever its state, and with 69 when none did.",
    )
    parser.add_argument("group", nargs="?", metavar="GROUP", help="the group's name; needed where several run")
    parser.add_argument("--group", dest="named", metavar="GROUP", help="the same, as other commands take it")
    parser.add_argument("--socket", metavar="PATH", help="the group's socket, instead of looking for it")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="show it anew each second until interrupted")
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has explained itself: 0 after --help, 2 for wrong usage
        return int(stop.code or 0)
    path = find_socket(options.group or options.named, options.socket)
    if options.watch:
        return _watch(path, options.as_json)
    status = ask(path, "/status")
    print(json.dumps(status) if options.as_json else screen(status, _width()))
    return 0


def screen(status: dict[str, Any], width: int) -> str:
    """Return the state of a group for a person, in lines of at most ``width`` characters."""
    children = status["children"]
    ready = sum(child["state"] == "ready" for child in children)
    parts = [f"{ready}/{len(children)} ready", f"group {status['group']}"]
    if status["phase"] != "running":
        parts.insert(1, status["phase"])
    budget = status.get("budget") or {}
    if budget.get("required") is not None:
        parts.append(f"budget {budget['required']}/{budget.get('available') or '?'} connections")
    if status.get("stop_budget_s") is not None:
        parts.append(f"stop budget {status['stop_budget_s']:g} s (platform {status['grace_s']:g})")
    if (memory := status.get("memory")) is not None:
        parts.append(f"memory {memory['used'] / 1024**2:.0f}/{memory['limit'] / 1024**2:.0f}M")
    if (throttled := status.get("cpu_throttled") or 0) > _THROTTLED:
        parts.append(f"without processor {throttled * 100:.0f} % of the time")
    ages = [age for child in children if (age := _number(child, "credentials_age_s")) is not None]
    if any(child.get("credentials_stale") for child in children):
        parts.append("credentials stale")
    elif ages and children:
        parts.append(f"credentials fresh {span(max(ages))}")
    if hosts := [child["name"] for child in children if child["beat"].get("maintains") is True]:
        parts.append(f"maintained by {', '.join(hosts)}")
    if status.get("change"):
        parts.append(f"{status['change']} under way")
    if status.get("up_s") is not None:
        parts.append(f"up {span(status['up_s'])}")
    lines = [" · ".join(parts)]
    if status.get("why_not_ready") and status["phase"] == "running":
        lines.append(f"not ready: {status['why_not_ready']}")
    lines += [f'{name}: replicas = "auto": {why}' for name, why in (budget.get("auto_replicas") or {}).items()]
    lines += _ways(status.get("preload") or {})
    beside = [{**child, "name": f"↳ {child['name']}"} for child in status.get("coming_or_going") or []]
    rows = [_COLUMNS, *(_row(child) for child in (*children, *beside))]
    return "\n".join(line[:width].rstrip() for line in [*lines, "", *_table(rows)])


def _ways(preload: dict[str, Any]) -> list[str]:
    """Say which workers are not forked although they might be, and why."""
    lines = []
    for zygote in preload.get("zygotes") or []:
        names = ", ".join(zygote["workers"])
        match zygote["state"]:
            case "unfit":
                lines.append(f"{names}: started by exec: {zygote['why']}")
            case "importing" | "down":
                lines.append(f"{names}: the process that they are forked from is importing the actors")
    return lines


def span(seconds: float | None) -> str:
    """Return a time for a person: ``0.3s``, ``42s``, ``5m``, ``3h``, ``12d``; empty when there is none."""
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{seconds:.1f}s"
    for limit, unit, size in ((120, "s", 1), (7200, "m", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds / 86400:.0f}d"


def _row(child: dict[str, Any]) -> tuple[str, ...]:
    beat = child["beat"]
    state = child["state"]
    if child.get("stopped"):
        state += " (stopped)"
    elif child.get("verdict"):
        state += f" ({child['verdict']})"
    elif child["degraded"]:
        state += " (degraded)"
    elif child.get("drained"):
        state += " (drained)"
    elif child.get("quiet"):
        state += " (quiet)"
    end = child["last_exit"]
    recycled = f"+{child['recycled']}" if child.get("recycled") else ""
    lag, oldest, pool = _number(beat, "lag_ms"), _number(beat, "oldest_ms"), _number(beat, "pool_in_use")
    private = _number(child, "private_bytes")
    works = child["role"] == "worker" and "slots" in beat
    return (
        child["name"],
        state,
        span(child["for_s"]),
        str(child["pid"] or ""),
        str(child.get("generation", "")),
        f"{child['restarts']}{recycled}",
        "" if end is None else f"{end['class']}: {end['why']}"[:48],
        span(child["beat_age_s"]),
        "" if lag is None else f"{lag:.0f}ms",
        f"{beat.get('inflight')}/{beat['slots']}" if works else "",
        "" if oldest is None else span(oldest / 1000),
        "" if pool is None else f"{pool:.0f}/{_number(beat, 'pool_size') or 0:.0f}",
        "" if private is None else f"{private / 1024**2:.0f}M",
        "stale" if child.get("credentials_stale") else span(_number(child, "credentials_age_s")),
        ",".join(child.get("queues") or []),
    )


def _number(of: dict[str, Any], key: str) -> float | None:
    """A newer or a broken process may say anything."""
    value = of.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(_cell(*each) for each in zip(_COLUMNS, row, widths, strict=True)) for row in rows]


def _cell(column: str, text: str, width: int) -> str:
    return text.ljust(width) if column in _TEXT else text.rjust(width)


def _watch(path: str, as_json: bool) -> int:
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and not as_json else ""
    try:
        while True:
            status = ask(path, "/status")
            text = json.dumps(status) if as_json else screen(status, _width())
            sys.stdout.write(f"{clear}{text}\n")
            sys.stdout.flush()
            time.sleep(_WATCH_INTERVAL)
    except KeyboardInterrupt:
        return 0


def _width() -> int:
    """Lines are cut to a terminal's width alone: what goes into a file or a pipe stays whole."""
    if not sys.stdout.isatty():
        return sys.maxsize
    return os.get_terminal_size(sys.stdout.fileno()).columns or 160
