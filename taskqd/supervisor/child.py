"""The supervisor's view of one process: its slot, its link, what it last said."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

from taskqd.health.canary import split_words
from taskqd.health.lines import PROTOCOL_VERSION, LineProtocol, Message
from taskqd.supervisor.capture import Capture
from taskqd.supervisor.events import Beat, Broken, Event, Progress, Ready
from taskqd.supervisor.memory import Held
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.reaper import kill_group
from taskqd.supervisor.slot import Slot, Timing
from taskqd.supervisor.spawn import Forked, NewProcess
from taskqd.supervisor.stopping import Deadlines

_DUMP_LIMIT = 64 * 1024

_DUMP_KEPT, _DUMP_MOST = 2**20, 2**24
"""Bytes of what was read already from which on a process's file is emptied: when it is quiet, and in any case."""

_LAST_WORDS = ("Traceback (most recent call last)", "Fatal Python error")
"""What a process shows when it dies: of an exception that nobody caught, of a fault in C."""

DUMP_PAUSE = 0.1
"""Seconds without more of a process's stacks after which they are whole."""


class Child:
    """One slot of the group and the process in it, if any. ``on_event`` is given what the process says."""

    def __init__(
        self,
        spec: ChildSpec,
        index: int,
        timing: Timing,
        on_event: Callable[[Child, Event], None],
        *,
        generation: int = 1,
    ) -> None:
        self.spec = spec
        self.index = index
        self.generation = generation
        """Which state of the group it was made for: 1 at the start, one more with each reload and restart."""
        self.quiet = False
        """It was asked to claim nothing for now."""
        self.drained = False
        """An operator asked it to end and has not resumed it."""
        self.health_socket = ""
        """Where its present process answers probes."""
        self.moved = asyncio.Event()
        """Set whenever its slot enters another state."""
        self.slot = Slot(f"{spec.name}.{index}", timing)
        self.deadlines: Deadlines | None = None
        """What it was told when it was asked to stop."""
        self.beat: Message = {}
        """Its last beat."""
        self.beat_at: float | None = None
        self.reloads = False
        """It can take a new credential in place."""
        self.left_nothing = False
        """It said goodbye and held no jobs."""
        self.stopped = False
        """A signal or a debugger holds it."""
        self.has_canary = False
        """A thread of it speaks up when its event loop is silent."""
        self.verdict: str | None = None
        """What it suffers from, if that is known."""
        self.capture: Capture | None = None
        """Reads what its processes print, if anybody here does."""
        self.held: Held | None = None
        """The memory that it holds, when it was last measured."""
        self.shown = 0
        """Characters of stacks that the processes of this slot have shown so far; see :meth:`shown_since`."""
        self._last_shown = ""
        self._greeted = False
        self._word = 0
        self._shown_since_beat = False
        self._grew_at = 0.0
        self._unread = ""
        self._said = ""
        self._left = ""
        self.forked = False
        """It was forked from a process that had imported its actors."""
        self._asked: dict[int, asyncio.Future[Message | None]] = {}
        self._numbers = itertools.count(1)
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._lines: LineProtocol | None = None
        self._dump: int | None = None
        self._read_to = 0

    @property
    def name(self) -> str:
        """``worker-name.index``."""
        return self.slot.name

    async def adopt(self, new: NewProcess) -> None:
        """Take over the process that was just made for this slot. It may end while this connects its link."""
        self._process, self._dump = new.process, new.dump
        self.forked = isinstance(new.process, Forked)
        self.beat, self.beat_at, self._said, self._left = {}, None, "", ""
        self.stopped, self.has_canary, self.verdict, self.held = False, False, None, None
        self._word, self._unread, self._read_to = 0, "", 0
        self.left_nothing, self.reloads, self._greeted = False, False, False
        self._lines = lines = LineProtocol(self._receive, self._link_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: lines, sock=new.link)
        if self.quiet:
            lines.send({"op": "quiet"})

    def bury(self, code: int) -> None:
        """Forget the process, which ended with ``code``."""
        if self._lines is not None:
            self._lines.read_rest()  # that it has left nothing behind, for one
        self.stopped, self.verdict = False, None
        self._left = self.read_dump(at_end=True)
        if self.capture is not None:
            self.capture.finish()
        if self._process is not None:
            self._process.returncode = code  # it was waited for elsewhere; Popen must not try
            self._process = None
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        if self._dump is not None:
            os.close(self._dump)
            self._dump = None

    @property
    def said_goodbye(self) -> bool:
        """It had told that it would end."""
        return bool(self._said)

    def last_words(self) -> dict[str, str | None]:
        """Return why the process said it would end, the stacks or the traceback that it left, what it printed last."""
        printed = None if self.capture is None else self.capture.tail() or None
        return {"said": self._said or None, "left": self._left or None, "output": printed}

    @property
    def shows(self) -> bool:
        """It has written stacks that nobody has read yet."""
        return bool(self._unread)

    def read_dump(self, *, at_end: bool = False) -> str:
        """Return the stacks that the process has written since the last call, once they are whole.

        They are when no more of them came for a moment, or the process has ended. What it dies of is told with its
        end, however long that takes.
        """
        self.look_for_words()
        whole = time.monotonic() - self._grew_at >= DUMP_PAUSE
        if not at_end and (not whole or any(mark in self._unread for mark in _LAST_WORDS)):
            return ""
        text, self._unread = self._unread.strip(), ""
        return text

    def look_for_words(self) -> None:
        """Read what the process has written beside its messages: its stacks are kept for :meth:`read_dump`."""
        raw = self._read_on()
        if not raw:
            return
        text, words = split_words(raw.decode("utf-8", "backslashreplace"))
        shown_before = self._shown_since_beat
        for beat, came_first in words.items():
            if came_first and not shown_before:
                self._word = beat
        if text.strip():
            self._shown_since_beat = True
            self._grew_at = time.monotonic()
            self.shown += len(text)
            self._last_shown = (self._last_shown + text)[-_DUMP_LIMIT:]
            self._unread = (self._unread + text)[-_DUMP_LIMIT:]

    def _read_on(self) -> bytes:
        """Return what the process has written since the last call, the last of it where it is too much.

        It may be writing just now, so that its file is not emptied after each call: what came in between would be lost.
        """
        if self._dump is None:
            return b""
        size = os.fstat(self._dump).st_size
        begin = max(self._read_to, size - _DUMP_LIMIT)
        raw = os.pread(self._dump, size - begin, begin)
        self._read_to = begin + len(raw)
        if self._read_to > (_DUMP_MOST if raw else _DUMP_KEPT):
            os.ftruncate(self._dump, 0)
            self._read_to = 0
        return raw

    def shown_since(self, mark: int) -> str:
        """Return the stacks that were shown since ``shown`` was ``mark``."""
        return self._last_shown[-(self.shown - mark) :].strip() if self.shown > mark else ""

    @property
    def spoke_up(self) -> bool:
        """A thread of it has said that the event loop is silent since its last beat."""
        number = self.beat.get("seq", 0)
        return isinstance(number, int) and 0 < self._word >= number

    def ask_to_drain(self, reason: str, *, recycle: bool) -> None:
        """Send the deadlines over the link; with ``recycle`` a process that ends well ends with 75.

        SIGTERM only where nobody reads the link yet or any more: sent beside the message it may arrive when
        the process has drained already and no longer handles it, and what ended well would look killed.
        """
        times = self.deadlines
        if times is None:
            return
        told = self._lines is not None and self._lines.send(
            {
                "op": "drain",
                "cancel_ns": int(times.cancel * 1e9),
                "force_ns": int(times.force * 1e9),
                "deadline_ns": int(times.gone * 1e9),
                "reason": reason,
                "recycle": recycle,
            }
        )
        if not told or self.slot.ready_at is None:
            self.send_signal(signal.SIGTERM)

    async def ask(self, op: str, timeout: float, **fields: object) -> Message | None:
        """Send a request and return its answer, or None when none came within ``timeout`` seconds."""
        number = next(self._numbers)
        answer: asyncio.Future[Message | None] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            if self._lines is None or not self._lines.send({"op": op, "id": number, **fields}):
                return None
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._asked[number]

    def set_quiet(self, quiet: bool) -> None:
        """Ask the process, and every one that follows it here, to claim nothing; or to claim again."""
        self.quiet = quiet
        if self._lines is not None:
            self._lines.send({"op": "quiet" if quiet else "resume"})

    async def moves(self, within: float | None) -> None:
        """Return when the slot enters another state, or ``within`` seconds have passed."""
        self.moved.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self.moved.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL to its whole group."""
        pid = self.slot.pid
        if pid is None:
            return
        if number is signal.SIGKILL:
            kill_group(pid)
            return
        # Not reaped yet, so the number is still this process's; one that changed its user cannot be
        # signalled.
        with contextlib.suppress(PermissionError):
            os.kill(pid, number)
            if self.stopped and number is signal.SIGABRT:
                os.kill(pid, signal.SIGCONT)  # it shows its stacks only when it runs

    @property
    def worker_id(self) -> str | None:
        """What the rows that it claims name; None before its first beat, and for what claims nothing."""
        found = self.beat.get("worker_id")
        return found if isinstance(found, str) else None

    @property
    def zygote(self) -> int | None:
        """What its isolated jobs are forked from, where there are any; it ends after the worker and all of them."""
        found = self.beat.get("zygote")
        return found if isinstance(found, int) else None

    def database_age(self) -> float | None:
        """Return the seconds since the database last answered it, or None when it did not say."""
        age = self.beat.get("db_ok_age_ms")
        return age / 1000 if isinstance(age, int | float) else None

    def status(self, now: float) -> dict[str, Any]:
        """Return what a person wants to know about this process."""
        slot = self.slot
        end = slot.last_exit
        return {
            "name": self.name,
            "role": self.spec.role,
            "state": str(slot.state),
            "for_s": round(now - slot.since, 1),
            "pid": slot.pid,
            "made_by": "fork" if self.forked else "exec",
            "generation": self.generation,
            "quiet": self.quiet,
            "drained": self.drained,
            "restarts": slot.restarts,
            "degraded": slot.degraded,
            "last_exit": None if end is None else {"code": end.code, "class": str(end.kind), "why": end.why},
            "beat_age_s": None if self.beat_at is None else round(now - self.beat_at, 1),
            "beat": {key: value for key, value in self.beat.items() if key != "op"},
            "stopped": self.stopped,
            "verdict": self.verdict,
            "recycled": slot.recycled,
            "private_bytes": None if self.held is None else self.held.private,
            "queues": list(self.spec.queues),
            "credentials_age_s": self.beat.get("credential_age_s"),
            "credentials_stale": self.beat.get("credentials_stale"),
        }

    def _receive(self, message: Message) -> None:
        match message["op"]:
            case "hello" if message.get("v") != PROTOCOL_VERSION:
                self._on_event(self, Broken(f"it speaks version {message.get('v')!r} of the control protocol"))
            case "hello" if (message.get("name"), message.get("index")) != (self.spec.name, self.index):
                called = f"{message.get('name')}.{message.get('index')}"
                self._on_event(self, Broken(f"it takes itself for {called[:80]}"))
            case "hello":
                self._greeted = True
                self.has_canary = message.get("canary") is True
                self.reloads = message.get("reloads") is True
            case op if not self._greeted:
                self._on_event(self, Broken(f"it said {op[:80]!r} before hello"))
            case "beat":
                self.beat, self.beat_at = message, time.monotonic()
                self._shown_since_beat = False
                self._on_event(self, Beat())
            case "ready":
                self._on_event(self, Ready())
            case "boot":
                self._on_event(self, Progress())
            case "bye":
                self._said = str(message.get("reason", ""))[:500]
                self.left_nothing = message.get("held") == 0
            case "released" | "reloaded":
                number = message.get("id")
                answer = self._asked.get(number) if isinstance(number, int) else None
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case _:
                pass  # a newer child may say more than this version knows

    def _link_lost(self, reason: str) -> None:
        # Usually the process has ended, which the reaper tells. Garbage means that it cannot be watched any
        # more.
        if reason != "closed" and self.slot.pid is not None:
            self._on_event(self, Broken(f"its control link broke: {reason}"))
