"""The way of a log line out of the process: whole, in order, and never a reason to wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from taskqd.observe.sink import LINE_LIMIT, Sink
from tests.support import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def fill(fd: int) -> int:
    """Fill a pipe to the last byte and return how much that was."""
    os.set_blocking(fd, False)
    total = 0
    for size in (65536, 1):
        try:
            while True:
                total += os.write(fd, b"-" * size)
        except BlockingIOError:
            continue
    os.set_blocking(fd, True)
    return total


def read_lines(fd: int, count: int) -> list[bytes]:
    data = b""
    while data.count(b"\n") < count:
        data += os.read(fd, 65536)
    return data.splitlines()


def test_lines_come_out_in_order(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    for number in range(100):
        sink.put(b"%d\n" % number)
    assert sink.flush(10)
    assert read_lines(pipe[0], 100) == [b"%d" % number for number in range(100)]
    assert sink.dropped == 0


def test_a_reader_that_stops_holds_nobody_and_what_it_missed_is_counted(pipe: tuple[int, int]) -> None:
    stuffing = fill(pipe[1])
    sink = Sink(pipe[1], capacity=10, on_drop=lambda count: b"lost %d\n" % count)
    slowest = 0.0
    for number in range(1000):
        began = time.perf_counter()
        sink.put(b"%d\n" % number)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 0.1, "ten times what a line may take"
    assert not sink.flush(0.05), "and flushing is bounded"
    assert sink.dropped >= 989
    lost = sink.dropped
    while stuffing > 0:
        stuffing -= len(os.read(pipe[0], min(stuffing, 65536)))
    lines = read_lines(pipe[0], 1000 - lost + 1)
    assert lines.count(b"lost %d" % lost) == 1
    assert sink.flush(10)


def test_lines_of_many_processes_are_not_mixed(pipe: tuple[int, int]) -> None:
    pids = []
    for letter in b"abcd":
        pid = os.fork()
        if pid == 0:
            sink = Sink(pipe[1])
            for _ in range(200):
                sink.put(bytes([letter]) * (LINE_LIMIT - 1) + b"\n")
                sink.flush(10)
            os._exit(0)
        pids.append(pid)
    lines = read_lines(pipe[0], 800)
    for pid in pids:
        os.waitpid(pid, 0)
    assert {len(line) for line in lines} == {LINE_LIMIT - 1}
    assert {len(set(line)) for line in lines} == {1}, "each line holds one letter alone"


def test_a_forked_process_logs_on_and_repeats_nothing(pipe: tuple[int, int]) -> None:
    stuffing = fill(pipe[1])
    sink = Sink(pipe[1])
    sink.put(b"first\n")
    sink.put(b"parent\n")
    pid = os.fork()
    if pid == 0:
        sink.put(b"child\n")
        sink.flush(20)
        os._exit(0)
    while stuffing > 0:
        stuffing -= len(os.read(pipe[0], min(stuffing, 65536)))
    assert sorted(read_lines(pipe[0], 3)) == [b"child", b"first", b"parent"]
    os.waitpid(pid, 0)


def test_a_descriptor_that_is_gone_or_made_non_blocking_is_survived(pipe: tuple[int, int]) -> None:
    stuffing = fill(pipe[1])
    os.set_blocking(pipe[1], False)
    sink = Sink(pipe[1])
    sink.put(b"late\n")
    assert not sink.flush(0.05)
    while stuffing > 0:
        stuffing -= len(os.read(pipe[0], min(stuffing, 65536)))
    assert read_lines(pipe[0], 1) == [b"late"]
    closed = Sink(2**20)
    closed.put(b"to nobody\n")
    wait_until(lambda: closed.dropped == 1, 10)


def test_many_threads_lose_nothing(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1])
    threads = [threading.Thread(target=lambda: [sink.put(b"x\n") for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    lines = read_lines(pipe[0], 1600)
    for thread in threads:
        thread.join(10)
    assert len(lines) == 1600
