"""Batches: enqueue many jobs at once and wait until all of them have ended."""

from __future__ import annotations

from taskqd.client.batch import (
    MAX_BATCH,
    AbortBatchAfter,
    BatchFilter,
    BatchHandle,
    BatchStatus,
    BatchSummary,
    EnqueueItem,
    wait_for_batch,
)

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
