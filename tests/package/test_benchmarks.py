"""Benchmarks of the engine still run, and check what they measure: three of them, with few jobs."""

from __future__ import annotations

import pytest

from benchmarks import backlog, bare
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


async def test_the_bytes_of_the_statements_alone_are_measured(server: Server) -> None:
    ground = Ground(server, rounds=1, quick=True, deployed=False, concurrency=8)
    assert 500 < await bare.wal_of_statements(ground) < 5_000


def test_a_limit_may_be_the_most_or_the_least() -> None:
    table = Table()
    table.add("ratio", [0.9, 0.7, 0.8], ".2f", 0.75, 0.95, at_least=True)
    table.add("time", [9.0, 7.0, 8.0], ".0f ms", 7, 5)
    assert [row[1:5] for row in table.rows] == [
        ("0.80 (0.70 to 0.90)", "≥ 0.75", "yes", "≥ 0.95"),
        ("8 ms (7 to 9)", "≤ 7", "NO", "≤ 5"),
    ]
