"""The fixtures of tests that work on a migrated schema."""

from tests.queue_fixtures import fleet, jobs, other, pool, proxy, tq

__all__ = ["fleet", "jobs", "other", "pool", "proxy", "tq"]
