"""The actors of real workers in the matrix, as the group's own module, and what they noted."""

from __future__ import annotations

from pathlib import Path

ACTORS = """\
import asyncio, ctypes, os, time
from pydantic import BaseModel
from taskqd import actor

class Nothing(BaseModel):
    pass

def first_time(name):
    file = os.open("started", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, f"{name} {os.getpid()}\\n".encode())
    os.close(file)
    with open("started") as lines:
        return [line.split()[0] for line in lines].count(name) == 1

@actor
async def sleeps(payload: Nothing) -> None:
    if first_time("sleeps"):
        time.sleep(1000)

@actor
async def holds(payload: Nothing) -> None:
    if first_time("holds"):
        while True:
            ctypes.PyDLL(None).sleep(1000)

@actor
async def spins(payload: Nothing) -> None:
    if first_time("spins"):
        while True:
            pass

@actor
async def waits(payload: Nothing) -> None:
    first_time("waits")
    while not os.path.exists("go"):
        await asyncio.sleep(0.02)

registry = [sleeps, holds, spins, waits]
"""


def started(directory: Path) -> list[tuple[str, int]]:
    """Return each start of an actor so far: its name and the process."""
    file = directory / "started"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(name, int(pid)) for name, pid in (line.split() for line in lines)]
