"""The arithmetic of leases: how long one must be at least, and when it is renewed."""

from __future__ import annotations


def lease_floor(heartbeat_interval: float, command_timeout: float, max_failures: int) -> float:
    """Return the shortest lease, in seconds, that survives ``max_failures`` failed beats in a row.

    ``max(hb, cmd) + (n + 1) * (hb + cmd)``: 58 at the defaults of 10, 2 and 3.
    """
    beat = heartbeat_interval + command_timeout
    # Rounded, so that a lease written as the sum is not refused for the last bit of a binary fraction.
    return round(max(heartbeat_interval, command_timeout) + (max_failures + 1) * beat, 9)


def lease_threshold(lock_lease: float, heartbeat_interval: float, command_timeout: float, max_failures: int) -> float:
    """Return the remaining seconds at which a lease is renewed: the larger of half the lease and the floor."""
    return max(lock_lease / 2, lease_floor(heartbeat_interval, command_timeout, max_failures))
