"""What a process leaves beside its messages: stacks and last words, in a file that the supervisor reads on and on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import taskqd.supervisor.child as child_module
from taskqd.supervisor.child import Child
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.slot import Timing
from taskqd.supervisor.spawn import dump_file


@pytest.fixture
def child() -> Iterator[Child]:
    made = Child(ChildSpec("io", "worker", ()), 0, Timing(), lambda *_: None)
    made._dump = dump_file()
    if made._dump is None:
        pytest.skip("this system has no files in memory")
    yield made
    os.close(made._dump)


def write(child: Child, text: str) -> None:
    assert child._dump is not None
    os.write(child._dump, text.encode())


def test_what_comes_while_the_rest_is_read_is_read_later(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, later = os.pread, [f"line {number}\n" for number in range(5)]

    def pread_and_go_on(*arguments: int) -> bytes:
        raw = pread(*arguments)
        if later:
            write(child, later.pop())
        return raw

    monkeypatch.setattr(os, "pread", pread_and_go_on)
    write(child, "first\n")
    for _ in range(7):
        child.look_for_words()
    assert child.shown_since(0).splitlines() == ["first", "line 4", "line 3", "line 2", "line 1", "line 0"]
    assert child.read_dump(at_end=True).startswith("first\nline 4\n")
    assert child.read_dump(at_end=True) == ""


def test_of_too_much_the_last_is_kept_and_the_file_does_not_grow_for_ever(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "_DUMP_KEPT", 1000)
    monkeypatch.setattr(child_module, "_DUMP_MOST", 200_000)
    assert child._dump is not None
    write(child, "x" * 100_000 + "the end\n")
    assert child.read_dump(at_end=True).endswith("xthe end")
    assert len(child.shown_since(0)) < 100_000
    child.look_for_words()
    assert os.fstat(child._dump).st_size == 0, "quiet, and read"
    write(child, "more\n")
    assert child.read_dump(at_end=True) == "more"
    for _ in range(5):
        write(child, "y" * 50_000)
        child.look_for_words()
    assert os.fstat(child._dump).st_size <= 50_000, "never quiet, and too much"
