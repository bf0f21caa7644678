"""The figures of the engine, beside what they are measured against in the same run: ``scripts/bench engine``.

Each figure is the median of some rounds, which alternate between the two sides of a ratio. ``--only spread,capped``
measures some rows, ``--quick`` a tenth of their jobs in one round, ``--deployed`` with what a deployment turns on: a
default timeout, metrics that are read each second, JSON logs at INFO, a scheduler, 5 % retries and 1 % snoozes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks import backlog, bare, graphile
from benchmarks.backlog import JOBS
from benchmarks.capped import CAPPED, FREE, capped_rate
from benchmarks.echo import bare_latencies
from benchmarks.ground import Drained, Ground, serving
from benchmarks.pgqueuer import BATCH, drain_pgqueuer
from benchmarks.pickup import idle_latencies, last_start
from benchmarks.stream import RATE, together
from benchmarks.table import Table

Drain = Callable[[], Awaitable[Drained]]


class Run:
    """One run on one server."""

    def __init__(self, ground: Ground) -> None:
        self.table = Table()
        self._ground = ground
        self._rounds = ground.rounds
        self._plain = partial(backlog.plain, ground)

    async def graphile(self) -> None:
        """No-op drain beside graphile-worker."""
        what = f"no-op drain / graphile-worker, localQueue {graphile.LOCAL_QUEUE}"
        if reason := graphile.missing():
            print(f"{what}: left out, {reason}", flush=True)
            return
        jobs = self._ground.jobs(JOBS)
        await self._beside(what, lambda: graphile.drain_graphile(self._ground.server, jobs), 1.0, 1.8)

    async def pgqueuer(self) -> None:
        """No-op drain beside pgqueuer."""
        jobs = self._ground.jobs(JOBS)
        peer = partial(drain_pgqueuer, self._ground.server.dsn(), jobs)
        await self._beside(f"no-op drain / pgqueuer, batch {BATCH}", peer, 1.8, 3.5)

    async def _beside(self, what: str, peer: Callable[[], float], bound: float, goal: float) -> None:
        ours, theirs = [], []
        for _ in range(self._rounds):
            ours.append((await self._plain()).rate)
            theirs.append(await asyncio.to_thread(peer))
        self._ratio(what, ours, theirs, bound, goal)

    async def spread(self) -> None:
        """Many actors, priorities and queues."""
        what = "50 actors, 5 priorities, 4 queues / one of each"
        await self._compare(what, partial(backlog.spread, self._ground), self._plain, 0.8, 0.95)

    async def drained(self) -> None:
        """Rows that may not run in front."""
        what = f"{self._ground.jobs(backlog.CROWD):,} rows of a drained actor at the head / without"
        await self._compare(what, partial(backlog.behind_drained, self._ground), self._plain, 0.9, 0.98)

    async def capped(self) -> None:
        """A limited actor."""
        rates = [await capped_rate(self._ground) for _ in range(self._rounds)]
        capped, free = (self._ground.jobs(jobs) for jobs in (CAPPED, FREE))
        what = f"cap-1 actor, {capped:,} jobs of 5 ms in front of {free:,} free ones"
        self.table.add(what, rates, ".0f jobs/s", 100, 180, at_least=True)

    async def crowd(self) -> None:
        """A full table."""
        few = partial(backlog.plain, self._ground, backlog.FEW * (10 if self._ground.quick else 1))
        crowd = self._ground.jobs(backlog.CROWD)
        what = f"drain with {crowd:,} pending, finished and future rows each / at {backlog.FEW:,}"
        await self._compare(what, partial(backlog.in_a_crowd, self._ground), few, 0.8, 0.95)

    async def snapshot(self) -> None:
        """An old snapshot."""
        for jobs, bound, goal in (backlog.SHORT, 0.7, 0.95), (backlog.LONG, 0.5, 0.85):
            under, plain = (partial(one, self._ground, jobs) for one in (backlog.under_snapshot, backlog.plain))
            what = f"drain of {self._ground.jobs(jobs):,} with a snapshot held open / without"
            await self._compare(what, under, plain, bound, goal)

    async def stream(self) -> None:
        """Enqueue beside it."""
        found, plain = [], []
        for _ in range(self._rounds):
            plain.append((await self._plain()).rate)
            found.append(await together(self._ground))
        rates, late, enqueued = (list(values) for values in zip(*found, strict=True))
        self._ratio(f"enqueue at {RATE:,}/s and drain together / plain drain", rates, plain, 0.8, 0.95)
        note = f"{statistics.median(enqueued):,.0f} jobs/s were enqueued"
        self.table.add("pick-up p99 then", _ms(late), ".1f ms", 15, 8, note)

    async def pickup(self) -> None:
        """Single jobs on an idle queue."""
        found, bare = [], []
        for _ in range(self._rounds):
            bare.append(await bare_latencies(self._ground))
            found.append(await idle_latencies(self._ground))
        for share, bound, goal in (50, 3, 1.5), (99, 15, 5):
            ours, least = (_ms([one[len(one) * share // 100] for one in each]) for each in (found, bare))
            note = f"two bare statements {statistics.median(least):.1f} ms"
            self.table.add(f"pick-up on an idle queue, p{share}", ours, ".1f ms", bound, goal, note)

    async def starts(self) -> None:
        """Workers share."""
        found = _ms([await last_start(self._ground) for _ in range(self._rounds)])
        self.table.add("2 workers with 4 slots, 8 jobs of 2 s: last start", found, ".0f ms", 100, 30)

    async def wal(self) -> None:
        """What is written."""
        ours, bares = [], []
        for _ in range(self._rounds):
            ours.append(await bare.wal_of_worker(self._ground))
            bares.append(await bare.wal_of_statements(self._ground))
        note = f"{statistics.median(ours):,.0f} and {statistics.median(bares):,.0f} bytes"
        ratios = [one / other for one, other in zip(ours, bares, strict=True)]
        self.table.add("WAL per no-op job / of claim and settle alone", ratios, ".2f", 1.2, 1.0, note)

    async def cpu(self) -> None:
        """What a job costs the worker."""
        costs = [(await self._plain()).cpu * 1e6 for _ in range(self._rounds)]
        self.table.add("CPU of the worker per no-op job", costs, ".1f µs", 20, 10)

    async def _compare(self, what: str, one: Drain, other: Drain, bound: float, goal: float) -> None:
        ones, others = [], []
        for _ in range(self._rounds):
            ones.append((await one()).rate)
            others.append((await other()).rate)
        self._ratio(what, ones, others, bound, goal)

    def _ratio(self, what: str, ones: list[float], others: list[float], bound: float, goal: float) -> None:
        ratios = [one / other for one, other in zip(ones, others, strict=True)]
        note = f"{statistics.median(ones):,.0f} and {statistics.median(others):,.0f} jobs/s"
        self.table.add(what, ratios, ".2f", bound, goal, note, at_least=True)


ROWS: dict[str, Callable[[Run], Awaitable[None]]] = {
    "graphile": Run.graphile,
    "pgqueuer": Run.pgqueuer,
    "spread": Run.spread,
    "drained": Run.drained,
    "capped": Run.capped,
    "crowd": Run.crowd,
    "snapshot": Run.snapshot,
    "stream": Run.stream,
    "pickup": Run.pickup,
    "starts": Run.starts,
    "wal": Run.wal,
    "cpu": Run.cpu,
}
ALWAYS_PLAIN = ("stream", "pickup", "starts", "wal")
"""Rows that are no drains, and are left out with ``--deployed`` unless they are named."""


def _ms(seconds: list[float]) -> list[float]:
    return [each * 1000 for each in seconds]


async def measure(ground: Ground, rows: list[str]) -> Table:
    """Measure ``rows``."""
    run = Run(ground)
    for row in rows:
        await ROWS[row](run)
    return run.table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench engine", description=__doc__)
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--only", help=f"some of {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs")
    parser.add_argument("--deployed", action="store_true", help="with what a deployment turns on; drains only")
    parser.add_argument("--concurrency", type=int, default=50, help="slots of the worker; default %(default)s")
    options = parser.parse_args()
    rows = options.only.split(",") if options.only else list(ROWS)
    if not set(rows) <= ROWS.keys():
        parser.error(f"--only: there are {', '.join(ROWS)}")
    if options.deployed and not options.only:
        rows = [row for row in rows if row not in ALWAYS_PLAIN]
    rounds = options.rounds or (1 if options.quick else 5)
    with serving(rounds, quick=options.quick, deployed=options.deployed, concurrency=options.concurrency) as ground:
        table = asyncio.run(measure(ground, rows))
    print(f"\nmedians of {rounds} rounds on {os.cpu_count()} CPUs")
    table.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
