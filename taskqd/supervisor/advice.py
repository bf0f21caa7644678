"""What to change in a workgroup that needs too many connections. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from taskqd.supervisor.fleet import Crew, Fleet


def advise(fleet: Fleet, over: int) -> tuple[str, ...]:
    """Return up to two changes, the one that costs the fewest job slots first, each freeing at least ``over``."""
    options = [
        option
        for crew in fleet.crews
        for option in (_fewer_slots(fleet, crew, over), _fewer_replicas(fleet, crew, over))
        if option is not None
    ]
    if options:
        return tuple(text for _, text in sorted(options)[:2])
    together = _scaled(fleet, over)
    return (together,) if together else ()


def _fewer_slots(fleet: Fleet, crew: Crew, over: int) -> tuple[int, str] | None:
    smaller = _largest_that_frees(fleet, over, crew.max_concurrency, lambda value: replace(crew, max_concurrency=value))
    return None if smaller is None else _option(fleet, crew, smaller, "max_concurrency")


def _fewer_replicas(fleet: Fleet, crew: Crew, over: int) -> tuple[int, str] | None:
    smaller = _largest_that_frees(fleet, over, crew.replicas, lambda value: replace(crew, replicas=value))
    return None if smaller is None else _option(fleet, crew, smaller, "replicas")


def _largest_that_frees(fleet: Fleet, over: int, now: int, changed: Callable[[int], Crew]) -> Crew | None:
    """Return the crew with the largest value below ``now`` that frees ``over``, or None when 1 does not."""
    low, high = 1, now - 1
    if high < low or _freed(fleet, changed(low)) < over:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if _freed(fleet, changed(middle)) >= over:
            low = middle
        else:
            high = middle - 1
    return changed(low)


def _option(fleet: Fleet, crew: Crew, smaller: Crew, knob: str) -> tuple[int, str]:
    before, after = getattr(crew, knob), getattr(smaller, knob)
    return crew.slots - smaller.slots, f"{crew.name}.{knob} {before}→{after} frees {_freed(fleet, smaller)}"


def _freed(fleet: Fleet, *smaller: Crew) -> int:
    return fleet.own - fleet.with_crews(*smaller).own


def _scaled(fleet: Fleet, over: int) -> str | None:
    """Return a change of every crew's concurrency to one ceiling, when no single crew can free enough."""
    largest = max((crew.max_concurrency for crew in fleet.crews), default=0)
    for ceiling in range(largest - 1, 0, -1):
        capped = [replace(crew, max_concurrency=min(crew.max_concurrency, ceiling)) for crew in fleet.crews]
        freed = _freed(fleet, *capped)
        if freed >= over:
            parts = [
                f"{crew.name}.max_concurrency {crew.max_concurrency}→{small.max_concurrency}"
                for crew, small in zip(fleet.crews, capped, strict=True)
                if small != crew
            ]
            return f"{', '.join(parts)} together free {freed}"
    return None
