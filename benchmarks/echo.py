"""The least that a pick-up waits for: an insert that notifies, and one update by whom that wakes, in a process each."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time

import asyncpg
import uvloop

from benchmarks.ground import ROOT, SCHEMA, Ground

ROWS = 200
PATIENCE = 60.0
_TAKE = f"""
    update {SCHEMA}.echo set taken = true
    where n = (select n from {SCHEMA}.echo where not taken order by n limit 1 for update skip locked)
    returning extract(epoch from at)::float8
"""


async def bare_latencies(ground: Ground, rows: int = ROWS) -> list[float]:
    """Return the sorted seconds from a row to the end of its update, one row after the other."""
    async with ground.schema() as conn:
        await conn.execute(
            f"""
            create table {SCHEMA}.echo (n int primary key, taken bool not null default false, at timestamptz);
            create index on {SCHEMA}.echo (n) where not taken;
            """
        )
        command = [sys.executable, "-m", "benchmarks.echo", ground.server.dsn(), str(rows)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            insert = f"with row as (insert into {SCHEMA}.echo values ($1, false, clock_timestamp()) returning 1) "
            for n in range(rows):
                await conn.fetch(f"{insert} select pg_notify('echo', '') from row", n)
                await asyncio.sleep(random.uniform(0.03, 0.07))
            return sorted(json.loads(process.stdout.read()))


async def answer(dsn: str, rows: int) -> None:
    """Take each row as soon as its notification comes, then print the seconds."""
    listening, taking = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    woken = asyncio.Event()
    await listening.add_listener("echo", lambda *_: woken.set())
    take = await taking.prepare(_TAKE)
    print("ready", flush=True)
    seconds: list[float] = []
    async with asyncio.timeout(PATIENCE):
        while len(seconds) < rows:
            await woken.wait()
            woken.clear()
            while (at := await take.fetchval()) is not None:
                seconds.append(time.time() - at)
    print(json.dumps(seconds))


if __name__ == "__main__":
    uvloop.run(answer(sys.argv[1], int(sys.argv[2])))
