"""The line index: every key that tomllib finds, on the line where it stands."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskqd.supervisor.lines import LineIndex
from taskqd.supervisor.workgroup import load_workgroup


def paths(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every path in a document as tomllib reads it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from paths(inner, (*path, key))


def check(text: str) -> LineIndex:
    index = LineIndex(text)
    assert set(index.lines) == set(paths(tomllib.loads(text)))
    return index


def test_a_file_of_every_form() -> None:
    text = '''\
# comment = 1
a = 1                                   # 2
"quoted \\u0061.key" = "# [no] = table"  # 3
'lit eral' = """
x = 1
[nothing] \\""" still"""""               # the value began in 4
b.c . "d" = 1979-05-27 07:32:00         # 7
list = [                                # 8
1, # one
  [ "]", """
]""" ], { in = 1, "side" = [2] }        # 11
,
]
[one.two]                               # 14
x = {}                                  # 15
[[items]]                               # 16
n = 1
[items.sub]                             # 18
n = 2
[[items]]                               # 20
[[items.deep]]
n = 3                                   # 22
[one]                                   # 23
y = \'\'\'
it's \'\'\'\'\'
z = inf                                 # 26'''
    index = check(text)
    expected = {
        ("a",): 2,
        ("quoted a.key",): 3,
        ("lit eral",): 4,
        ("b", "c", "d"): 7,
        ("list",): 8,
        ("list", 0): 9,
        ("list", 1): 10,
        ("list", 2, "side", 0): 11,
        ("one", "two"): 14,
        ("one", "two", "x"): 15,
        ("items", 0): 16,
        ("items", 0, "sub"): 18,
        ("items", 1): 20,
        ("items", 1, "deep", 0, "n"): 22,
        ("one", "y"): 24,
        ("one", "z"): 26,
    }
    assert {path: index.lines[path] for path in expected} == expected


def test_what_is_missing_is_shown_at_the_table_around_it() -> None:
    index = LineIndex("\n[a]\nx = 1\n[[w]]\n\n[[w]]\n")
    assert index.line(("a", "gone")) == 2
    assert index.line(("w", 1, "name")) == 6
    assert index.line(("nowhere", "x")) == 1
    assert LineIndex().line(("x",)) == 1


# -- any document, against tomllib ----------------------------------------------------------------

_scalars = (
    st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.datetimes()
    | st.dates()
    | st.times()
    | st.text(max_size=12)
    | st.sampled_from(["]", "}", '"', "'''", '"""', "#", "\\", "a = 1\n[x]\n", "\n\n", '\'"\'\n"""""'])
)
_keys = st.text(max_size=6) | st.sampled_from(["a", "b", "a.b", '"', "'", "#", "[x]", "=", "é", " "])
_documents = st.dictionaries(
    _keys,
    st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3)),
    max_size=5,
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(_documents, st.booleans())
def test_any_document_has_exactly_the_keys_that_tomllib_reads(document: dict[str, Any], multiline: bool) -> None:
    check(tomli_w.dumps(document, multiline_strings=multiline))


class _Writer:
    """Writes a random file, every key under a name of its own, so that the first line that holds it is its line."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._names = (f"key{number:03}q" for number in itertools.count())

    def name(self) -> str:
        name = next(self._names)
        return self._draw(st.sampled_from([name, f'"{name}"', f"'{name}'"]))

    def value(self, depth: int = 0) -> str:
        kinds = ["1", "true", '"#\\"]"', "'['", '"""\n\n"""', "'''x\n= ]'''", "2020-01-01 10:00:00"]
        kind = self._draw(st.sampled_from([*kinds, "list", "inline"] if depth < 2 else kinds))
        items = range(self._draw(st.integers(0, 3)))
        if kind == "list":
            return "[ # c ]\n" + "".join(f"{self.value(depth + 1)}{self.blank()},\n" for _ in items) + "]"
        if kind == "inline":
            return "{" + ", ".join(f"{self.name()} = {self.value(depth + 1)}" for _ in items) + "}"
        return kind

    def blank(self) -> str:
        return self._draw(st.sampled_from(["", " ", " # comment [x] = 1\n", "\n\n"]))

    def pairs(self) -> str:
        lines = ""
        for _ in range(self._draw(st.integers(0, 3))):
            key = ".".join(self.name() for _ in range(self._draw(st.integers(1, 3))))
            lines += f"{key} = {self.value()}{self._draw(st.sampled_from(['', ' # x', '  ']))}\n" + self.gap()
        return lines

    def gap(self) -> str:
        return self._draw(st.sampled_from(["", "\n", "# [[not]]\n\n"]))

    def file(self) -> str:
        text = self.gap() + self.pairs()
        for _ in range(self._draw(st.integers(0, 4))):
            name = ".".join(self.name() for _ in range(self._draw(st.integers(1, 2))))
            if self._draw(st.booleans()):
                text += f"[ {name} ]\n{self.pairs()}"
            else:
                for _ in range(self._draw(st.integers(1, 3))):
                    text += f"[[{name}]]\n{self.pairs()}"
                    if self._draw(st.booleans()):
                        text += f"[{name}.{self.name()}]\n{self.pairs()}"
        return text


@st.composite
def _files(draw: st.DrawFn) -> str:
    return _Writer(draw).file()


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(_files())
def test_any_key_is_on_the_line_where_it_is_written(text: str) -> None:
    index = check(text)
    lines = text.split("\n")
    for path, line in index.lines.items():
        if isinstance(path[-1], str):
            first = next(number for number, content in enumerate(lines, 1) if path[-1] in content)
            assert line == first, path


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(_files())
def test_windows_line_ends_change_nothing(text: str) -> None:
    assert LineIndex(text.replace("\n", "\r\n")).lines == LineIndex(text).lines


# -- the workgroup --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('actors = "a:b"\n', "1:workers: missing"),
        ('actors = "a:b"\n\n[[workers]]\nreplicas = 2', "3:workers[0].name: missing"),
        ('actors = "a:b"\n[[workers]]\nname = "x"\n[[workers]]\nname = "x"', "5:workers.x.name: 'x' is taken"),
        ('actors = "a:b"\n[[workers]]\nname = "x"\n\nreplicas = 0', "5:workers.x.replicas: 0 must be"),
        ('actors = "a:b"\n[supervisor]\n[[workers]]\nname = "x"\n[supervisr]\n', "5:supervisr: unknown table"),
    ],
)
def test_each_problem_of_a_file_names_its_line(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "group.toml"
    file.write_text(text)
    _, found = load_workgroup(str(file), ["queues"])
    assert found == [line for line in found if line.startswith(f"{file}:{expected}")], found
    assert len(found) == 1


def test_a_key_of_a_resolved_worker_has_a_place(tmp_path: Path) -> None:
    file = tmp_path / "group.toml"
    file.write_text('actors = "a:b"\n[defaults]\nlog_level = "INFO"\n[[workers]]\nname = "a.b"\nqueues = ["x"]\n')
    group, _ = load_workgroup(str(file))
    assert group.place("workers.a.b.queues") == f"{file}:6:workers.a.b.queues"
    assert group.place("workers.a.b") == f"{file}:4:workers.a.b"
    assert group.place("defaults.log_level") == f"{file}:3:defaults.log_level"
    assert group.place("supervisor.name") == f"{file}:1:supervisor.name"
