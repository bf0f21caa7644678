"""Did-you-mean for every name a person may type."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or ``""`` when none is close."""
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f" (did you mean {lowered[matches[0]]!r}?)" if matches else ""
