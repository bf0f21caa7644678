"""A supervised child's link to its supervisor: beats up, stop requests down."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from taskqd.health.canary import Canary
from taskqd.health.child import can_leave_words, leave_word
from taskqd.health.lines import PROTOCOL_VERSION, LineProtocol, Message

BEAT_INTERVAL = 1.0
_EARLY = 0.05
"""A timer may fire so many seconds early; the beat that it is for is not made twice."""
_ORPHANED = 75


@dataclass(frozen=True, slots=True)
class Drain:
    """A request to stop. The times are absolute, in nanoseconds of ``CLOCK_MONOTONIC``, which all processes
    share.

    ``cancel_ns``: when to cancel what still runs. ``force_ns``: when to release what still runs.
    ``deadline_ns``: when the process must be gone; it is killed then. ``recycle``: it makes room for a fresh
    process, and ends with 75.
    """

    deadline_ns: int
    cancel_ns: int
    force_ns: int
    reason: str
    recycle: bool = False


def _is_socket(number: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except (OSError, OverflowError):
        return False


def _no_quiet(_quiet: bool) -> None:
    """What a process that claims nothing does about ``quiet``."""


Release = Callable[[list[UUID]], Awaitable[int]]
"""Settles what these dead workers held and returns how many rows it took back."""


Reload = Callable[[Mapping[str, Any] | None], Awaitable[list[dict[str, Any]]]]
"""Puts every session on the present credential and returns how that went for each pool and connection."""


def until_beat(now: float) -> float:
    """Return the seconds from ``now`` until a process beats again: a second, or just over.

    The clock is the one that all processes share: they beat at the same moment, and one waking of the supervisor
    serves all of them.
    """
    pause = BEAT_INTERVAL - now % BEAT_INTERVAL
    return pause if pause > _EARLY else pause + BEAT_INTERVAL


class ControlLink:
    """Pushes a beat each second from the event loop, so that a blocked loop is a missing beat.

    When the supervisor's end closes, the supervisor is gone and this process ends at once with 75: a
    successor may be starting the same worker.
    """

    def __init__(self, sock: socket.socket, *, name: str, index: int, role: str) -> None:
        self._socket = sock
        self._identity: Message = {"name": name, "index": index, "role": role}
        self._lines = LineProtocol(self._receive, self._lost)
        self._beat: Callable[[], dict[str, object]] = dict
        self._on_drain: Callable[[Drain], None] | None = None
        self._on_quiet: Callable[[bool], None] = _no_quiet
        self._on_release: Release | None = None
        self._on_reload: Reload | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._expected = 0.0
        self._sequence = 0
        self._canary = Canary(leave_word) if can_leave_words() else None

    @classmethod
    def from_environ(cls) -> ControlLink | None:
        """Return the link that the supervisor passed down, or None in a process that has no supervisor.

        A program that an actor starts inherits the environment but not the link: it gets None too.
        """
        number = int(os.environ.get("TASKQD_CONTROL_FD", "-1"))
        if not _is_socket(number):
            return None
        os.set_inheritable(number, False)
        return cls(
            socket.socket(fileno=number),
            name=os.environ.get("TASKQD_NAME", ""),
            index=int(os.environ.get("TASKQD_INDEX", "0")),
            role=os.environ.get("TASKQD_ROLE", "worker"),
        )

    async def start(
        self,
        beat: Callable[[], dict[str, object]],
        on_drain: Callable[[Drain], None],
        on_quiet: Callable[[bool], None] = _no_quiet,
        *,
        on_release: Release | None = None,
        on_reload: Reload | None = None,
    ) -> None:
        """Say hello and begin to beat.

        ``beat`` returns the fields of one beat and is called on the loop each second: it must be quick.
        ``on_drain`` may be called again with earlier times. ``on_quiet(True)`` asks to claim nothing more for
        now. ``on_release`` is asked to settle what dead workers held, ``on_reload`` to renew the
        credentials, from the source that it is given, if any.
        """
        self._beat, self._on_drain, self._on_quiet = beat, on_drain, on_quiet
        self._on_release, self._on_reload = on_release, on_reload
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        await loop.create_unix_connection(lambda: self._lines, sock=self._socket)
        canary = self._canary is not None
        says = {"pid": os.getpid(), "canary": canary, "reloads": on_reload is not None}
        self._lines.send({"op": "hello", "v": PROTOCOL_VERSION, **says, **self._identity})
        self._expected = time.monotonic()
        self._push()

    def send_progress(self, step: str) -> None:
        """Tell that booting goes on: renews the supervisor's boot deadline, up to its hard limit."""
        self._lines.send({"op": "boot", "step": step})

    def send_ready(self) -> None:
        """Tell that this process does its work now. Call it once."""
        self._lines.send({"op": "ready"})
        if self._canary is not None:  # only now: a thread that starts holds the boot up, and silence counts from here
            self._canary.start()

    def send_draining(self, phase: str, inflight: int) -> None:
        """Tell how far a stop has come."""
        self._lines.send({"op": "draining", "phase": phase, "inflight": inflight})

    async def close(self, reason: str, held: int = 0) -> None:
        """Say goodbye and stop beating; the process is about to end by itself, still holding ``held`` jobs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._canary is not None:
            self._canary.stop()
        for task in self._answering:
            task.cancel()
        self._lines.send({"op": "bye", "reason": reason, "held": held})
        self._lines.close()
        await asyncio.sleep(0)

    def _push(self) -> None:
        now = time.monotonic()
        lag_ms = max(0.0, now - self._expected) * 1000
        self._sequence += 1
        if self._canary is not None:
            self._canary.heard(self._sequence)
        message: Message = {"op": "beat", "seq": self._sequence, "lag_ms": round(lag_ms, 1)}
        try:
            message.update(self._beat())
        except Exception as error:
            # The loop lives, which is what a beat says; what failed is told in it and logged by the
            # supervisor.
            message["error"] = f"{type(error).__name__}: {error}"
        self._lines.send(message, droppable=True)
        pause = until_beat(now)
        self._expected = now + pause
        self._timer = asyncio.get_running_loop().call_later(pause, self._push)

    def _receive(self, message: Message) -> None:
        match message["op"]:
            case "drain" if self._on_drain is not None:
                self._on_drain(
                    Drain(
                        deadline_ns=int(message["deadline_ns"]),
                        cancel_ns=int(message["cancel_ns"]),
                        force_ns=int(message["force_ns"]),
                        reason=str(message["reason"]),
                        recycle=message.get("recycle") is True,
                    )
                )
            case "quiet":
                self._on_quiet(True)
            case "resume":
                self._on_quiet(False)
            case "release" if self._on_release is not None:
                workers = [UUID(text) for text in message["worker_ids"]]
                self._answer("released", message["id"], self._release(self._on_release(workers)))
            case "reload" if self._on_reload is not None and message.get("what") == "credentials":
                self._answer("reloaded", message["id"], self._reload(self._on_reload(message.get("source"))))
            case _:
                pass  # a newer supervisor may say more than this version knows

    def _answer(self, op: str, number: object, work: Coroutine[Any, Any, Message]) -> None:
        """Do ``work`` in the background and send what it returns, or why it failed."""

        async def answer() -> None:
            try:
                fields = await work
            except Exception as error:
                fields = {"error": f"{type(error).__name__}: {error}"}
            self._lines.send({"op": op, "id": number, **fields})

        task = asyncio.get_running_loop().create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    @staticmethod
    async def _release(work: Awaitable[int]) -> Message:
        return {"taken": await work}

    @staticmethod
    async def _reload(work: Awaitable[list[dict[str, Any]]]) -> Message:
        return {"results": await work}

    def _lost(self, _reason: str) -> None:
        os._exit(_ORPHANED)
