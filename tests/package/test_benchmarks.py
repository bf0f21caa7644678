"""Benchmarks of the engine and of maintenance still run, and check what they measure, with few jobs."""

from __future__ import annotations

import asyncpg
import pytest

from benchmarks import backlog, bare, promotion, ticks
from benchmarks.echo import bare_latencies
from benchmarks.ground import Ground
from benchmarks.table import Table
from tests.postgres import Server


@pytest.mark.parametrize("deployed", [False, True])
async def test_a_drain_is_measured(server: Server, deployed: bool) -> None:
    ground = Ground(server, rounds=1, quick=True, deployed=deployed, concurrency=8)
    drained = await backlog.plain(ground, 5_000)
    assert drained.jobs == 500, "whatever was retried or put off"
    assert drained.rate > 0
    assert drained.cpu > 0


async def test_the_least_that_a_pick_up_waits_for_is_measured(server: Server) -> None:
    ground = Ground(server, rounds=1, quick=True, deployed=False, concurrency=8)
    seconds = await bare_latencies(ground, 5)
    assert len(seconds) == 5
    assert 0 < seconds[0] <= seconds[-1] < 10


async def test_the_bytes_of_the_statements_alone_are_measured(server: Server) -> None:
    ground = Ground(server, rounds=1, quick=True, deployed=False, concurrency=8)
    assert 500 < await bare.wal_of_statements(ground) < 5_000


async def test_the_promotion_of_a_backlog_is_measured(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "BACKLOG", 30_000)
    monkeypatch.setattr(promotion, "DRAINED", 10_000)
    ground = Ground(server, rounds=1, quick=True, deployed=False, concurrency=8)
    promoted, ended = await promotion.beside(ground)
    assert promoted > 0
    assert ended > 0


async def test_rounds_of_housekeeping_are_measured(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticks, "REPEATED", 2)
    states = {state: (min(rows, 10_000), columns) for state, (rows, columns) in ticks.STATES.items()}
    monkeypatch.setattr(ticks, "STATES", states)
    ground = Ground(server, rounds=1, quick=True, deployed=False, concurrency=8)
    table = await ticks.measure(ground, 1_000)
    assert len(table.rows) == 3 * 4
    conn = await asyncpg.connect(server.dsn())
    for state in ticks.STATES:
        await conn.execute(f"drop schema bench_{state} cascade")
    await conn.close()


def test_a_limit_may_be_the_most_or_the_least() -> None:
    table = Table()
    table.add("ratio", [0.9, 0.7, 0.8], ".2f", 0.75, 0.95, at_least=True)
    table.add("time", [9.0, 7.0, 8.0], ".0f ms", 7, 5)
    assert [row[1:5] for row in table.rows] == [
        ("0.80 (0.70 to 0.90)", "≥ 0.75", "yes", "≥ 0.95"),
        ("8 ms (7 to 9)", "≤ 7", "NO", "≤ 5"),
    ]
