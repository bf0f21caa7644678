"""Numbers that differ from process to process, for what must not happen everywhere at the same moment."""

from __future__ import annotations

import os


def jitter(low: float, high: float) -> float:
    """Return a number from ``low`` to ``high``. Never the same in two forks, and without the memory of ``random``."""
    return low + (high - low) * int.from_bytes(os.urandom(4), "little") / 0xFFFFFFFF
