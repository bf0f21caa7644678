"""A limited actor in front of a crowd that nothing limits."""

from __future__ import annotations

from benchmarks.ground import SCHEMA, Ground, fill, lane

CAPPED, FREE = 2_000, 400_000


async def capped_rate(ground: Ground) -> float:
    """Return jobs per second of an actor that may run one job of 5 ms at a time, while free jobs are drained too."""
    capped, free = ground.jobs(CAPPED), ground.jobs(FREE)
    async with ground.schema() as conn:
        await fill(conn, capped, actor="'bench.capped'", lane=lane("bench.capped"))
        await fill(conn, free, first=capped)
        await ground.drain(conn, capped + free)
        rate = await conn.fetchval(
            f"""
            select (count(*) - 1) / extract(epoch from max(finished_at) - min(finished_at))::float8
            from {SCHEMA}.jobs
            where actor = 'bench.capped'
              and finished_at <= (select max(finished_at) from {SCHEMA}.jobs where actor <> 'bench.capped')
            """
        )
        return float(rate)
