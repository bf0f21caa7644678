"""Retention keeps up with 2,000 jobs a second that come, run and go, and drains do not notice; the long tier."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.ground import serving
from benchmarks.retention import KEPT, LATE, RATE, keep_up


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_the_table_stays_as_large_as_it_is_and_a_drain_as_quick() -> None:
    with serving(1, quick=False, deployed=False, concurrency=50) as ground:
        kept = await keep_up(ground, 600)
    half = len(kept.rows) // 2
    assert kept.archived >= 0.95 * RATE
    assert max(kept.oldest[half:]) < KEPT + LATE
    assert statistics.median(kept.rows[half:]) < 2 * KEPT * RATE + RATE * LATE
    assert kept.growth < 1.5, "it grows and shrinks with the rounds of autovacuum"
    assert kept.ratio >= 0.9, f"{kept.beside} and {kept.without} jobs/s"
