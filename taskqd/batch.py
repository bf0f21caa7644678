"""Batches of jobs: what to enqueue together, and waiting for all of it."""

from __future__ import annotations

from taskqd.client.batch import EnqueueItem, wait_for_batch

__all__ = ["EnqueueItem", "wait_for_batch"]
