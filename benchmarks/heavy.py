"""The application of the benchmarks as taskqd sees it: an actor beside heavy imports."""

from __future__ import annotations

from pydantic import BaseModel

import benchmarks.application  # noqa: F401 - its weight
from taskqd import actor


class Payload(BaseModel):
    """Nothing."""


@actor(name="bench.heavy", queue="bench")
async def heavy(payload: Payload) -> None:
    """Do nothing: what is measured is the process."""


registry = [heavy]
