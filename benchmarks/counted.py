"""The actor that the rotation benchmark runs: each execution leaves one byte in a file."""

from __future__ import annotations

import asyncio
import os

from pydantic import BaseModel

from taskqd import actor


class Payload(BaseModel):
    """Nothing."""


@actor
async def counted(payload: Payload) -> None:
    """Note this execution and take a little time."""
    file = os.open(os.environ["EXECUTIONS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, b"x")
    os.close(file)
    await asyncio.sleep(0.02)


actors = [counted]
