"""What JSON, or Postgres, would turn into something else: found before it is stored, not when it comes back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Secret, SecretBytes, SecretStr

from taskqd.domain.arguments import holds_nul
from taskqd.domain.errors import PayloadNotStorableError

_SURROGATE = re.compile(r"\\ud[89a-f]")
_MASK = "**********"
_NOT_FINITE = object()
_MAX_DIGITS = 4300
"""Digits of a whole number that Python reads."""
_TOO_LONG = object()
_LONG_NUMBER = re.compile(rf"[0-9]{{{_MAX_DIGITS + 1}}}")


def encode_object(name: str, value: Mapping[str, Any]) -> str:
    """Return the JSON text of a plain object. Raises ``PayloadNotStorableError`` for what Postgres cannot store of it;
    ``name`` is what the message calls it."""
    if not isinstance(value, Mapping):
        raise PayloadNotStorableError(f"{name} does not encode as JSON: {value!r} is no object, as a dict is")
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except RecursionError:
        raise PayloadNotStorableError(f"{name} is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise PayloadNotStorableError(f"{name} does not encode as JSON: {error}") from None
    if holds_nul(text) or (_SURROGATE.search(text) and not _pairs(text)):
        raise PayloadNotStorableError(f"{name} holds a NUL or a lone surrogate, which Postgres cannot store")
    return text


def _pairs(text: str) -> bool:
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def find_loss(text: str, dump: Callable[[], Any]) -> str:
    """Say what the JSON ``text`` does not keep of the value that ``dump`` returns as plain objects, ``""`` when it
    keeps all: pydantic writes NaN and infinity as null, secrets as asterisks, and whole numbers that nobody reads."""
    suspect = "null" in text or "NaN" in text or "Infinity" in text or _MASK in text
    if not suspect and not (len(text) > _MAX_DIGITS and _LONG_NUMBER.search(text)):
        return ""
    return _loss(dump(), json.loads(text, parse_constant=lambda _: _NOT_FINITE, parse_int=_whole))


def _whole(digits: str) -> object:
    return int(digits) if len(digits.removeprefix("-")) <= _MAX_DIGITS else _TOO_LONG


def _loss(value: Any, stored: Any) -> str:
    if stored is _TOO_LONG:
        return f"holds a whole number of more than {_MAX_DIGITS} digits, which cannot be read back; pass it as text"
    if isinstance(value, float):
        lost = not math.isfinite(value) and (stored is None or stored is _NOT_FINITE)
        return "holds NaN or infinity, which JSON cannot carry; use None instead" if lost else ""
    if isinstance(value, (SecretStr, SecretBytes, Secret)):
        return "holds a secret that pydantic masks in JSON; store a reference to it instead" if stored == _MASK else ""
    if isinstance(value, dict) and isinstance(stored, dict):
        pairs = zip(value.values(), stored.values(), strict=False)
    elif isinstance(value, (list, tuple, set, frozenset)) and isinstance(stored, list):
        pairs = zip(value, stored, strict=False)
    else:
        return ""
    return next((loss for pair in pairs if (loss := _loss(*pair))), "")
