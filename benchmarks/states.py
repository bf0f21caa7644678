"""The actors that bring a worker into each state in which its supervisor may die, or must notice it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time

from pydantic import BaseModel

from taskqd import RetryPolicy, actor

_ONCE = RetryPolicy(max_attempts=1)


class Payload(BaseModel):
    """Nothing."""


def _note(name: str) -> None:
    with open("states", "a") as file:
        file.write(f"{name} {os.getpid()} {time.time()}\n")


@actor(name="bench.spin", queue="spin", retry=_ONCE)
async def spin(payload: Payload) -> None:
    """Use the processor, on the event loop."""
    _note("spin")
    while True:
        pass


@actor(name="bench.hold", queue="hold", retry=_ONCE)
async def hold(payload: Payload) -> None:
    """Sleep in C, holding the interpreter lock."""
    _note("hold")
    ctypes.PyDLL(None).sleep(1000)


@actor(name="bench.linger", queue="linger", retry=_ONCE)
async def linger(payload: Payload) -> None:
    """Run on, so that a worker that is asked to stop drains."""
    _note("linger")
    await asyncio.sleep(1000)


@actor(name="bench.block", queue="block", retry=_ONCE)
async def block(payload: Payload) -> None:
    """Block the event loop with what is no coroutine."""
    _note("block")
    time.sleep(1000)  # the guilty line


if os.environ.get("TASKQD_NAME") == "boot":
    _note("boot")
    time.sleep(1000)

actors = [spin, hold, linger, block]
