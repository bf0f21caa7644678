"""The zygote as the supervisor sees it: it imports the actors once, and workers are forked from it.

While there is none that may be forked, workers are started the other way, by exec, unless they ``require`` it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from taskqd.domain.exit_codes import ExitCode
from taskqd.health.lines import LINE_LIMIT, encode
from taskqd.supervisor.child import Child
from taskqd.supervisor.exits import classify
from taskqd.supervisor.fork_request import ForkRequest
from taskqd.supervisor.handover import FORK_TIMEOUT, GO
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.preload_phase import Phase, Way
from taskqd.supervisor.reaper import Reaper, kill_group
from taskqd.supervisor.spares import Spare, Spares
from taskqd.supervisor.spawn import Forked, NewProcess, dump_file, spawn

_PR_SET_CHILD_SUBREAPER = 36
_IMPORT_TIMEOUT = 120.0
_ANSWER_TIMEOUT = FORK_TIMEOUT + 1.0
_BACKOFF_MAX = 60.0
_ATTEMPTS = 3
_STABLE_AFTER = 10.0
_FORK_PAUSE = 10.0
_SHORTLY = 2.0


ZygoteCommand = Callable[[Sequence[str]], list[str]]


def unfit_because(registries: Sequence[str], found: Sequence[str]) -> str:
    """Say what was found after the import of ``registries`` that makes a fork unsafe."""
    return f"a fork is not safe after the import of {', '.join(registries)}: {', '.join(found)}"


def zygote_command(registries: Sequence[str]) -> list[str]:
    """Return the command of the zygote that imports ``registries``."""
    return [sys.executable, "-P", "-m", "taskqd.cli.zygote", *registries]


class Preload:
    """Keeps a zygote for the workers that may be forked from one."""

    def __init__(
        self,
        *,
        reaper: Reaper,
        journal: Journal,
        command: ZygoteCommand = zygote_command,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called when workers may be started that had to wait."""
        self.workers: list[str] = []
        """Who is forked from it."""
        self._registries: Sequence[str] = ()
        self._environment: Mapping[str, str] = {}
        self._patient = True
        self._reaper = reaper
        self._journal = journal
        self._command = command
        self._phase = Phase.OFF
        self._why = ""
        self._untold: dict[str, str | None] = {}
        self._no_fork_until = 0.0
        self._zygote: NewProcess | None = None
        self._deadline: float | None = None
        self._starts = 0
        self._failures = 0
        self._ready_at: float | None = None
        self._text = b""
        self._request: ForkRequest | None = None
        self._made: list[tuple[Child, NewProcess | str]] = []
        self._spares = Spares(reaper, self._notice_end)
        self._spare_by: float | None = None
        """When the spare that was asked for must be there."""
        self._latest: int | None = None
        """The last process that was forked from the present one."""
        self._passed: list[int] = []
        """Descriptors that came with what was not read yet."""
        self._import_s: float | None = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._count = {Way.FORK: 0, Way.EXEC: 0}

    def start(self, registries: Sequence[str], environment: Mapping[str, str], workers: Sequence[str]) -> None:
        """Start a zygote that imports ``registries`` in ``environment``, for ``workers``. One that exists is replaced.

        What it forks comes to this process, which must be the parent in the end.
        """
        self._registries, self._environment, self.workers = registries, environment, list(workers)
        self._phase, self._patient, self._failures, self._ready_at = Phase.OFF, True, 0, None
        self._forget_request()
        self._forget_made()
        self._spares.drop()
        if self._zygote is not None:
            kill_group(self._zygote.process.pid)
        if sys.platform != "linux":
            self._unfit(f"{sys.platform} cannot hand a forked process over")
            return
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            self._unfit(f"this system cannot hand a forked process over: {os.strerror(ctypes.get_errno())}")
            return
        self._launch()

    def end(self) -> None:
        """Fork nothing more. What was forked goes on."""
        self._registries, self._phase, self._untold = (), Phase.OFF, {}
        self._forget_request()
        self._forget_made()
        self._spares.drop()
        if self._zygote is not None:
            kill_group(self._zygote.process.pid)

    async def stop(self) -> None:
        """End, and return when the zygote is gone, and the process that it laid in."""
        self.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHORTLY):
                await self._ended.wait()

    def tick(self, now: float) -> None:
        """Start a zygote that is due, end one that is overdue."""
        if self._untold:  # only now: when the check before the start fails for the same reason, it has told already
            self._journal.tell("preload-unfit", "warning", workers=self.workers, **self._untold)
            self._untold = {}
        if self._phase is Phase.DOWN and self._deadline is not None and now >= self._deadline:
            self._launch()
        elif self._zygote is not None and self._is_overdue(now):
            self._give_up(self._zygote)

    def way(self, spec: ChildSpec) -> Way:
        """Return how a process of ``spec`` is to be started now."""
        if spec.preload == "off" or self._phase is Phase.OFF:
            return Way.EXEC
        if self._phase is Phase.READY and time.monotonic() < self._no_fork_until:
            return Way.WAIT if spec.preload == "require" else Way.EXEC
        if self._phase is Phase.READY:
            return Way.WAIT if self._request or self._spare_by is not None else Way.FORK
        if self._phase is Phase.UNFIT:
            return Way.NONE if spec.preload == "require" else Way.EXEC
        first = self._phase is Phase.IMPORTING and self._patient
        return Way.WAIT if first or spec.preload == "require" else Way.EXEC

    @property
    def wants_spare(self) -> bool:
        """It could lay in a process, and has none."""
        asked = self._request is not None or self._spare_by is not None
        able = self._phase is Phase.READY and time.monotonic() >= self._no_fork_until
        return able and not asked and not self._spares.present

    def lay_in(self, up: Collection[int]) -> None:
        """Have a process made before one is needed; those of the numbers ``up`` are ready."""
        self._spare_by = time.monotonic() + _ANSWER_TIMEOUT
        like = self._latest if self._latest in up else None
        self._send(encode({"op": "spare", "like": like}))

    def fork(self, child: Child, environment: Mapping[str, str], *, output: int | None = None) -> NewProcess | None:
        """Return a process for ``child`` that prints to ``output``, where one is laid in; else ask for one.

        Then :meth:`made` has it in a moment, or :meth:`way` changes. Raises ``OSError`` when the system refuses.
        """
        dump = dump_file()
        own = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        line = encode(
            {"op": "fork", "arguments": child.spec.arguments, "environment": own, "output": output is not None}
        )
        passed = [number for number in (output, dump) if number is not None]
        spare = self._spares.take(line, passed)
        if spare is not None:
            return NewProcess(Forked(spare.pid), spare.link, dump)
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            if dump is not None:
                os.close(dump)
            raise
        ours.setblocking(False)
        self._request = ForkRequest(child, ours, dump, time.monotonic() + _ANSWER_TIMEOUT)
        with theirs:
            self._send(line, theirs.fileno(), *passed)
        return None

    def made(self) -> list[tuple[Child, NewProcess | str]]:
        """Take what was forked since the last call, or why it was not."""
        made, self._made = self._made, []
        return made

    def release(self, child: Child, new: NewProcess) -> None:
        """Count a new process, and let a forked one go on, now that the supervisor watches it."""
        if child.spec.role == "worker":
            self._count[Way.FORK if isinstance(new.process, Forked) else Way.EXEC] += 1
        if isinstance(new.process, Forked):
            self._latest = new.process.pid
        if isinstance(new.process, Forked) and new.process.waits:
            with contextlib.suppress(OSError):  # it has ended, which the reaper tells
                new.link.send(GO)

    @property
    def ready_by(self) -> float | None:
        """When the import that goes on must be over, in monotonic seconds; None when none does."""
        return self._deadline if self._phase is Phase.IMPORTING else None

    def refusal(self, specs: Sequence[ChildSpec]) -> tuple[ExitCode, str] | None:
        """Return why the group cannot come up: a worker requires what is not to be had."""
        names = [spec.name for spec in specs if spec.preload == "require"]
        if not names:
            return None
        what = f'preload = "require" ({", ".join(dict.fromkeys(names))}): '
        if self._phase is Phase.UNFIT:
            return ExitCode.REFUSED, what + self.reason()
        if self._failures >= _ATTEMPTS and self._ready_at is None:
            return ExitCode.INTERNAL, f"{what}the process that imports the actors ended {self._failures} times"
        return None

    def reason(self) -> str:
        """Return why nothing may be forked, or an empty string."""
        return self._why if self._phase is Phase.UNFIT else ""

    def status(self) -> dict[str, Any]:
        """Return what a person wants to know about it."""
        return {
            "workers": self.workers,
            "state": str(self._phase),
            "why": self.reason() or None,
            "pid": None if self._zygote is None else self._zygote.process.pid,
            "import_s": self._import_s,
            "restarts": max(0, self._starts - 1),
            "forked": self._count[Way.FORK],
            "execed": self._count[Way.EXEC],
        }

    # -- the zygote's life --------------------------------------------------------------------------

    def _launch(self) -> None:
        self._starts += 1
        try:
            new = spawn(self._command(self._registries), self._environment)
        except OSError as error:
            self._down(error.strerror or str(error))
            return
        self._zygote, self._text, self._latest = new, b"", None
        self._phase, self._deadline = Phase.IMPORTING, time.monotonic() + _IMPORT_TIMEOUT
        self._ended.clear()
        self._reaper.watch(new.process.pid, lambda code: self._exited(new, code))
        asyncio.get_running_loop().add_reader(new.link, self._receive, new)

    def _exited(self, new: NewProcess, code: int) -> None:
        self._receive(new)  # what it said last
        new.process.returncode = code  # it was waited for elsewhere; Popen must not try
        asyncio.get_running_loop().remove_reader(new.link)
        new.link.close()
        left = ""
        if new.dump is not None:
            left = os.pread(new.dump, 16 * 1024, 0).decode("utf-8", "backslashreplace").strip()
            os.close(new.dump)
        if self._zygote is not new:  # it was replaced
            return
        self._zygote = None
        self._forget_request()
        self._close_passed()
        self._spares.drop()
        self._notice_end()
        if self._registries and self._phase is not Phase.UNFIT:
            self._down(classify(code).why, left)

    def _notice_end(self) -> None:
        if self._zygote is None and not self._spares.any:
            self._ended.set()

    def _give_up(self, zygote: NewProcess) -> None:
        self._forget_request()
        self._phase, self._deadline = Phase.DOWN, None
        kill_group(zygote.process.pid)

    def _garbled(self, zygote: NewProcess) -> None:
        """Believe nothing more of one that does not speak as it should: somebody else writes on its link."""
        self._text = b""
        self._give_up(zygote)

    def _down(self, why: str, left: str = "") -> None:
        if self._ready_at is not None and time.monotonic() - self._ready_at >= _STABLE_AFTER:
            self._failures = 0
        self._failures += 1
        self._patient = False
        delay = min(_BACKOFF_MAX, 2.0 ** (self._failures - 1)) if self._failures > 1 else 0.0
        self._phase, self._deadline = Phase.DOWN, time.monotonic() + delay
        self._journal.tell("preload-died", "warning", workers=self.workers, why=why, retry_in=delay, left=left or None)
        self.on_change()

    def _unfit(self, why: str, trace: str = "") -> None:
        self._phase, self._why, self._deadline = Phase.UNFIT, why, None
        self._untold = {"why": why, "traceback": trace or None}
        self.on_change()

    def _is_overdue(self, now: float) -> bool:
        asked = None if self._request is None else self._request.deadline
        return any(limit is not None and now >= limit for limit in (self._deadline, asked, self._spare_by))

    def _send(self, line: bytes, *passed: int) -> None:
        assert self._zygote is not None  # noqa: S101 - it is ready
        try:
            sent = socket.send_fds(self._zygote.link, [line], passed)
        except OSError:
            sent = 0
        if sent != len(line):  # it reads nothing any more
            self._give_up(self._zygote)

    def _forget_request(self) -> None:
        self._spare_by = None
        if self._request is not None:
            self._request.drop()
            self._request = None

    def _forget_made(self) -> None:
        for _, made in self.made():
            if not isinstance(made, str):
                made.drop()

    def _close_passed(self) -> None:
        for number in self._passed:
            os.close(number)
        self._passed = []

    # -- what it says -------------------------------------------------------------------------------

    def _receive(self, new: NewProcess) -> None:
        while new is self._zygote:
            try:
                data, passed, _, _ = socket.recv_fds(new.link, 65536, 1, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(new.link)  # it is ending, which the reaper tells
                return
            self._passed += passed
            *lines, self._text = (self._text + data).split(b"\n")
            try:
                for line in lines:
                    self._take(new, json.loads(line))
            except (ValueError, LookupError, TypeError, RecursionError):
                self._garbled(new)
                return
            if len(self._text) > LINE_LIMIT:
                self._garbled(new)

    def _take(self, new: NewProcess, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case _ if not self._registries:
                self._close_passed()
                return
            case "ready":
                self._phase, self._deadline, self._ready_at = Phase.READY, None, time.monotonic()
                self._import_s = message["import_s"]
                pid, workers = new.process.pid, self.workers
                self._journal.tell("preload-ready", pid=pid, workers=workers, import_s=self._import_s)
            case "unfit":
                trace = message["traceback"]
                self._unfit(message["why"][0] if trace else unfit_because(self._registries, message["why"]), trace)
            case "spare":
                self._spare_by = None
                link = socket.socket(fileno=self._passed.pop(0))
                if message["pid"] is None:
                    link.close()
                    self._no_fork_until = time.monotonic() + _FORK_PAUSE
                else:
                    self._spares.add(Spare(message["pid"], link))
            case "forked" | "failed" if self._request is not None:
                request, self._request = self._request, None
                if message["op"] == "forked":
                    made = NewProcess(Forked(message["pid"], waits=True), request.link, request.dump)
                    self._made.append((request.child, made))
                else:  # the system refuses: for want of memory, mostly, of which an exec needs less
                    request.drop()
                    self._no_fork_until = time.monotonic() + _FORK_PAUSE
                    self._made.append((request.child, message["why"]))
            case _:
                pass  # an answer that came too late
        self.on_change()
