"""Where live rows begin in each segment of the claim index, so that a claim does not walk dead entries."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from uuid import UUID

Segment = tuple[str, int]
"""A route and a priority."""

BEGINNING = (datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))
MAX_RECENT = 64
"""Segments of earlier looks that are remembered."""
RESCAN_SHARE = 0.05
NEWS_SHARE = 0.1
RESCAN_MIN, RESCAN_MAX = 1.0, 10.0


class Floors:
    """The segments this worker claims from, each with the last key it was answered.

    A floor is a hint. A rescan starts every segment from its beginning again; it is due after
    ``clamp(cost of the last rescan / 5 %, 1 s, 10 s)`` and whenever an answer came short, which bounds how long a row
    below a floor can stay hidden. News of jobs hastens it, as far as rescans take no more than 10 % of the time: each
    walks the dead entries of what was claimed since the last vacuum.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        self.routes = list(routes)
        self._floors: dict[Segment, tuple[datetime, UUID]] = {}
        self._recent: dict[Segment, None] = {}
        self._rescan_at = 0.0
        self._hastened = 0.0
        """The earliest that news may have the next rescan."""
        self._turn = 0

    @property
    def rescan_due(self) -> bool:
        """True when the next claim must look from the beginning."""
        return time.monotonic() >= self._rescan_at

    def want_rescan(self) -> None:
        """Look from the beginning next time: an answer came short, or somebody woke us who had found nothing left."""
        self._rescan_at = 0.0

    def hasten(self) -> None:
        """There is news, of jobs that may stand anywhere, while there is more than enough to claim."""
        self._rescan_at = min(self._rescan_at, self._hastened)

    def reset(self, heads: Iterable[Segment]) -> None:
        """Take the segments that have pending rows now, each from its beginning."""
        self._floors = dict.fromkeys(heads, BEGINNING)
        self._recent = dict.fromkeys([*self._floors, *self._recent][:MAX_RECENT])

    def rescanned(self, cost: float) -> None:
        """Schedule the next rescan after one that took ``cost`` seconds."""
        now = time.monotonic()
        self._rescan_at = now + min(RESCAN_MAX, max(RESCAN_MIN, cost / RESCAN_SHARE))
        self._hastened = min(self._rescan_at, now + cost / NEWS_SHARE)

    def segments(self) -> list[tuple[Segment, tuple[datetime, UUID]]]:
        """The segments in the order to claim from: higher priority first, queues taking turns within one."""
        return self._in_order(self._floors)

    def recent(self) -> list[tuple[Segment, tuple[datetime, UUID]]]:
        """The segments in which rows were pending at one of the last looks, from their beginning, in that order."""
        return self._in_order(dict.fromkeys(self._recent, BEGINNING))

    def _in_order(self, floors: dict[Segment, tuple[datetime, UUID]]) -> list[tuple[Segment, tuple[datetime, UUID]]]:
        self._turn += 1
        order = {route: (position + self._turn) % len(self.routes) for position, route in enumerate(self.routes)}
        return sorted(floors.items(), key=lambda item: (-item[0][1], order.get(item[0][0], 0)))

    def advance(self, segment: Segment, key: tuple[datetime, UUID]) -> None:
        """Remember the last key answered for ``segment``."""
        self._floors[segment] = key

    def __bool__(self) -> bool:
        return bool(self._floors)
