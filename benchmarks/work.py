"""The actors that the benchmarks of the engine run: each adds the number of its job to what this process has seen.

When the process has seen ``BENCH_TOTAL`` of them it writes the file ``<pid>.total`` in ``BENCH_DIRECTORY``, and as it
ends ``<pid>.all``. With ``BENCH_TIMES`` it notes when each began. With ``BENCH_TROUBLE`` 5 % are retried once and 1 %
put off once, all of them among the first nine tenths, so that no drain ends by waiting for the last of these.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import time
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.noop import Payload
from taskqd import RetryPolicy, Snooze, actor

TOTAL = int(os.environ.get("BENCH_TOTAL", "0"))
TIMES = "BENCH_TIMES" in os.environ
TROUBLE = "BENCH_TROUBLE" in os.environ
DIRECTORY = Path(os.environ.get("BENCH_DIRECTORY", "."))
QUEUE = "bench"
ACTORS = 50
PUT_OFF = 0.05
"""Seconds until a job runs again that was retried or put off."""


class Seen:
    """What the handlers of this process have seen."""

    count = 0
    sum = 0
    began = 0.0
    cpu = 0.0
    times: list[tuple[int, float]] = []  # noqa: RUF012 - there is one
    troubled: set[int] = set()  # noqa: RUF012


def see(n: int) -> None:
    """Count the job ``n``."""
    if Seen.count == 0:
        Seen.began, Seen.cpu = time.perf_counter(), time.process_time()
    if TIMES:
        Seen.times.append((n, time.time()))
    if TROUBLE:
        _trouble(n)
    Seen.count += 1
    Seen.sum += n
    if Seen.count == TOTAL:
        _tell("total", seconds=time.perf_counter() - Seen.began, cpu=time.process_time() - Seen.cpu)


def _trouble(n: int) -> None:
    if n >= 0.9 * TOTAL or n in Seen.troubled:
        return
    if n % 18 == 0:
        Seen.troubled.add(n)
        raise ConnectionError("the other side is away")
    if n % 90 == 1:
        Seen.troubled.add(n)
        raise Snooze(PUT_OFF)


def _tell(name: str, **values: object) -> None:
    file = DIRECTORY / f"{os.getpid()}.{name}"
    written = file.with_suffix(".part")
    written.write_text(json.dumps(values))
    written.rename(file)


if TOTAL:
    atexit.register(lambda: _tell("all", count=Seen.count, sum=Seen.sum, times=Seen.times))

_RETRY = RetryPolicy(base=timedelta(seconds=PUT_OFF), jitter=0)


@actor(name="bench.plain", queue=QUEUE, retry=_RETRY)
async def plain(payload: Payload) -> None:
    """Do nothing more."""
    see(payload.n)


@actor(name="bench.drained", queue=QUEUE, max_concurrent=0)
async def drained(payload: Payload) -> None:
    """Never run: the rows of this actor are in the way of others."""
    see(payload.n)


@actor(name="bench.capped", queue=QUEUE, max_concurrent=1)
async def capped(payload: Payload) -> None:
    """Take five milliseconds."""
    see(payload.n)
    await asyncio.sleep(0.005)


@actor(name="bench.long", queue=QUEUE)
async def long(payload: Payload) -> None:
    """Take two seconds."""
    see(payload.n)
    await asyncio.sleep(2)


def _another(number: int) -> Callable[[Payload], Coroutine[Any, Any, None]]:
    async def spread(payload: Payload) -> None:
        see(payload.n)

    return actor(name=f"bench.spread-{number}", queue=QUEUE, retry=_RETRY)(spread)


actors = [plain, drained, capped, long, *(_another(number) for number in range(ACTORS))]
