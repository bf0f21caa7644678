"""The no-op actor of the benchmarks: it sums its payloads, and tells when it has seen the last."""

from __future__ import annotations

import json
import os
import time

from pydantic import BaseModel

from taskqd import actor

TOTAL = int(os.environ.get("BENCH_TOTAL", "0"))
OUTPUT = os.environ.get("BENCH_OUTPUT", "")


class Payload(BaseModel):
    """About 250 bytes as JSON."""

    n: int
    blob: str = "x" * 230


class Tally:
    """What the handlers have seen."""

    count = 0
    sum = 0
    first = 0.0


@actor(name="bench.noop", queue="bench")
async def noop(payload: Payload) -> None:
    if Tally.count == 0:
        Tally.first = time.perf_counter()
    Tally.count += 1
    Tally.sum += payload.n
    if Tally.count == TOTAL:
        seconds = time.perf_counter() - Tally.first
        with open(OUTPUT, "w") as file:
            json.dump({"jobs_per_second": (TOTAL - 1) / seconds, "sum": Tally.sum}, file)


registry = [noop]
