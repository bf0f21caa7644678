"""What a forked process does at first to be a process of its own."""

from __future__ import annotations

import random
import sys


def reseed() -> None:
    """Give a forked process random numbers of its own: siblings were copied with the same state."""
    random.seed()
    if "uuid_utils" in sys.modules:
        sys.modules["uuid_utils"].reseed_rng()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
