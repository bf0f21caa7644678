"""The fixtures of tests that work on a migrated schema."""

from tests.queue_fixtures import fleet, jobs, pool, proxy, tq

__all__ = ["fleet", "jobs", "pool", "proxy", "tq"]
