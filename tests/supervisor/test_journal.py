"""The supervisor's log: whole lines, no blocking."""

from __future__ import annotations

import fcntl
import json
import os
import time

from taskqd.supervisor.journal import Journal


def written(**options: object) -> tuple[Journal, int, int]:
    reading, writing = os.pipe()
    return Journal(writing, **options), reading, writing  # type: ignore[arg-type]


def test_an_event_is_one_json_line_with_its_fields() -> None:
    journal, reading, _ = written(human=False, group="g")
    journal.bind(child="io.0").tell("child-exit", "error", code=1, why="failed", said=None, left="two\nlines")
    (line,) = os.read(reading, 65536).decode().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "group": "g",
        "child": "io.0",
        "code": 1,
        "why": "failed",
        "left": "two\nlines",
        "event": "child-exit",
        "level": "error",
    }


def test_on_a_terminal_it_is_for_people() -> None:
    journal, reading, _ = written(human=True, group="g")
    journal.tell("ready", child="io.0", pid=12)
    journal.tell("stacks", "warning", child="io.0", stacks="File a\nFile b")
    first, *rest = os.read(reading, 65536).decode().splitlines()
    assert first.split()[1:] == ["io.0", "ready", "pid=12"]
    assert rest[0].split()[1:] == ["io.0", "WARNING", "stacks"]
    assert rest[1:] == ["    File a", "    File b"]


def test_a_reader_that_stopped_blocks_nothing_and_what_is_lost_is_counted() -> None:
    journal, reading, writing = written(human=False)
    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)
    began = time.monotonic()
    for number in range(1000):
        journal.tell("event", number=number)
    assert time.monotonic() - began < 10
    assert journal.dropped > 900
    os.read(reading, 65536)
    before = journal.dropped
    journal.tell("again")
    assert journal.dropped == before
    os.close(writing)
    journal.tell("closed")
    assert journal.dropped == before + 1


def test_text_that_no_encoding_takes_is_still_logged() -> None:
    journal, reading, _ = written(human=True)
    journal.tell("odd", why="lone \udc80 surrogate")
    assert "surrogate" in os.read(reading, 65536).decode()
