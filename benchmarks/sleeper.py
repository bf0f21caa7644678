"""The actor that the recovery benchmark kills the worker of: it sleeps the first time."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta

from pydantic import BaseModel

from taskqd import JobContext, RetryPolicy, actor


class Payload(BaseModel):
    """Nothing."""


@actor(retry=RetryPolicy(base=timedelta(0), max_attempts=10))
async def sleeper(payload: Payload, ctx: JobContext[Payload]) -> None:
    """Note the process and the time of this start, and sleep in the first attempt."""
    with open(os.environ["STARTS"], "a") as file:
        file.write(f"{os.getpid()} {time.time()}\n")
    if ctx.attempt == 1:
        await asyncio.sleep(1000)


actors = [sleeper]
