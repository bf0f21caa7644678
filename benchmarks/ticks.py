"""What a round of housekeeping costs with nothing to do: ``scripts/bench ticks``.

Four schemas on one server: an empty one, one with a million pending jobs, one with a million due in the future, one
with ten million that have ended. A round in each after the other, again and again, so that what else the machine does
falls on all of them: of the tick, of promotion, of retention. None may grow with rows that it has nothing to do with.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import asyncpg

from benchmarks.ground import Ground, fill, serving
from benchmarks.table import Table
from taskqd.maintenance.housekeeping import Housekeeping
from taskqd.maintenance.retention import Retention
from taskqd.settings import load_settings
from taskqd.storage.connect import create_pool
from taskqd.storage.migrate import migrate_up

MILLION = 1_000_000
ENDED = 10 * MILLION
REPEATED = 50
"""Rounds of each duty in each schema that one figure is the median of."""
FLAT = 2.0
"""What a tick may cost beside a tick of an empty schema."""
MORE = 1.0
"""Milliseconds more that the others may take: they are so short that to plan them anew for other statistics shows."""
PLAIN = {"payload": "'{}'"}
STATES: dict[str, tuple[int, dict[str, str]]] = {
    "empty": (0, {}),
    "pending": (MILLION, PLAIN),
    "future": (
        MILLION,
        PLAIN | {"status": "'scheduled'", "scheduled_at": "clock_timestamp() + interval '1 day' + n * interval '1 ms'"},
    ),
    "ended": (
        ENDED,
        PLAIN | {"status": "'succeeded'", "epoch": "1", "attempt": "1", "finished_at": "clock_timestamp()"},
    ),
}

Duty = Callable[[], Awaitable[object]]


class Place:
    """A schema in one state, and the duties that are measured in it."""

    def __init__(self, state: str, pool: object) -> None:
        self.state = state
        core = Housekeeping(pool, f"bench_{state}", statement_timeout=60)
        retention = Retention(pool, f"bench_{state}", load_settings(environ={}))
        self.duties: dict[str, Duty] = {
            "tick": core.tick,
            "promotion": lambda: core.promote(lambda: False),
            "retention": lambda: retention.run(lambda: False),
        }

    async def cost(self, duty: str) -> float:
        """Return the milliseconds that one round takes."""
        began = time.perf_counter()
        await self.duties[duty]()
        return (time.perf_counter() - began) * 1000


async def prepare(conn: asyncpg.Connection, state: str, rows: int) -> None:
    """Make the schema of a state, as it is after a while: autovacuum and the checkpointer have been there."""
    schema = f"bench_{state}"
    await conn.execute(f"drop schema if exists {schema} cascade")
    await migrate_up(conn, schema)
    await fill(conn, rows, schema=schema, **STATES[state][1])
    await conn.execute(f"vacuum analyze {schema}.jobs")


async def measure(ground: Ground, ended: int) -> Table:
    """Fill the schemas and measure the duties in each."""
    rows = {state: ground.jobs(count) for state, (count, _) in STATES.items()} | {"ended": ended}
    conn = await asyncpg.connect(ground.server.dsn())
    for state, count in rows.items():
        began = time.monotonic()
        await prepare(conn, state, count)
        print(f"{state}: {count:,} rows in {time.monotonic() - began:.0f} s", flush=True)
    await conn.execute("checkpoint")
    await conn.close()
    pools = [
        await create_pool(
            ground.server.dsn(),
            role="bench",
            schema=f"bench_{state}",
            group="",
            min_size=1,
            max_size=1,
            command_timeout=60,
            pinned=True,
        )
        for state in STATES
    ]
    places = [Place(state, pool) for state, pool in zip(STATES, pools, strict=True)]
    table = Table()
    for duty in places[0].duties:
        figures: dict[str, list[float]] = {state: [] for state in STATES}
        for place in places:  # plans are made, caches filled
            for _ in range(10):
                await place.cost(duty)
        for _ in range(ground.rounds):
            costs: dict[str, list[float]] = {state: [] for state in STATES}
            for _ in range(REPEATED):
                for place in places:
                    costs[place.state].append(await place.cost(duty))
            for state, found in costs.items():
                figures[state].append(statistics.median(found))
        table.add(f"{duty} with nothing to do", figures["empty"], ".2f ms")
        for state in list(STATES)[1:]:
            pairs = list(zip(figures[state], figures["empty"], strict=True))
            note = f"{statistics.median(figures[state]):.2f} ms"
            if duty == "tick":
                ratios = [one / other for one, other in pairs]
                table.add(f"tick with {rows[state]:,} {state} / with none", ratios, ".2f", FLAT, 1.2, note)
            else:
                more = [one - other for one, other in pairs]
                table.add(f"{duty} with {rows[state]:,} {state}: more", more, ".2f ms", MORE, 0.2, note)
    for pool in pools:
        await pool.close()
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench ticks", description=__doc__)
    parser.add_argument("--rounds", type=int, help="default 5; 1 with --quick")
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--ended", type=int, help=f"default {ENDED}; a tenth with --quick")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 5)
    with serving(rounds, quick=options.quick, deployed=False, concurrency=1) as ground:
        table = asyncio.run(measure(ground, options.ended or ground.jobs(ENDED)))
    print(f"\nmedians of {rounds} rounds on {os.cpu_count()} CPUs")
    table.show()
    return 0


if __name__ == "__main__":
    sys.exit(main())
