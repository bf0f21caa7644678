"""Insights: what is starved, drains slowly, has more slots than work, or fires more than it clears."""

from __future__ import annotations

from taskqd.storage.insights import (
    Insight,
    InsightKind,
    Insights,
    QueueFigures,
    ScheduleFigures,
    insights_sql,
    read_insights,
)

__all__ = [
    "Insight",
    "InsightKind",
    "Insights",
    "QueueFigures",
    "ScheduleFigures",
    "insights_sql",
    "read_insights",
]
