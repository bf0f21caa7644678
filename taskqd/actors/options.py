"""The options that an actor declares and one enqueue may override, and what each may be."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from taskqd.domain.names import QUEUE_RULE, is_queue_name, nearest
from taskqd.domain.reservation import MAX_SLOTS, ConcurrencyReservation

MIN_PRIORITY, MAX_PRIORITY = -32768, 32767
MAX_LIMIT = timedelta(days=365)
MAX_RESERVATIONS = 16
ISOLATIONS = ("none", "process")
MIN_MEMORY = 16 * 1024 * 1024

Isolation = Literal["none", "process"]


def queue_problem(queue: object) -> str:
    """Say what is wrong with ``queue``, ``""`` when it may name one."""
    if isinstance(queue, str) and is_queue_name(queue):
        return ""
    return f"queue = {queue!r} must be {QUEUE_RULE}"


def priority_problem(priority: object) -> str:
    """Say what is wrong with ``priority``, ``""`` when nothing is."""
    whole = isinstance(priority, int) and not isinstance(priority, bool)
    if whole and MIN_PRIORITY <= priority <= MAX_PRIORITY:  # type: ignore[operator]
        return ""
    return f"priority = {priority!r} must be a whole number between {MIN_PRIORITY} and {MAX_PRIORITY}"


def limit_problem(name: str, limit: object) -> str:
    """Say what is wrong with a ``start_to_close`` or ``schedule_to_close``, ``""`` when nothing is."""
    if limit is None or (isinstance(limit, timedelta) and timedelta(0) < limit <= MAX_LIMIT):
        return ""
    return f"{name} = {limit!r} must be a timedelta above zero, up to {MAX_LIMIT.days} days"


def isolation_problem(isolation: object, memory_limit: object) -> str:
    """Say what is wrong with an ``isolation`` and its ``memory_limit``, ``""`` when nothing is."""
    if isolation not in ISOLATIONS:
        hint = nearest(isolation, ISOLATIONS) if isinstance(isolation, str) else ""
        return f"isolation = {isolation!r} must be 'none' or 'process'{hint}"
    if memory_limit is None:
        return ""
    if isolation != "process":
        return "memory_limit needs isolation='process': the memory of a worker is that of all its jobs"
    if isinstance(memory_limit, bool) or not isinstance(memory_limit, int) or memory_limit < MIN_MEMORY:
        return f"memory_limit = {memory_limit!r} must be a whole number of bytes, at least {MIN_MEMORY} (16 MiB)"
    return ""


def limits_problem(max_concurrent: object, reservations: object) -> str:
    """Say what is wrong with the limits of an actor, ``""`` when nothing is."""
    whole = isinstance(max_concurrent, int) and not isinstance(max_concurrent, bool)
    if max_concurrent is not None and not (whole and 0 <= max_concurrent <= MAX_SLOTS):  # type: ignore[operator]
        return f"max_concurrent = {max_concurrent!r} must be a whole number, 0 to {MAX_SLOTS}, or None for no limit"
    if not isinstance(reservations, tuple) or not all(isinstance(one, ConcurrencyReservation) for one in reservations):
        return f"reservations = {reservations!r} must be a tuple of ConcurrencyReservation"
    names = [one.name for one in reservations]
    if len(names) > MAX_RESERVATIONS or len(set(names)) < len(names):
        return f"reservations = {names!r} must be at most {MAX_RESERVATIONS} different names"
    return ""
