"""What the process of an attempt says of its actor, checked: it may be broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from taskqd.domain.errors import RecordedError
from taskqd.domain.retry import KINDS
from taskqd.domain.signals import MAX_DELAY
from taskqd.worker.attempt import Attempt
from taskqd.worker.isolated.frames import Garbled
from taskqd.worker.outcome import Failed, Outcome, Snoozed, Succeeded


def outcome_of(attempt: Attempt, told: Mapping[str, Any], result_max_bytes: int) -> Outcome | BaseException:
    """Return what the process says of its actor. Raises ``Garbled`` for what cannot be."""
    seconds = time.monotonic() - (attempt.started_at or 0.0)
    match told["kind"]:
        case "Succeeded":
            result = _text(told["result"])
            if result is not None and len(result) > result_max_bytes:
                raise Garbled("a result larger than it may be")
            wanted = attempt.ref.hooks.on_success is not None
            return Succeeded(attempt, seconds, result, attempt.ref.decode_result(result) if wanted else None)
        case "Snoozed":
            return Snoozed(attempt, seconds, _delay(told["delay"]) or 0.0)
        case "Failed" if told["error_class"] != "CancelledError":
            error_class, message = str(told["error_class"]), str(told["message"])
            kind = told["retry_kind"]
            if kind is not None and kind not in KINDS:
                raise Garbled(f"unknown kind of retry {kind!r}")
            wanted = attempt.ref.hooks.on_retry_exhausted is not None
            return Failed(
                attempt,
                seconds,
                error_class,
                message,
                _text(told["traceback"]),
                kind,
                _delay(told["delay"]),
                _text(told["exhausted_class"]),
                RecordedError(error_class, message) if wanted else None,
            )
        case "Failed" | "Released":
            return asyncio.CancelledError(_text(told.get("message")) or "")
        case other:
            raise Garbled(f"unknown outcome {other!r}")


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Garbled("a field that is no text")
    return value


def _delay(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or not 0 <= value <= MAX_DELAY.total_seconds():
        raise Garbled(f"a delay of {value!r}")
    return float(value)
