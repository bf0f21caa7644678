"""The application of the spawn benchmark: one actor, and imports as heavy as those of many services."""

from __future__ import annotations

import httpx
import numpy as np
import sqlalchemy.dialects.postgresql
import sqlalchemy.orm  # noqa: F401
from pydantic import BaseModel

from taskqd import actor


class Payload(BaseModel):
    """Nothing of note."""

    n: int = 0


@actor(name="bench.heavy", queue="bench")
async def heavy(payload: Payload) -> float:
    return float(np.arange(payload.n).sum()) + len(httpx.__version__)


registry = [heavy]
