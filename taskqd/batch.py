"""Batches: enqueue many jobs at once and wait until all of them have ended."""

from __future__ import annotations

from taskqd.client.batch import (
    AbortBatchAfter,
    BatchFilter,
    BatchHandle,
    BatchStatus,
    BatchSummary,
    wait_for_batch,
)
from taskqd.client.enqueue import MAX_BATCH
from taskqd.client.item import EnqueueItem

__all__ = [
    "MAX_BATCH",
    "AbortBatchAfter",
    "BatchFilter",
    "BatchHandle",
    "BatchStatus",
    "BatchSummary",
    "EnqueueItem",
    "wait_for_batch",
]
