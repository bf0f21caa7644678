"""The processes of a group do one thing after the other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from taskqd.storage import turn
from taskqd.storage.credentials import Credential
from taskqd.storage.rotation import Rotation
from taskqd.storage.turn import Turn

HOLD = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(1000)
"""


async def test_one_at_a_time(tmp_path: Path) -> None:
    inside = most = 0

    async def work() -> None:
        nonlocal inside, most
        async with Turn(str(tmp_path)).taken():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    async with asyncio.timeout(60):
        await asyncio.gather(*(work() for _ in range(5)))
    assert most == 1


async def test_a_killed_process_gives_its_turn_back(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waiting = asyncio.create_task(_once(tmp_path))
        await asyncio.sleep(0.1)
        assert not waiting.done()
    finally:
        holder.kill()
        holder.wait(30)
    await asyncio.wait_for(waiting, 30)


async def _once(directory: Path) -> None:
    async with Turn(str(directory)).taken():
        pass


async def test_a_turn_that_does_not_come_keeps_the_sessions_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn, "TURN_TIMEOUT", 0.1)
    renewed: list[str] = []

    async def renew() -> None:
        renewed.append("pool")

    rotation = Rotation(
        None,
        Credential("x"),
        {"pool": renew},
        interval=0,
        on_renewed=lambda _results: None,
        on_failure=lambda *_: None,
        turn=Turn(str(tmp_path)),
    )
    async with Turn(str(tmp_path)).taken():
        with pytest.raises(ConnectionError, match="still at it after"):
            await rotation.renew()
    assert renewed == []
    await rotation.renew()
    assert renewed == ["pool"]


async def test_without_the_directory_nobody_waits(tmp_path: Path) -> None:
    await asyncio.wait_for(_once(tmp_path / "gone"), 10)


def test_only_a_process_of_a_group_takes_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TASKQD_HEALTH_SOCKET", str(tmp_path / "io.0.sock"))
    monkeypatch.delenv("TASKQD_GROUP", raising=False)
    assert Turn.from_environ() is None
    monkeypatch.setenv("TASKQD_GROUP", "g")
    assert Turn.from_environ() is not None
    assert os.listdir(tmp_path) == []
