"""Messages between a worker and the process of one attempt: four bytes of length, then a JSON object."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

MAX_MESSAGE = 96 * 1024 * 1024
"""Bytes of the largest message: a batch of jobs, whose payloads may be 64 MiB together."""

_LENGTH = 4


class Garbled(ValueError):
    """What was received is no message."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return the bytes of a message. Raises ``ValueError`` when it is too large."""
    data = json.dumps(message, separators=(",", ":"), default=_tag).encode()
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(data)} bytes is more than {MAX_MESSAGE}")
    return len(data).to_bytes(_LENGTH, "big") + data


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, None at the end of the stream. Raises ``Garbled``."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        if length > MAX_MESSAGE:
            raise Garbled(f"a message of {length} bytes")
        message = json.loads(await reader.readexactly(length), object_hook=_untag)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise Garbled(f"{type(error).__name__}: {str(error)[:200]}") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise Garbled("JSON without an op")
    return message


def _tag(value: object) -> object:
    """What JSON has no form for."""
    match value:
        case UUID():
            return {"$": "uuid", "v": value.hex}
        case datetime():
            return {"$": "datetime", "v": value.isoformat()}
        case timedelta():
            return {"$": "timedelta", "v": [value.days, value.seconds, value.microseconds]}
        case bytes():
            return {"$": "bytes", "v": base64.b64encode(value).decode()}
        case Decimal():
            return {"$": "decimal", "v": str(value)}
    raise TypeError(f"a {type(value).__name__} cannot be sent between processes")


def _untag(value: dict[str, Any]) -> Any:
    match value.get("$"):
        case None:
            return value
        case "uuid":
            return UUID(value["v"])
        case "datetime":
            return datetime.fromisoformat(value["v"])
        case "timedelta":
            return timedelta(*value["v"])
        case "bytes":
            return base64.b64decode(value["v"])
        case "decimal":
            return Decimal(value["v"])
    raise ValueError("an unknown kind of value")
