"""Reading one TOML table: typed, bounded, and with every problem kept instead of raised."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from taskqd.domain.names import nearest
from taskqd.settings.durations import parse_duration
from taskqd.supervisor.lines import LineIndex, Path

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_Default = TypeVar("_Default", bound=float | None)


def is_name(text: str, longest: int) -> bool:
    """True when ``text`` may be a part of file names, metric labels and session names."""
    return len(text) <= longest and _NAME.fullmatch(text) is not None


def name_rule(longest: int) -> str:
    """Say what :func:`is_name` allows."""
    return f"1 to {longest} letters, digits, '_', '.' or '-', not starting with '.' or '-'"


class Problems:
    """Everything that is wrong with a file, in the order found. With an ``index`` each names its line too."""

    def __init__(self, file: str, index: LineIndex | None = None) -> None:
        self.lines: list[str] = []
        self._file = file
        self._index = index

    def add(self, key: str, message: str, path: Path = ()) -> None:
        """Remember that ``key`` is wrong; ``path`` leads to it in the document."""
        line = "" if self._index is None else f"{self._index.line(path)}:"
        self.lines.append(f"{self._file}:{line}{key}: {message}")


class Table:
    """A table whose keys are taken one by one; what nobody took is unknown."""

    def __init__(self, content: Mapping[str, Any], path: str, problems: Problems, place: Path = ()) -> None:
        self.known: list[str] = []
        """The keys that were asked for, which are those that exist."""
        self.faulty: set[str] = set()
        self.written = frozenset(content)
        """The keys that the file has."""
        self._content = dict(content)
        self._path = path
        self._problems = problems
        self._place = place

    def rename(self, path: str) -> None:
        """Call this table ``path`` in problems from now on."""
        self._path = path

    def problem(self, key: str, message: str) -> None:
        """Remember that the value of ``key`` is wrong."""
        self.faulty.add(key)
        self._problems.add(f"{self._path}.{key}" if self._path else key, message, (*self._place, key))

    def text(self, key: str) -> str | None:
        """Take a non-empty string."""
        value = self._take(key)
        if value is None or (isinstance(value, str) and value.strip() and value.isprintable()):
            return value
        self.problem(key, f"{value!r} must be non-empty text")
        return None

    def flag(self, key: str, default: bool) -> bool:
        """Take true or false."""
        value = self._take(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.problem(key, f"{value!r} must be true or false")
        return default

    def choice(self, key: str, default: str, allowed: Sequence[str]) -> str:
        """Take one of several words."""
        value = self._take(key)
        if value is None or value in allowed:
            return default if value is None else str(value)
        words = " or ".join(f'"{word}"' for word in allowed)
        self.problem(key, f"{value!r} must be {words}{nearest(str(value), allowed)}")
        return default

    def count(self, key: str, default: Any, low: int, high: int) -> Any:
        """Take a whole number from ``low`` to ``high``."""
        value = self._take(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        self.problem(key, f"{value!r} must be a whole number from {low} to {high}")
        return default

    def count_or_auto(self, key: str, default: int, low: int, high: int) -> int | None:
        """Take a whole number from ``low`` to ``high``; None when it is ``"auto"``."""
        value = self._take(key)
        if value is None or value == "auto":
            return default if value is None else None
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        hint = nearest(str(value), ["auto"])
        self.problem(key, f'{value!r} must be a whole number from {low} to {high}, or "auto"{hint}')
        return default

    def seconds(self, key: str, default: _Default, low: float, high: float) -> float | _Default:
        """Take a duration from ``low`` to ``high`` seconds: a number, or text such as ``"5m"``."""
        value = self._take(key)
        if value is None:
            return default
        try:
            seconds = parse_duration(value)
        except ValueError:
            seconds = -1.0
        if low <= seconds <= high:
            return seconds
        self.problem(key, f"{value!r} must be a duration from {low:g} to {high:g} seconds, or like '500ms', '5m', '2h'")
        return default

    def address(self, key: str) -> tuple[str, int] | None:
        """Take ``"host:port"``; a host of IPv6 stands in brackets."""
        value = self._take(key)
        if value is None:
            return None
        host, _, port = str(value).rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host if ":" not in host else ""
        if isinstance(value, str) and host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535:
            return host, int(port)
        self.problem(key, f'{value!r} must be "host:port" with a port from 1 to 65535, as in "0.0.0.0:8081"')
        return None

    def table(self, key: str) -> Table:
        """Take a sub-table; an empty one when there is none."""
        value = self._take(key)
        if value is not None and not isinstance(value, Mapping):
            header = ".".join(part for part in (*self._place, key) if isinstance(part, str))
            self.problem(key, f"must be a table: write [{header}]")
            value = None
        return Table(value or {}, f"{self._path}.{key}" if self._path else key, self._problems, (*self._place, key))

    def tables(self, key: str) -> list[Table]:
        """Take an array of tables."""
        value = self._take(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            self.problem(key, f"must be an array of tables: write [[{key}]]")
            return []
        return [
            Table(item, f"{key}[{position}]", self._problems, (*self._place, key, position))
            for position, item in enumerate(value)
        ]

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Take every key that is left."""
        while self._content:
            key = next(iter(self._content))
            yield key, self._content.pop(key)

    def refuse_rest(self, settings: Collection[str] = ()) -> None:
        """Make a problem of every key that is left; one of ``settings`` is told where it belongs."""
        for key, value in self.rest():
            if key in settings:
                self.problem(key, "is a setting: write it in [defaults] or in [[workers]]")
            else:
                kind = "table" if isinstance(value, Mapping | list) and not self._path else "key"
                self.problem(key, f"unknown {kind}{nearest(key, [*self.known, *settings])}")

    def _take(self, key: str) -> Any:
        self.known.append(key)
        return self._content.pop(key, None)
