"""Progress: what a report may hold, and what reports make of each other."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from taskqd import PayloadNotStorableError, ProgressTooLarge
from taskqd.actors.progress import Progress


def make(stored: str | None = None, seq: int = 0, limit: int = 1000) -> tuple[Progress, list[None]]:
    changes: list[None] = []
    return Progress(stored, seq, limit, lambda: changes.append(None)), changes


def test_the_last_word_on_each_field_stays() -> None:
    progress, changes = make()
    progress.report("read", 10, None, {"line": 7})
    progress.report(None, 20.5, "half of it", None)
    assert progress.state == {"step": "read", "percent": 20.5, "detail": "half of it", "data": {"line": 7}}
    assert (progress.seq, len(changes), progress.unstored) == (2, 2, True)


def test_it_goes_on_from_what_was_stored() -> None:
    progress, _ = make('{"step": "read", "data": {"line": 7}}', 41)
    assert (progress.state["data"], progress.seq, progress.unstored) == ({"line": 7}, 41, False)
    progress.report("write", None, None, None)
    assert progress.text() == (42, '{"step": "write", "data": {"line": 7}}')


def test_a_report_during_a_write_is_still_to_be_written() -> None:
    progress, _ = make()
    progress.report("a", None, None, None)
    seq, _ = progress.text()
    progress.report("b", None, None, None)
    progress.stored(seq)
    assert progress.unstored
    progress.stored(progress.seq)
    assert not progress.unstored


@pytest.mark.parametrize(
    ("fields", "error", "fix"),
    [
        ((None, None, None, None), ValueError, "at least one of step, percent, detail and data"),
        (("x" * 201, None, None, None), ValueError, "step must be text of at most 200 characters"),
        ((7, None, None, None), ValueError, "step must be text"),
        ((None, 101, None, None), ValueError, "percent = 101 must be a number between 0 and 100"),
        ((None, -0.1, None, None), ValueError, "between 0 and 100"),
        ((None, float("nan"), None, None), ValueError, "between 0 and 100"),
        ((None, True, None, None), ValueError, "percent = True"),
        ((None, None, "x" * 2001, None), ValueError, "detail must be text of at most 2000 characters"),
        ((None, None, None, {"a": object()}), PayloadNotStorableError, "does not encode as JSON"),
        ((None, None, "nul \x00", None), PayloadNotStorableError, "holds a NUL"),
        ((None, None, None, {"a": "x" * 1000}), ProgressTooLarge, "bytes, the limit is 1000 .TASKQ_PROGRESS_DATA_MAX"),
    ],
)
def test_a_report_that_is_refused_changes_nothing(fields: Any, error: type[Exception], fix: str) -> None:
    progress, changes = make()
    progress.report("before", None, None, None)
    with pytest.raises(error, match=fix):
        progress.report(*fields)
    assert (progress.state, progress.seq, len(changes)) == ({"step": "before"}, 1, 1)


def test_threads_lose_nothing_of_each_other() -> None:
    progress, _ = make(limit=100_000)
    threads = [
        threading.Thread(target=lambda: [progress.report("x", number, None, None) for number in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert progress.seq == 400
