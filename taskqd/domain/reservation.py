"""Named limits that several actors may share."""

from __future__ import annotations

from dataclasses import dataclass

from taskqd.domain.names import QUEUE_RULE, is_queue_name

MAX_SLOTS = 1_000_000


@dataclass(frozen=True, slots=True)
class ConcurrencyReservation:
    """At most ``slots`` jobs of all actors that name this reservation run at once, in the whole fleet.

    A claim takes a slot in its own transaction and the end of the attempt gives it back, so that the limit is never
    passed; a slot of a dead worker comes back with its job. ``name`` is 1 to 200 letters, digits, ``_ . -``, starting
    with a letter or ``_``; ``slots`` is 0 to 1,000,000, 0 lets nothing through. Where two actors declare different
    ``slots`` for one name the worker refuses to start; where two releases do, the worker that started last decides.

    Raises ``ValueError``.
    """

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not is_queue_name(self.name):
            raise ValueError(f"name = {self.name!r} of a ConcurrencyReservation must be {QUEUE_RULE}")
        whole = isinstance(self.slots, int) and not isinstance(self.slots, bool)
        if not whole or not 0 <= self.slots <= MAX_SLOTS:
            raise ValueError(
                f"slots = {self.slots!r} of reservation {self.name!r} must be a whole number, 0 to {MAX_SLOTS}"
            )
