"""The guards of ``guards.toml``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).with_name("guards.toml")


@dataclass(frozen=True)
class Guard:
    """One guard: ``block`` is ``worker/claim``, ``client/cancel``, … or ``schema/reap`` of the first migration."""

    block: str
    text: str
    instead: str
    why: str
    test: str

    @property
    def head(self) -> str:
        """How the block begins in its file."""
        kind, _, name = self.block.partition("/")
        return f"create function {{schema}}.{name}(" if kind == "schema" else f"-- name: {name}\n"

    @property
    def tail(self) -> str:
        """How the next one begins."""
        return "\n$$;" if self.block.startswith("schema/") else "\n-- name: "

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.text.split())} → {' '.join(self.instead.split()) or 'nothing'}"


def read() -> list[Guard]:
    """Return all guards, with the whole names of their tests."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    guards = []
    for block, entries in data["guards"].items():
        for entry in entries:
            file, _, name = entry["test"].partition("::")
            guards.append(Guard(block, entry["text"], entry["instead"], entry["why"], f"{data['files'][file]}::{name}"))
    return guards
