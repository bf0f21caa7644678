"""F15: Probes, hundreds of them and all at the same moment, are cheap and answered. A supervisor that stands still, or
none, is a no within about two seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.matrix.conftest import Trial
from tests.supervisor.conftest import Group
from tests.support import child_environment, taskqd_argv

CALLS = 200
AT_ONCE = 100
PYTHON = [*taskqd_argv()[:1], "-P", "-c", "pass"]


@pytest.fixture(scope="module")
def g(module_trial: Trial) -> Iterator[Group]:
    """A group that is asked."""
    with module_trial() as running:
        yield running


def probe(g: Group, question: str = "live") -> list[str]:
    """The command of a probe."""
    return taskqd_argv("health", question, "--socket", str(g.socket))


def start(argv: list[str]) -> subprocess.Popen[str]:
    """Start a command with nothing of ours in its environment."""
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment(), text=True)


def cost(process: subprocess.Popen[str]) -> float:
    """The CPU seconds of a process, which must end with 0."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    text = process.communicate(timeout=10)[0]
    assert process.returncode == 0, text
    return used.ru_utime + used.ru_stime


def test_f15_two_hundred_calls_are_cheap_and_all_answered(g: Group) -> None:
    bare = statistics.median(cost(start(PYTHON)) for _ in range(20))
    costs = [cost(start(probe(g))) for _ in range(CALLS - AT_ONCE)]
    costs += [cost(process) for process in [start(probe(g)) for _ in range(AT_ONCE)]]
    assert sorted(costs)[int(CALLS * 0.95)] < 10 * bare


def test_f15_more_who_ask_at_the_same_moment_than_anybody_would_are_all_answered(g: Group) -> None:
    asking = [socket.socket(socket.AF_UNIX) for _ in range(AT_ONCE)]
    g.command.signal(signal.SIGSTOP)
    try:
        for one in asking:
            one.settimeout(20)
            one.connect(str(g.socket))
            one.sendall(b"GET /live HTTP/1.1\r\n\r\n")
    finally:
        g.command.signal(signal.SIGCONT)
    heads = {one.recv(65536).split(b"\r\n")[0] for one in asking}
    for one in asking:
        one.close()
    assert heads == {b"HTTP/1.1 200 ok"}


def test_f15_who_asks_and_says_nothing_crowds_out_nobody(g: Group) -> None:
    silent = [socket.socket(socket.AF_UNIX) for _ in range(3 * AT_ONCE)]
    try:
        for one in silent:
            one.connect(str(g.socket))
        assert g.ask("/live")[0] == 200
    finally:
        for one in silent:
            one.close()


def test_f15_a_supervisor_that_stands_still_is_not_alive(g: Group) -> None:
    g.command.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        process = start(probe(g))
        assert process.communicate(timeout=60)[0].strip() == "live: no answer: timed out"
        assert process.returncode == 1
        assert time.monotonic() - began < 21, "ten times the two seconds and a bit"
    finally:
        g.command.signal(signal.SIGCONT)
    assert start(probe(g)).wait(60) == 0


def test_f15_where_nobody_listens_nobody_is_alive(g: Group) -> None:
    process = start(taskqd_argv("health", "live", "--socket", str(g.directory / "none.sock")))
    assert process.communicate(timeout=60)[0].startswith("live: no answer: ")
    assert process.returncode == 1
