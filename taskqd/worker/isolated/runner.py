"""Runs isolated attempts: the worker's side of their processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol
from uuid import UUID

import asyncpg

from taskqd.actors.progress import Progress
from taskqd.domain.errors import (
    ActorProcessDied,
    RegistryError,
    SubEnqueueError,
    TaskQError,
)
from taskqd.domain.signals import CancelOrigin
from taskqd.health.lines import encode
from taskqd.observe.logs import get_logger
from taskqd.settings import Settings
from taskqd.worker.attempt import Attempt
from taskqd.worker.isolated.frames import Garbled, pack, receive
from taskqd.worker.isolated.launch import Launched
from taskqd.worker.isolated.session import Session
from taskqd.worker.isolated.statements import Lender, describe
from taskqd.worker.isolated.told import outcome_of
from taskqd.worker.outcome import Outcome

ANSWER_TIME = 2.0
"""Seconds in which a process must say that it has cancelled its actor; it is killed when it does not."""
EXIT_TIME = 5.0
"""Seconds that a process may take to end once its outcome is told."""
LAST_WORDS_TIME = 2.0
"""Seconds to read what a process has said before it ended."""
FORK_TIME = 10.0
IMPORT_TIME = 120.0
END_TIME = 3.0

_log = get_logger("taskqd.isolation")


class ProgressBook(Protocol):
    """Where the progress of attempts is kept."""

    def open(self, attempt: Attempt) -> Progress:
        """Return the progress of an attempt."""
        ...


class Isolation:
    """Runs attempts in processes that ``zygote`` forks.

    ``orders`` is what a process has to know besides its attempt. ``pool`` is lent to them, ``wake()`` wakes sleeping
    workers.
    """

    def __init__(
        self,
        zygote: Launched,
        progress: ProgressBook,
        pool: Any,
        wake: Callable[[], None],
        orders: Mapping[str, Any],
        *,
        cleanup_grace: float,
        result_max_bytes: int,
    ) -> None:
        self._zygote = zygote
        self._progress = progress
        self._pool = pool
        self._wake = wake
        self._orders = orders
        self._cleanup_grace = cleanup_grace
        self._result_max_bytes = result_max_bytes
        self._on_lost: Callable[[], None] = _nothing
        self._sessions: dict[int, Session] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._number = 0
        self._text = b""
        self._forking = asyncio.Lock()
        self._forked: asyncio.Future[str] | None = None
        self._asked = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = False
        """True once the zygote is gone: nothing isolated can run here any more."""
        self._closing = False

    async def start(self, on_lost: Callable[[], None]) -> None:
        """Wait until processes can be forked; ``on_lost()`` is called when the zygote has ended by itself.

        Raises ``RegistryError`` where a fork is not safe.
        """
        self._on_lost = on_lost
        asyncio.get_running_loop().add_reader(self._zygote.link, self._receive)
        if self._zygote.forked:
            return
        try:
            async with asyncio.timeout(IMPORT_TIME):
                await self._ready
        except TimeoutError:
            raise RegistryError(f"the actors were not imported a second time within {IMPORT_TIME:g} s") from None

    async def close(self) -> None:
        """End every process and the zygote, and wait until they are gone."""
        self._closing = True
        asyncio.get_running_loop().remove_reader(self._zygote.link)
        self._zygote.link.close()
        deadline = time.monotonic() + END_TIME
        while not self.lost and time.monotonic() < deadline:
            if _has_ended(self._zygote.pid):
                return
            await asyncio.sleep(0.002)

    async def wait_idle(self, timeout: float) -> None:
        """Wait until no attempt runs, for at most ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()

    @property
    def pid(self) -> int:
        """That of the zygote's warden. It ends after everything that was forked."""
        return self._zygote.pid

    # -- one attempt --------------------------------------------------------------------------------

    async def run(self, attempt: Attempt, limit: float | None) -> Outcome | BaseException:
        """Run one attempt, ``limit`` seconds at most, and return its outcome or what to make one of.

        Returns when nothing of its process is left. Of an overdue one that is ``Overran``, of one that was killed
        because it had been asked to stop ``CancelledError``.
        """
        loop = asyncio.get_running_loop()
        self._number += 1
        session = Session(attempt, self._number, loop.create_future(), Lender(self._pool))
        self._sessions[session.number] = session
        self._idle.clear()
        try:
            ours = await self._fork(session)
            reader, session.writer = await asyncio.open_unix_connection(sock=ours)
            self._send_order(session)
            listening = self._task(session, self._listen(session, reader))
            self._task(session, self._pass_cancellation(session))
            if limit is not None:
                session.timers.append(loop.call_later(limit, self._overdue, session, limit))
            await asyncio.wait([session.ended])
            await asyncio.wait([listening], timeout=LAST_WORDS_TIME)
        except OSError as error:
            return ActorProcessDied(f"no process could be made for the actor: {error.strerror or error}")
        finally:
            try:
                await self._leave(session)
            finally:
                del self._sessions[session.number]
                if not self._sessions:
                    self._idle.set()
        return session.end()

    def force(self, attempt: Attempt) -> None:
        """Cancel the actor, a plain function by SIGTERM, and kill its process after the cleanup grace."""
        for session in self._sessions.values():
            if session.attempt is attempt:
                self._force(session)

    def kill(self, attempt: Attempt) -> None:
        """Kill the process of an attempt, and all that it has started."""
        for session in self._sessions.values():
            if session.attempt is attempt:
                self._kill(session)

    async def _fork(self, session: Session) -> socket.socket:
        """Have the process made and return the link to it. Raises ``OSError``."""
        async with self._forking:
            if self.lost or self._closing:
                raise ConnectionError(0, "the one that it is forked from has ended")
            ours, theirs = socket.socketpair()
            self._forked, self._asked = asyncio.get_running_loop().create_future(), session.number
            order = {"op": "fork", "number": session.number, "memory_limit": session.attempt.ref.memory_limit}
            try:
                socket.send_fds(self._zygote.link, [encode(order)], [theirs.fileno()])
                try:
                    async with asyncio.timeout(FORK_TIME):
                        why = await self._forked
                except TimeoutError:
                    why = f"none was made within {FORK_TIME:g} s"
                if why:
                    raise ConnectionError(0, why)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()  # the end of the process is the end of its messages
        if session.stopped:  # before there was anything to stop
            self._kill(session)
        return ours

    def _send_order(self, session: Session) -> None:
        assert session.writer is not None  # noqa: S101 - just made
        attempt = session.attempt
        told = {
            "job_id": attempt.job_id,
            "epoch": attempt.epoch,
            "payload": attempt.payload,
            "number": attempt.number,
            "queue": attempt.queue,
            "scheduled_at": attempt.scheduled_at,
            "batch_id": attempt.batch_id,
            "progress_stored": attempt.progress_stored,
            "progress_seq": attempt.progress_seq,
        }
        session.writer.write(pack({"op": "run", "actor": attempt.ref.name, "attempt": told, **self._orders}))

    def _task(self, session: Session, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"isolated-{session.attempt.job_id}")
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)
        return task

    async def _leave(self, session: Session) -> None:
        for timer in session.timers:
            timer.cancel()
        if not session.ended.done():
            self._kill(session)
        tasks = list(session.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        if session.writer is not None:
            session.writer.close()
        try:
            async with asyncio.timeout(LAST_WORDS_TIME):
                await session.lender.close()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # the pool makes a new session
            _log.warning("lent-session-lost", job_id=str(session.attempt.job_id), error=type(error).__name__)

    # -- its end ------------------------------------------------------------------------------------

    def _overdue(self, session: Session, limit: float) -> None:
        if session.outcome is not None or session.ended.done():
            return
        session.overdue = limit
        session.attempt.cancellation.request(CancelOrigin.TIMEOUT)
        self._force(session)

    def _force(self, session: Session) -> None:
        if session.stopped or session.outcome is not None:
            return
        session.stopped = True
        loop = asyncio.get_running_loop()
        if session.attempt.ref.is_sync:
            self._ask(op="term", number=session.number)
        elif session.writer is not None:
            session.writer.write(pack({"op": "force"}))
            session.answer_by = loop.call_later(min(ANSWER_TIME, self._cleanup_grace), self._kill, session)
            session.timers.append(session.answer_by)
        session.timers.append(loop.call_later(self._cleanup_grace, self._kill, session))

    def _kill(self, session: Session) -> None:
        session.stopped = True
        self._ask(op="kill", number=session.number)

    def _ask(self, **message: object) -> None:
        try:
            self._zygote.link.send(encode(message))
        except OSError as error:  # it has ended, and they with it; or it hangs, which nothing but its end can help
            if not self.lost and not self._closing:
                _log.error("isolation-zygote-hangs", error=type(error).__name__)
                os.kill(self._zygote.pid, signal.SIGTERM)  # its warden kills it, and everything else

    async def _pass_cancellation(self, session: Session) -> None:
        await session.attempt.cancellation.event.wait()
        if session.writer is not None and session.attempt.cancellation.origin is not None:
            session.writer.write(pack({"op": "cancel", "origin": session.attempt.cancellation.origin}))

    # -- what its process says ----------------------------------------------------------------------

    async def _listen(self, session: Session, reader: asyncio.StreamReader) -> None:
        try:
            while session.outcome is None and (message := await receive(reader)) is not None:
                self._take(session, message)
        except (Garbled, TaskQError, ValueError, TypeError, LookupError) as error:
            session.fault = str(error)[:500] or type(error).__name__
            self._kill(session)

    def _take(self, session: Session, message: dict[str, Any]) -> None:
        match message["op"]:
            case "outcome":
                session.outcome = outcome_of(session.attempt, message, self._result_max_bytes)
                session.timers.append(asyncio.get_running_loop().call_later(EXIT_TIME, self._kill, session))
            case "progress":
                state = message["state"]
                values = [state.get(name) for name in ("step", "percent", "detail", "data")]
                self._progress.open(session.attempt).report(*values)
            case "forced":
                if session.answer_by is not None:
                    session.answer_by.cancel()
            case "wake":
                self._wake()
            case "sql" | "copy" | "acquire" | "release":
                self._task(session, self._lend(session, message))
            case other:
                raise Garbled(f"unknown op {other!r}")

    async def _lend(self, session: Session, message: dict[str, Any]) -> None:
        told = {"op": "answer", "number": message["number"]}
        answer = await session.lender.answer(message)
        try:
            data = pack({**told, **answer})
        except (TypeError, ValueError) as error:  # a value that has no form between processes
            data = pack({**told, "error": describe(SubEnqueueError(str(error)))})
        if session.writer is not None:
            session.writer.write(data)

    # -- what the zygote says -----------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            data = self._zygote.link.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._zygote_ended()
            return
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))

    def _hear(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "ready":
                self._ready.set_result(None)
            case "unfit":
                found = ", ".join(message["why"])
                why = f"isolation='process' needs a fork, which is not safe after the import of the actors: {found}"
                self._ready.set_exception(RegistryError(why))
            case "forked" | "failed":
                waited = self._forked is not None and not self._forked.done()
                if self._forked is not None and waited and message["number"] == self._asked:  # not one given up
                    self._forked.set_result(message.get("why", ""))
            case "ended":
                session = self._sessions.get(message["number"])
                if session is not None and not session.ended.done():
                    session.ended.set_result((message["status"], message["used"]))

    def _zygote_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._zygote.link)
        self.lost = True
        if not self._ready.done() and not self._zygote.forked:
            self._ready.set_exception(RegistryError("the process that isolated actors are forked from did not start"))
        if self._forked is not None and not self._forked.done():
            self._forked.set_result("the process that it is forked from has ended")
        for session in self._sessions.values():
            if not session.ended.done():
                session.ended.set_result((None, None))
        if not self._closing:
            _log.critical("isolation-zygote-ended", running=len(self._sessions))
            self._on_lost()


def orders_of(settings: Settings, worker_id: UUID) -> dict[str, Any]:
    """Return what every process of this worker has to know."""
    return {
        "progress_limit": settings.progress_data_max_bytes,
        "jobs": {
            "schema": settings.schema_name,
            "key_max_bytes": settings.idempotency_key_max_bytes,
            "max_backoff": settings.max_retry_backoff,
            "heartbeat_window": (2 * settings.heartbeat_interval, settings.lock_lease),
        },
        "consumers": {
            "worker_id": worker_id,
            "default_start_to_close": None,
            "cleanup_grace": settings.cleanup_grace_period,
            "result_max_bytes": settings.result_max_bytes,
            "message_max_chars": settings.exception_message_max_chars,
            "max_backoff": settings.max_retry_backoff,
        },
    }


def _nothing() -> None:
    """What is done when the zygote ends before the worker has begun."""


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
