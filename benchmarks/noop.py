"""A payload of 250 bytes, and an actor that does nothing with it."""

from __future__ import annotations

from pydantic import BaseModel

from taskqd import actor


class Payload(BaseModel):
    """About 250 bytes as JSON."""

    n: int
    blob: str = "x" * 230


@actor(name="bench.noop", queue="bench")
async def noop(payload: Payload) -> None:
    """Do nothing."""
