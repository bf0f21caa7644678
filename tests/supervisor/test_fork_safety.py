"""What makes a fork unsafe, found in real processes; and a child that ended before anybody watched it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from taskqd.health.fork_safety import THREAD_VARIABLES, one_thread_each
from taskqd.supervisor.reaper import Reaper
from tests.support import child_environment, eventually

FIRST = "import os, socket; from taskqd.health.fork_safety import hazards, open_sockets; "


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("before = open_sockets()", []),
        ("a, b = socket.socketpair(); before = open_sockets()", []),
        (
            "a, b = socket.socketpair(); before = open_sockets(); a.close(); a = socket.socket()",
            ["socket at 0.0.0.0:0"],
        ),
        (
            "import threading; before = {}; "
            "threading.Thread(target=threading.Event().wait, name='exporter', daemon=True).start()",
            ["thread 'exporter'"],
        ),
        (
            "s = socket.create_server(('127.0.0.1', 0)); port = s.getsockname()[1]; before = open_sockets(); "
            "c = socket.create_connection(s.getsockname())",
            ["socket to 127.0.0.1:PORT"],
        ),
        (
            "import asyncio; before = {}; loop = asyncio.new_event_loop()",
            ["an event loop (epoll)", "socket to a pair of its own", "socket to a pair of its own"],
        ),
    ],
    ids=["nothing", "inherited", "number-used-again", "thread", "connection", "event-loop"],
)
def test_what_is_found(code: str, expected: list[str]) -> None:
    tail = "; found = hazards(before); port = globals().get('port'); print(*found, sep='\\n'); print(port)"
    argv = [sys.executable, "-c", FIRST + code + tail]
    *found, port = subprocess.run(
        argv, env=child_environment(), check=True, capture_output=True, text=True, timeout=30
    ).stdout.splitlines()
    assert sorted(line for line in found if line) == [line.replace("PORT", port) for line in expected]


def test_numeric_libraries_are_kept_to_one_thread_unless_the_operator_has_said_otherwise() -> None:
    environ = {"OMP_NUM_THREADS": "4", "HOME": "/"}
    with one_thread_each(environ):
        assert environ == {"HOME": "/", **dict.fromkeys(THREAD_VARIABLES, "1"), "OMP_NUM_THREADS": "4"}
    assert environ == {"OMP_NUM_THREADS": "4", "HOME": "/"}


async def test_an_adopted_child_that_was_buried_before_it_was_watched_is_told_as_killed() -> None:
    reaper, ended = Reaper(), list[int]()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait(30)
    reaper.watch_adopted(child.pid, ended.append)
    assert ended == [], "not before the caller has done its part"
    await eventually(lambda: ended == [-9])


async def test_an_adopted_child_that_lives_is_told_when_it_ends() -> None:
    reaper, ended = Reaper(), list[int]()
    reaper.start()
    try:
        child = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(7)"], stdin=subprocess.PIPE)
        assert child.stdin is not None
        reaper.watch_adopted(child.pid, ended.append)
        await asyncio.sleep(0)
        assert ended == []
        os.write(child.stdin.fileno(), b"\n")
        await eventually(lambda: ended == [7])
        child.returncode = 7
        child.stdin.close()
    finally:
        reaper.stop()
