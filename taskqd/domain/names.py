"""What names may look like, and did-you-mean for every name a person may type."""

from __future__ import annotations

import re
from collections.abc import Iterable

QUEUE_RULE = "1 to 200 letters, digits, '_', '.' or '-', starting with a letter or '_'"
SCHEMA_RULE = "1 to 63 letters, digits or '_', not starting with a digit, not 'pg_*' or 'information_schema'"

_QUEUE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_SCHEMA = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)


def is_queue_name(name: str) -> bool:
    """Whether ``name`` follows ``QUEUE_RULE``. A colon is left out: it separates the parts of our own keys."""
    return _QUEUE.fullmatch(name) is not None


def is_schema_name(name: str) -> bool:
    """Whether ``name`` follows ``SCHEMA_RULE``. It is always quoted, so its case is kept."""
    own = name.lower().startswith("pg_") or name.lower() == "information_schema"
    return _SCHEMA.fullmatch(name) is not None and not own


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or ``""`` when none is close."""
    from difflib import get_close_matches  # here: the supervisor has no use for it until a name is wrong

    lowered = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[matches[0]]!r}?)" if matches else ""
