"""Notices a worker whose every slot is held by a handler that nobody waits for any more."""

from __future__ import annotations

import time
from collections.abc import Callable

from taskqd.domain.background import BackgroundLoop, FailureHook
from taskqd.observe.logs import get_logger
from taskqd.worker.consumer import Consumers

LOOK_EVERY = 1.0

_log = get_logger("taskqd.worker")


class StuckWatch:
    """Calls ``on_stuck()`` once all slots have been held for ``patience`` seconds by attempts that were given up.

    Plain functions that outran their ``start_to_close``, as a rule, which nothing can interrupt: only the end of the
    process gives their slots back.
    """

    def __init__(
        self, consumers: Consumers, patience: float, on_stuck: Callable[[], None], on_failure: FailureHook
    ) -> None:
        self._consumers = consumers
        self._patience = patience
        self._on_stuck = on_stuck
        self._since: float | None = None
        self.loop = BackgroundLoop("stuck-watch", self._look, cadence=LOOK_EVERY, on_failure=on_failure)

    async def _look(self) -> None:
        if not self._consumers.all_given_up:
            self._since = None
            return
        now = time.monotonic()
        if self._since is None:
            self._since = now
        elif now - self._since >= self._patience and not self.loop.stopping:
            actors = sorted({attempt.ref.name for attempt in self._consumers.running})
            _log.critical("worker-stuck", actors=actors, slots=len(self._consumers.running))
            self._on_stuck()
            self._since = None
