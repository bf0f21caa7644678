"""What the supervisor logs is what it has declared, and docs/events.md says so."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.events_reference import render
from taskqd.supervisor.vocabulary import CHANGES, EVENTS
from tests.support import REPOSITORY

SOURCES = REPOSITORY / "taskqd" / "supervisor"
_JOURNALS = {"journal", "_journal", "log"}


def told() -> Iterator[str]:
    """Yield the name in every call that logs an event or makes one of those that a slot's events become."""
    for file in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr == "tell":
                holder = function.value
                name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
                if name not in _JOURNALS:
                    continue
            elif not (isinstance(function, ast.Name) and function.id == "Tell"):
                continue
            yield from names(node.args[0])


def names(expression: ast.expr) -> Iterator[str]:
    """Yield what an event's name may be: as it is written, or for each change where the change names it."""
    match expression:
        case ast.Constant(str() as name):
            yield name
        case ast.JoinedStr([ast.FormattedValue(), ast.Constant(str() as end)]):
            yield from (f"{verb}{end}" for verb in CHANGES)


def test_every_event_is_declared() -> None:
    found = set(told())
    assert len(found) > 40, "the search still finds them"
    assert found <= set(EVENTS)


def test_no_event_is_declared_that_nobody_logs() -> None:
    files = [file for file in SOURCES.glob("*.py") if file.name != "vocabulary.py"]
    source = "".join(file.read_text() for file in files)
    assert [name for name in set(EVENTS) - set(told()) if f'"{name}"' not in source] == []


def test_the_page_is_up_to_date() -> None:
    assert (REPOSITORY / "docs" / "events.md").read_text() == render(), "run scripts/docs"
