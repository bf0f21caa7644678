"""What the process of one isolated attempt does: it runs the actor as a worker would, and tells the worker of it."""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import time
from dataclasses import fields
from typing import Any

import uvloop

from taskqd.actors.di.container import Container
from taskqd.actors.progress import Progress
from taskqd.actors.registry import Registry
from taskqd.client.enqueue import Enqueuer
from taskqd.client.jobs import Jobs
from taskqd.client.wake import Wakes
from taskqd.domain.signals import CancelOrigin
from taskqd.observe import logs
from taskqd.settings import Settings
from taskqd.storage.statements import load
from taskqd.worker.attempt import Attempt
from taskqd.worker.consumer import Consumers
from taskqd.worker.injection import Injection
from taskqd.worker.isolated.frames import pack, receive
from taskqd.worker.isolated.statements import LentPool, raise_answer
from taskqd.worker.outcome import Outcome
from taskqd.worker.slots import Slots

TELL_EVERY = 0.05
"""Seconds between two messages of progress."""
UNTOLD = ("attempt", "value", "error")
"""What of an outcome stays here: nothing but text and numbers is believed of a process that may be broken."""
_ORPHANED = 75


def run_attempt(link: socket.socket, registry: Registry, settings: Settings) -> None:
    """Run the one attempt that the worker sends over ``link``; return when its outcome is sent."""
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_Process(link, registry, settings).run())
    atexit._run_exitfuncs()
    logs.flush()


def warm_up(settings: Settings) -> None:
    """Do once, in the zygote, what every attempt would do at its start and leaves nothing behind."""
    load("client", settings.schema_name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.get_loop()


class _Consumer(Consumers):
    """The one consumer of this process; how long it may run is watched from outside."""

    def _limit(self, attempt: Attempt) -> float | None:
        return None

    def failed(self, attempt: Attempt, error: Exception) -> Outcome:
        """Return the outcome of an attempt whose actor could not be called."""
        attempt.started_at = time.monotonic()
        outcome = self.outcomes.failure(attempt, error)
        assert outcome is not None  # noqa: S101 - only a cancellation may have none
        return outcome


class _Process(Wakes):
    def __init__(self, link: socket.socket, registry: Registry, settings: Settings) -> None:
        self._socket = link
        self._registry = registry
        self._settings = settings
        self._done = asyncio.Event()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._untold = False
        self._size_limit = 0

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        order = await receive(self._reader)
        if order is None:
            os._exit(_ORPHANED)
        self._attempt = Attempt(ref=self._registry[order["actor"]], start_to_close=None, **order["attempt"])
        self._size_limit = order["progress_limit"]
        slots = Slots(1, lambda: None)
        this: Any = self  # it takes the outcome, as a completer does, and hands out the progress
        container = Container(self._registry.providers, {Settings: self._settings})
        self._consumers = _Consumer(
            slots,
            this,
            this,
            self._jobs(order["jobs"]),
            **order["consumers"],
            injection=Injection.of(self._registry, container, None),
        )
        listening = asyncio.create_task(self._listen(), name="worker-link")
        try:
            await container.open([self._attempt.ref])
        except Exception as error:
            self.submit(self._consumers.failed(self._attempt, error))
        else:
            self._consumers.start()
            slots.put([self._attempt])
        await self._done.wait()
        listening.cancel()
        self._writer.transport.set_write_buffer_limits(0)
        await self._writer.drain()
        await container.close()

    # -- what a consumer needs ----------------------------------------------------------------------

    def submit(self, outcome: Outcome) -> None:
        """Tell the worker what became of the attempt."""
        self._tell_progress()
        told = {field.name: getattr(outcome, field.name) for field in fields(outcome) if field.name not in UNTOLD}
        self._send(op="outcome", kind=type(outcome).__name__, **told)
        self._done.set()

    def open(self, attempt: Attempt) -> Progress:
        """Return the progress of the attempt, of which the worker is told."""
        if attempt.progress is None:
            attempt.progress = Progress(
                attempt.progress_stored, attempt.progress_seq, self._size_limit, self._progress_changed
            )
        return attempt.progress

    def request(self) -> None:
        """Ask for a wake-up of sleeping workers, as a ``WakeSender`` does."""
        self._send(op="wake")

    def _jobs(self, options: dict[str, Any]) -> Jobs:
        this: Any = self
        window = tuple(options.pop("heartbeat_window"))
        return Jobs(LentPool(self._call), Enqueuer(heartbeat_window=window, **options), this)

    # -- messages -----------------------------------------------------------------------------------

    def _send(self, **message: Any) -> None:
        self._writer.write(pack(message))

    async def _call(self, **message: Any) -> Any:
        self._number += 1
        number = self._number
        self._calls[number] = answered = self._loop.create_future()
        try:
            self._send(number=number, **message)
            answer = await answered
        finally:
            del self._calls[number]
        if "error" in answer:
            raise_answer(answer["error"])
        return answer["value"]

    async def _listen(self) -> None:
        while (message := await receive(self._reader)) is not None:
            if message["op"] == "cancel":
                self._attempt.cancellation.request(CancelOrigin(message["origin"]))
            elif message["op"] == "force":
                self._consumers.cancel(self._attempt)
                self._send(op="forced")
            elif (answered := self._calls.get(message["number"])) is not None and not answered.done():
                answered.set_result(message)
        os._exit(_ORPHANED)

    def _progress_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._tell_progress_soon)

    def _tell_progress_soon(self) -> None:
        if not self._untold:
            self._untold = True
            self._loop.call_later(TELL_EVERY, self._tell_progress)

    def _tell_progress(self) -> None:
        progress = self._attempt.progress
        if self._untold and progress is not None:
            self._untold = False
            self._send(op="progress", state=dict(progress.state))
