"""The name of the schema that one installation lives in, and what is derived from it."""

from __future__ import annotations

import hashlib
import re

from taskqd.domain.errors import ConfigError
from taskqd.domain.names import SCHEMA_RULE, is_schema_name

_MAX_BYTES = 63


def check_schema_name(name: str) -> str:
    """Return ``name`` when it can name a schema of ours, else raise ``ConfigError`` that says what is allowed."""
    if not isinstance(name, str):
        raise ConfigError(f"schema = {name!r} must be text: {SCHEMA_RULE}")
    if is_schema_name(name):
        return name
    raise ConfigError(f"schema name {name!r} is invalid: allowed are {SCHEMA_RULE}{_suggestion(name)}")


def quote(name: str) -> str:
    """Return the checked schema name as a quoted SQL identifier."""
    return f'"{check_schema_name(name)}"'


def render(sql: str, schema: str) -> str:
    """Return ``sql`` with ``{schema}`` as the quoted identifier and ``{schema_literal}`` as a string literal.

    Other braces are left alone: array and JSON literals use them.
    """
    identifier = quote(schema)
    return sql.replace("{schema}", identifier).replace("{schema_literal}", f"'{schema}'")


def wake_channel(schema: str) -> str:
    """Return the NOTIFY channel on which the workers of ``schema`` are woken.

    Derived by hash: a channel name is cut at 63 bytes, and two long schema names must not meet there.
    """
    return "taskq_wake_" + hashlib.sha256(check_schema_name(schema).encode()).hexdigest()[:10]


def cancel_channel(schema: str) -> str:
    """Return the NOTIFY channel on which the workers of ``schema`` hear that running jobs were cancelled."""
    return "taskq_cancel_" + hashlib.sha256(check_schema_name(schema).encode()).hexdigest()[:10]


def _suggestion(name: str) -> str:
    fixed = re.sub(r"[^A-Za-z0-9_]+", "_", name)[:_MAX_BYTES].strip("_")
    fixed = re.sub(r"^(pg_+)+", "", fixed, flags=re.IGNORECASE)
    if not fixed or fixed.lower() == "information_schema":
        return ""
    if fixed[0].isdigit():
        fixed = f"_{fixed}"[:_MAX_BYTES]
    return f" (did you mean {fixed!r}?)"
