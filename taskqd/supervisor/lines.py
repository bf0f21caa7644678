"""On which line of a TOML file each key stands: what tomllib does not keep."""

from __future__ import annotations

import tomllib
from bisect import bisect_right

Path = tuple[str | int, ...]
"""The way to a value: keys, and positions in arrays."""

_SPACE = " \t"
_BLANK = " \t\r\n"


class LineIndex:
    """The line of every key, table and array item of a text that tomllib has accepted. Lines count from 1."""

    def __init__(self, text: str = "") -> None:
        self.lines: dict[Path, int] = {}
        """Each path with the line on which it is first named."""
        self._text = text
        self._position = 0
        self._starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
        self._sizes: dict[Path, int] = {}
        self._read()

    def line(self, path: Path) -> int:
        """Return the line of ``path``; of the nearest table around it when it is missing, 1 for the file itself."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    # -- the grammar, as far as it moves the position ---------------------------------------------

    def _read(self) -> None:
        table: Path = ()
        self._skip_blank()
        while self._position < len(self._text):
            if self._at("["):
                table = self._header()
            else:
                self._pair(table)
            self._skip_blank()

    def _header(self) -> Path:
        array = self._at("[[")
        self._position += 2 if array else 1
        path: Path = ()
        *outer, last = self._key()
        for part in outer:
            path = self._note((*path, part))
            if path in self._sizes:  # a table inside the array's last item
                path = (*path, self._sizes[path] - 1)
        path = self._note((*path, last))
        if array:
            size = self._sizes[path] = self._sizes.get(path, 0) + 1
            path = self._note((*path, size - 1))
        self._skip(_SPACE)
        self._position += 2 if array else 1
        return path

    def _pair(self, path: Path) -> None:
        for part in self._key():
            path = self._note((*path, part))
        self._skip(_SPACE + "=")
        self._value(path)

    def _key(self) -> list[str]:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            begin = self._position
            if self._text[begin] in "\"'":
                self._string()
                parts.extend(tomllib.loads(f"{self._text[begin : self._position]} = 0"))
            else:
                while self._text[self._position] not in _SPACE + ".=]":
                    self._position += 1
                parts.append(self._text[begin : self._position])
            self._skip(_SPACE)
            if not self._at("."):
                return parts
            self._position += 1

    def _value(self, path: Path) -> None:
        if self._text[self._position] in "\"'":
            self._string()
        elif self._at("["):
            self._position += 1
            self._skip_blank()
            size = 0
            while not self._at("]"):
                self._value(self._note((*path, size)))
                size += 1
                self._skip_separator()
            self._position += 1
        elif self._at("{"):
            self._position += 1
            self._skip_blank()
            while not self._at("}"):
                self._pair(path)
                self._skip_separator()
            self._position += 1
        else:
            while self._position < len(self._text) and self._text[self._position] not in ",]}#\n":
                self._position += 1

    def _string(self) -> None:
        quote = self._text[self._position]
        fence = quote * 3 if self._at(quote * 3) else quote
        self._position += len(fence)
        while not self._at(fence):
            self._position += 2 if quote == '"' and self._at("\\") else 1
        self._position += len(fence)
        while len(fence) == 3 and self._at(quote):  # up to two more quotes belong to the text
            self._position += 1

    def _note(self, path: Path) -> Path:
        self.lines.setdefault(path, bisect_right(self._starts, self._position))
        return path

    def _skip_separator(self) -> None:
        self._skip_blank()
        if self._at(","):
            self._position += 1
            self._skip_blank()

    def _skip_blank(self) -> None:
        self._skip(_BLANK)
        while self._at("#"):
            end = self._text.find("\n", self._position)
            self._position = len(self._text) if end < 0 else end
            self._skip(_BLANK)

    def _skip(self, chars: str) -> None:
        while self._position < len(self._text) and self._text[self._position] in chars:
            self._position += 1

    def _at(self, text: str) -> bool:
        return self._text.startswith(text, self._position)
