"""What a worker gives its actors beside their payload."""

from __future__ import annotations

import time
from dataclasses import dataclass

from taskqd.actors.di.container import Container
from taskqd.actors.registry import Registry
from taskqd.client.wake import Wakes
from taskqd.observe.logs import get_logger
from taskqd.worker.transactional import SlotTransactions

TOLD_EVERY = 3600.0
"""Seconds between two warnings that what actors enqueue is committed by itself."""

_log = get_logger("taskqd.worker")


@dataclass(frozen=True, slots=True)
class Injection:
    """The instances that actors depend on, and the transactions that some work in."""

    container: Container
    actors: frozenset[str]
    """The actors that are given something, or that work in a transaction; all others run without any of this."""
    transactional: frozenset[str]
    slots: SlotTransactions | None

    @classmethod
    def of(cls, registry: Registry, container: Container, slots: SlotTransactions | None) -> Injection | None:
        """Return what the actors of a registry need, None where they need nothing."""
        transactional = frozenset(name for name, ref in registry.items() if registry.runs_in_transaction(ref))
        actors = transactional.union(name for name, ref in registry.items() if ref.dependencies)
        return cls(container, actors, transactional, slots) if actors else None

    @property
    def transactions(self) -> SlotTransactions:
        """The transactions, for an actor that works in one."""
        assert self.slots is not None  # noqa: S101
        return self.slots


class AutonomousWake(Wakes):
    """Passes on the wake-ups of what actors enqueue outside any transaction of theirs, and says so now and then."""

    def __init__(self, wake: Wakes, registry: Registry) -> None:
        self._wake = wake
        self._tells = not registry.providers.is_transactional
        self._told = time.monotonic()

    def request(self) -> None:
        """See ``WakeSender.request``."""
        if self._tells and time.monotonic() - self._told > TOLD_EVERY:
            self._told = time.monotonic()
            tell_autonomous()
        self._wake.request()


def tell_autonomous() -> None:
    """Warn that a later failure of an actor takes back nothing that it enqueued."""
    _log.warning("sub_enqueue_autonomous_fallback", why="no asyncpg.Connection of LOOP scope is provided")


def announce(registry: Registry, slots: SlotTransactions | None) -> None:
    """Tell at the start which mode what actors enqueue is in, and of plain functions that share what is the loop's."""
    for name in registry.validate():
        _log.warning("sync_actor_loop_scoped_dependency", actor=name)
    if slots is not None:
        _log.info(
            "transactional_consume_per_slot",
            slot_pool_size=slots.pool.size,
            actors=sum(map(registry.runs_in_transaction, registry.values())),
        )
    if not registry.providers.is_transactional and any(ref.wants_ctx for ref in registry.values()):
        tell_autonomous()
