"""Structured logs: one line an event, JSON or for a console, to standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any, cast

import structlog

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_FIELD = 16_384
"""Characters kept of one text field: an unbounded traceback must not fill a log."""


def configure(format: str, level: str, **bound: Any) -> None:
    """Set up logging of this process: ``format`` json or console, ``level`` a standard name, ``bound`` on every line.

    Standard-library loggers (asyncio, asyncpg, the application's own) come out in the same form.
    """
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        _bind(bound),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _cut,
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger called ``name``; events are short names, details are fields."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(name))


def _bind(bound: dict[str, Any]) -> structlog.typing.Processor:
    def bind(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for key, value in bound.items():
            event.setdefault(key, value)
        return event

    return bind


def _cut(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_FIELD:
            event[key] = value[:MAX_FIELD] + f"… ({len(value)} characters)"
    return event
