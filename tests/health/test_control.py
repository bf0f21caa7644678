"""A child's link to its supervisor, over a real socket pair."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from taskqd.health.control import ControlLink, Drain, until_beat
from taskqd.health.lines import LINE_LIMIT, LineProtocol


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


async def messages(sock: socket.socket, wanted: str) -> dict[str, Any]:
    """The next message whose op is ``wanted``."""
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    pending = b""
    async with asyncio.timeout(10):
        while True:
            pending += await loop.sock_recv(sock, 1)
            if pending.endswith(b"\n"):
                message = json.loads(pending)
                pending = b""
                if message["op"] == wanted:
                    return message


def link_on(sock: socket.socket) -> ControlLink:
    return ControlLink(socket.socket(fileno=os.dup(sock.fileno())), name="io", index=2, role="worker")


async def test_hello_then_beats_then_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    supervisor, child = pair
    link = link_on(child)
    await link.start(lambda: {"inflight": 3, "slots": 8}, lambda drain: None)
    hello = await messages(supervisor, "hello")
    assert (hello["name"], hello["index"], hello["role"], hello["pid"]) == ("io", 2, "worker", os.getpid())
    first = await messages(supervisor, "beat")
    assert (first["seq"], first["inflight"], first["slots"]) == (1, 3, 8)
    link.send_ready()
    await messages(supervisor, "ready")
    second = await messages(supervisor, "beat")
    assert second["seq"] == 2
    await link.close("done")
    assert (await messages(supervisor, "bye"))["reason"] == "done"


def test_the_link_works_on_uvloop_too(pair: tuple[socket.socket, socket.socket]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_hello_then_beats_then_ready(pair))


async def test_drain_quiet_and_resume_reach_the_child(pair: tuple[socket.socket, socket.socket]) -> None:
    supervisor, child = pair
    link = link_on(child)
    drains: list[Drain] = []
    quiets: list[bool] = []
    await link.start(dict, drains.append, quiets.append)
    supervisor.sendall(
        b'{"op":"drain","deadline_ns":3,"cancel_ns":1,"force_ns":2,"reason":"stop"}\n'
        b'{"op":"not-known-yet"}\n{"op":"quiet"}\n{"op":"resume"}\n'
    )
    async with asyncio.timeout(10):
        while len(quiets) < 2:
            await asyncio.sleep(0.01)
    assert drains == [Drain(deadline_ns=3, cancel_ns=1, force_ns=2, reason="stop")]
    assert quiets == [True, False]
    await link.close("done")


async def test_a_beat_that_raises_is_still_a_beat(pair: tuple[socket.socket, socket.socket]) -> None:
    supervisor, child = pair
    link = link_on(child)

    def broken() -> dict[str, object]:
        raise RuntimeError("pool is gone")

    await link.start(broken, lambda drain: None)
    assert (await messages(supervisor, "beat"))["error"] == "RuntimeError: pool is gone"
    await link.close("done")


async def test_a_supervisor_that_does_not_read_costs_no_memory(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, child = pair
    lines = LineProtocol(lambda message: None, lambda reason: None)
    child.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(
        lambda: lines, sock=socket.socket(fileno=os.dup(child.fileno()))
    )
    taken = [lines.send({"op": "beat", "pad": "x" * 1000}, droppable=True) for _ in range(10_000)]
    assert taken[0]
    assert not taken[-1]
    lines.close()


@given(st.floats(0, 1e9))
def test_processes_beat_together_each_second(now: float) -> None:
    pause = until_beat(now)
    assert 0.05 < pause <= 1.05
    moment = (now + pause) % 1
    assert min(moment, 1 - moment) < 1e-3


async def test_the_last_words_of_a_process_can_be_read_before_the_loop_gets_to_them(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    heard: list[str] = []
    lines = LineProtocol(lambda message: heard.append(message["op"]), heard.append)
    ours.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(
        lambda: lines, sock=socket.socket(fileno=os.dup(ours.fileno()))
    )
    await asyncio.sleep(0)
    theirs.sendall(b'{"op":"beat"}\n{"op":"bye"}\n')
    theirs.close()
    lines.read_rest()
    assert heard == ["beat", "bye"]
    lines.close()
    lines.read_rest()
    await asyncio.sleep(0.01)
    assert heard == ["beat", "bye"]


@pytest.mark.parametrize("garbage", [b"\xff\xfe\n", b"[1]\n", b'{"no":"op"}\n', b"x" * (LINE_LIMIT + 1)])
async def test_garbage_ends_the_connection(pair: tuple[socket.socket, socket.socket], garbage: bytes) -> None:
    ours, theirs = pair
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    lines = LineProtocol(lambda message: None, lost.set_result)
    ours.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(
        lambda: lines, sock=socket.socket(fileno=os.dup(ours.fileno()))
    )
    theirs.sendall(garbage)
    async with asyncio.timeout(10):
        reason = await lost
    assert "not a message" in reason or "a line of more than" in reason


def test_a_child_whose_supervisor_is_gone_ends_with_75() -> None:
    script = (
        "import asyncio\n"
        "from taskqd.health.control import ControlLink\n"
        "async def main():\n"
        "    link = ControlLink.from_environ()\n"
        "    await link.start(dict, print)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "TASKQD_CONTROL_FD": str(theirs.fileno()), "TASKQD_NAME": "io"},
        )
        theirs.close()
        ours.settimeout(30)
        assert b"hello" in ours.recv(4096)
        ours.close()
        assert child.wait(timeout=30) == 75
