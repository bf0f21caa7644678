"""Comparing a systemd unit with the workgroup that it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from taskqd.cli.findings import LEAST_WATCHDOG, Finding
from taskqd.domain.errors import ConfigError
from taskqd.supervisor.plan import Plan

_UNITS = {
    **dict.fromkeys(("us", "usec", "µs"), 1e-6),
    **dict.fromkeys(("ms", "msec"), 1e-3),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604800.0),
}
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zµ]*)")
_DEFAULT_STOP = 90.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """One ``key=value`` with the file and the line where it stands."""

    file: str
    line: int
    value: str


@dataclass(slots=True)
class Unit:
    """The ``[Service]`` section of a unit and its drop-ins: a later value of a key replaces the earlier ones."""

    file: str
    service: dict[str, Assignment] = field(default_factory=dict)
    section: int = 1
    """The line of ``[Service]``, where a missing key is reported."""

    def value(self, key: str, default: str = "") -> str:
        """Return the value of ``key``, or ``default`` when it is missing or was reset."""
        found = self.service.get(key)
        return found.value if found is not None and found.value else default


def read_unit(files: Sequence[str]) -> Unit:
    """Read a unit and its drop-ins, in this order. Raises ``ConfigError`` for one that cannot be read."""
    unit = Unit(files[0])
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{file}: cannot be read: {reason}") from None
        _read_into(unit, file, lines)
    return unit


def _read_into(unit: Unit, file: str, lines: Sequence[str]) -> None:
    section, begun, text = "", 0, ""
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if line.startswith(("#", ";")):
            continue
        begun = begun or number
        if line.endswith("\\"):
            text += line[:-1] + " "
            continue
        line, begun_at, text, begun = (text + line).strip(), begun, "", 0
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            if section == "Service" and file == unit.file:
                unit.section = begun_at
        elif section == "Service" and "=" in line:
            key, _, value = line.partition("=")
            unit.service[key.strip()] = Assignment(file, begun_at, value.strip())


def parse_span(text: str) -> float | None:
    """Return a time span of systemd in seconds: ``90``, ``1min 30s``, ``infinity``; None when it is none."""
    if text.strip() == "infinity":
        return float("inf")
    total, position = 0.0, 0
    while position < len(text.rstrip()):
        found = _SPAN.match(text, position)
        if found is None or found[2] not in _UNITS:
            return None
        total += float(found[1]) * _UNITS[found[2]]
        position = found.end()
    return total if position else None


def compare_unit(plan: Plan, files: Sequence[str]) -> list[Finding]:
    """Return everything in the unit that does not fit the workgroup, or could fit it better."""
    unit = read_unit(files)

    def finding(key: str, message: str, fatal: bool = False) -> Finding:
        place = unit.service.get(key) or Assignment(unit.file, unit.section, "")
        return Finding(place.file, place.line, key, message, fatal)

    return [finding(*each) for each in (*_times(unit, plan), *_kinds(unit), *_exits(unit))]


_Said = tuple[str, str, bool]


def _times(unit: Unit, plan: Plan) -> Iterator[_Said]:
    for key in ("TimeoutSec", "TimeoutStopSec", "WatchdogSec"):
        if unit.value(key) and parse_span(unit.value(key)) is None:
            yield key, f"{unit.value(key)!r} is no time span, such as 85, 1min 30s or infinity", True
            return
    key = "TimeoutStopSec" if unit.value("TimeoutStopSec") or not unit.value("TimeoutSec") else "TimeoutSec"
    stop = parse_span(unit.value(key, str(_DEFAULT_STOP)))
    stop = float("inf") if stop == 0 else stop  # as systemd reads it
    if stop is not None and stop < plan.grace:
        yield (
            key,
            f"{stop:g} s must be at least the group's termination_grace_period of {plan.grace:g} s: systemd would "
            f"kill it while it stops; write TimeoutStopSec={plan.grace:g}",
            True,
        )
    watchdog = parse_span(unit.value("WatchdogSec", "0"))
    if watchdog is not None and 0 < watchdog < LEAST_WATCHDOG:
        yield "WatchdogSec", f"{watchdog:g} s is short: a busy machine trips it; use {LEAST_WATCHDOG:g} or more", False


def _kinds(unit: Unit) -> Iterator[_Said]:
    words = [Path(word).name for word in unit.value("ExecStart").split()]
    if ("taskqd", "run") not in pairwise(words):
        yield "ExecStart", "does not run `taskqd run FILE`", True
    kind = unit.value("Type", "simple")
    if kind in ("forking", "oneshot", "dbus", "idle"):
        yield "Type", f"{kind!r} does not fit: taskqd stays in the foreground; write Type=notify", True
    elif not kind.startswith("notify"):
        yield "Type", f"{kind!r} counts the group as up before it is ready; write Type=notify", False
    access = unit.value("NotifyAccess", "main")
    if access == "none":
        yield "NotifyAccess", "'none' drops what taskqd tells; remove it", kind.startswith("notify")
    mode = unit.value("KillMode", "control-group")
    if mode == "none" or unit.value("SendSIGKILL", "yes") in ("no", "false", "off", "0"):
        key = "KillMode" if mode == "none" else "SendSIGKILL"
        yield key, "leaves processes behind after a stop; write KillMode=mixed and no SendSIGKILL", True
    elif mode != "mixed":
        what = "signals the workers behind the supervisor's back" if mode == "control-group" else "leaves processes"
        yield "KillMode", f"{mode!r} {what}; write KillMode=mixed", False
    if unit.value("OOMPolicy", "stop") != "continue":
        yield "OOMPolicy", "the whole group stops when one process runs out of memory; write OOMPolicy=continue", False


def _exits(unit: Unit) -> Iterator[_Said]:
    if unit.value("Restart", "no") == "no":
        yield "Restart", "a group that ended stays down; write Restart=on-failure", False
    elif "78" not in unit.value("RestartPreventExitStatus").split():
        key = "RestartPreventExitStatus"
        yield key, "what is refused for good (78) would be restarted again and again; add 78", False
    if "3" not in unit.value("SuccessExitStatus").split():
        yield "SuccessExitStatus", "a stop that had to kill a process (3) would count as a failure; add 3", False
