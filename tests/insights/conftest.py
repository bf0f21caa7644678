"""The fixtures of tests that look at figures."""

from tests.queue_fixtures import fleet, jobs, pool, tq

__all__ = ["fleet", "jobs", "pool", "tq"]
