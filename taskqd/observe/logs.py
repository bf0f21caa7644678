"""Structured logs: one line an event, JSON or for a console, to standard error, from which nothing waits."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any, cast

import structlog

from taskqd.observe.sink import LINE_LIMIT, Sink

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_FIELD = 16_384
"""Characters kept of one text field before a line is made of it."""

FLUSH_TIME = 0.5
"""Seconds that a process gives its last lines when it ends."""

_HALF = LINE_LIMIT // 2
_SHORTEST = 32
"""Characters that a field keeps however many others there are."""

_ALWAYS = ("event", "level", "timestamp", "worker", "role")
"""What a line keeps that has too many fields for anything more."""

_sink: Sink | None = None


def configure(format: str, level: str, **bound: Any) -> None:
    """Set up logging of this process: ``format`` json or console, ``level`` a standard name, ``bound`` on every line.

    Standard-library loggers (asyncio, asyncpg, the application's own) come out in the same form. A line is at most
    4,096 bytes long: the longest fields lose their middle. Lines that standard error does not take are dropped and
    counted, and the process goes on.
    """
    global _sink
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
    render = _fitting(renderer)
    _sink = Sink(_standard_error(), on_drop=lambda count: _drop_line(count, [*shared, render]))
    handler = _Handler(_sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    if root.level != logging.getLevelName(level):  # it visits every logger that there is
        root.setLevel(level)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger called ``name``; events are short names, details are fields."""
    return cast("structlog.stdlib.BoundLogger", structlog.get_logger(name))


class LibraryLogger:
    """The logger called ``name`` of what may also run in somebody else's process.

    Where :func:`configure` has set up this process's logs it is that of :func:`get_logger`; elsewhere lines go to the
    standard library's logger of that name, as the process has set that up, and never past it.
    """

    def __init__(self, name: str) -> None:
        self._ours = get_logger(name)
        self._plain: structlog.stdlib.BoundLogger = structlog.wrap_logger(
            logging.getLogger(name),
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )

    def info(self, event: str, **fields: Any) -> None:
        """Tell what has happened."""
        self._chosen.info(event, **fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Tell what has gone wrong, and is tried again or done without."""
        self._chosen.warning(event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        """Tell what somebody must look at."""
        self._chosen.error(event, **fields)

    @property
    def _chosen(self) -> structlog.stdlib.BoundLogger:
        return self._plain if _sink is None else self._ours


def flush(timeout: float = FLUSH_TIME) -> None:
    """Wait for the lines logged so far, for at most ``timeout`` seconds. For a process that ends itself hard."""
    if _sink is not None:
        _sink.flush(timeout)


def dropped() -> int:
    """Return how many lines were lost since the start."""
    return 0 if _sink is None else _sink.dropped


class _Handler(logging.Handler):
    """Hands finished lines to the sink."""

    def __init__(self, sink: Sink) -> None:
        super().__init__()
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode("utf-8", "backslashreplace")
            self._sink.put(_short_enough(line) + b"\n")
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._sink.flush(FLUSH_TIME)


def _standard_error() -> int:
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError):  # replaced by something that is no file
        return 2


def _drop_line(count: int, processors: Sequence[structlog.typing.Processor]) -> bytes:
    event: Any = {"event": "log-lines-dropped", "count": count}
    for processor in processors:
        event = processor(None, "warning", event)
    return _short_enough(str(event).encode("utf-8", "backslashreplace")) + b"\n"


def _bind(bound: dict[str, Any]) -> structlog.typing.Processor:
    def bind(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for key, value in bound.items():
            event.setdefault(key, value)
        return event

    return bind


def _cut(logger: Any, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for key, value in event.items():
        if isinstance(value, str) and len(value) > MAX_FIELD:
            event[key] = _without_middle(value, MAX_FIELD)
    return event


def _fitting(render: structlog.typing.Processor) -> structlog.typing.Processor:
    """Render an event with its longest fields cut so far that its line is short enough."""

    def fit(logger: Any, method: str, event: structlog.typing.EventDict) -> Any:
        for shorter in _shorter(event):
            text = render(logger, method, dict(shorter))
            excess = _excess(text)
            if excess <= 0:
                return text
            longest = max(event, key=lambda name: len(str(event[name])))
            value = str(event[longest])
            if shorter is event and len(value) - excess > _HALF:  # one field alone is to blame
                text = render(logger, method, {**event, longest: _without_middle(value, len(value) - excess - 64)})
                if _excess(text) <= 0:
                    return text
        return text

    return fit


def _shorter(event: structlog.typing.EventDict) -> Iterator[structlog.typing.EventDict]:
    """Yield the event as it is, with all fields shorter and shorter, and at last with no more than what happened."""
    yield event
    longest = _HALF
    while longest >= _SHORTEST:
        yield {
            key: _without_middle(str(value), longest) if len(str(value)) > longest else value
            for key, value in event.items()
        }
        longest //= 2
    kept = {key: _without_middle(str(event[key]), _SHORTEST) for key in _ALWAYS if key in event}
    yield {**kept, "fields_cut": len(event) - len(kept)}


def _excess(text: Any) -> int:
    return len(str(text).encode("utf-8", "backslashreplace")) - (LINE_LIMIT - 1)


def _without_middle(text: str, keep: int) -> str:
    """Return ``text`` in about ``keep`` characters: of a traceback both the beginning and the end tell something."""
    mark = f" … {len(text) - keep} characters cut … "
    if len(text) <= keep + len(mark):
        return text
    head = keep // 3
    return text[:head] + mark + text[len(text) - keep + head :]


def _short_enough(line: bytes) -> bytes:
    """Cut what is still too long, as a form for people may be."""
    if len(line) < LINE_LIMIT:
        return line
    mark = f" … {len(line)} bytes".encode()
    return line[: LINE_LIMIT - 1 - len(mark)].decode("utf-8", "ignore").encode() + mark
