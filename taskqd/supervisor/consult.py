"""Asking the preflight child, and believing nothing but its answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskqd.domain.errors import TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.health.lines import LineProtocol, Message
from taskqd.supervisor.exits import signal_name
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.reaper import Reaper, kill_group
from taskqd.supervisor.spawn import base_environment, spawn

_FIRST_STEP = 60.0
_ANSWER_LIMIT = 16 * 1024 * 1024
_SHORTLY = 2.0


class PreflightError(TaskQError):
    """The check before the start said no. ``exit_code`` is what the check said."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(exit_code)


def preflight_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of the preflight child."""
    return [sys.executable, "-P", "-m", "taskqd.supervisor.preflight", *arguments]


async def consult(
    arguments: Sequence[str],
    *,
    reaper: Reaper,
    environ: Mapping[str, str],
    on_warning: Callable[[str], None],
    on_step: Callable[[float], None] = lambda _within: None,
) -> Plan:
    """Run the preflight child with ``arguments`` and return its plan.

    ``on_step`` is given the seconds that each step may take, as it begins.
    Raises as :func:`ask_preflight` does.
    """
    answer = await ask_preflight(arguments, reaper=reaper, environ=environ, on_warning=on_warning, on_step=on_step)
    return Plan.from_json(answer["plan"])


async def release_by_helper(file: str, workers: Sequence[str], reaper: Reaper, environ: Mapping[str, str]) -> int:
    """Settle what dead ``workers`` held through a preflight child; return the rows taken. Raises like it."""
    answer = await ask_preflight(
        [file, "--for", "release", "--release", ",".join(workers)],
        reaper=reaper,
        environ=environ,
        on_warning=_unheard,
        on_step=lambda _within: None,
    )
    return int(answer["taken"])


async def ask_preflight(
    arguments: Sequence[str],
    *,
    reaper: Reaper,
    environ: Mapping[str, str],
    on_warning: Callable[[str], None],
    on_step: Callable[[float], None],
    settings: Mapping[str, Any] | None = None,
) -> Message:
    """Run the preflight child with ``arguments`` and return its answer.

    With ``settings`` it resolves its own as a child of the group does that is given these.

    Raises ``PreflightError`` with the child's message and exit code, or with 70 when it took longer than it
    had announced or ended without an answer. The child is gone when this returns.
    """
    asking = _Asking(on_warning, on_step)
    loop = asyncio.get_running_loop()
    try:
        environment = base_environment(environ, None)
        if settings is not None:
            environment["TASKQD_SETTINGS"] = json.dumps(settings)
        new = spawn(preflight_command(arguments), environment)
    except OSError as error:
        text = f"the system refuses to start the check before the start: {error.strerror or error}"
        raise PreflightError(text, ExitCode.TRY_AGAIN) from None
    pid = new.process.pid
    ended = asyncio.Event()

    def exited(code: int) -> None:
        new.process.returncode = code  # it was waited for elsewhere; Popen must not try
        asking.exit_code = code
        ended.set()
        loop.call_later(_SHORTLY, asking.done.set)

    reaper.watch(pid, exited)
    try:
        await loop.create_unix_connection(lambda: asking.lines, sock=new.link)
        await asking.wait()
    finally:
        asking.lines.close()
        if not ended.is_set():
            kill_group(pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SHORTLY):
                    await ended.wait()
        if new.dump is not None:
            asking.close_dump(new.dump)
    return asking.answer()


def _unheard(_text: str) -> None:
    """Warnings about the file were told when the group started."""


async def consult_alone(arguments: Sequence[str]) -> tuple[Plan, list[str]]:
    """Like :func:`consult`, for a command that has no other children. Returns the plan and the warnings."""
    reaper, warnings = Reaper(), list[str]()
    reaper.start()
    try:
        plan = await consult(arguments, reaper=reaper, environ=os.environ, on_warning=warnings.append)
    finally:
        reaper.stop()
    return plan, warnings


class _Asking:
    """What the child has said so far."""

    def __init__(self, on_warning: Callable[[str], None], on_step: Callable[[float], None]) -> None:
        self.lines = LineProtocol(self._receive, self._lost, limit=_ANSWER_LIMIT)
        self.done = asyncio.Event()
        self.exit_code: int | None = None
        self._on_warning = on_warning
        self._on_step = on_step
        self._answer: Message | None = None
        self._step = "starting"
        self._silence_code = int(ExitCode.INTERNAL)
        self._deadline = asyncio.get_running_loop().time() + _FIRST_STEP
        self._overdue = False
        self._fault = ""
        self._last_words = ""

    async def wait(self) -> None:
        """Return when there is an answer, or none will come."""
        loop = asyncio.get_running_loop()
        while not self.done.is_set():
            if loop.time() >= self._deadline:
                self._overdue = True
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(self._deadline, loop.time() + 1.0)):
                    await self.done.wait()

    def answer(self) -> Message:
        """Return the answer, or raise what it says."""
        answer = self._answer
        if answer is None:
            raise PreflightError(f"the check before the start {self._silence()}", self._silence_code)
        if answer["op"] == "error":
            raise PreflightError(str(answer["message"]), int(answer["exit_code"]))
        return answer

    def close_dump(self, dump: int) -> None:
        """Keep what the child left in its dump file."""
        self._last_words = os.pread(dump, 16 * 1024, 0).decode("utf-8", "backslashreplace").strip()
        os.close(dump)

    def _silence(self) -> str:
        if self._overdue:
            return f"took too long and was ended while {self._step}"
        code = self.exit_code
        if self._fault or code is None:
            how = f"its link broke: {self._fault or 'closed'}"
        else:
            how = signal_name(-code) if code < 0 else f"exit code {code}"
        text = f"ended without an answer while {self._step}: {how}"
        return f"{text}\n{self._last_words}" if self._last_words else text

    def _receive(self, message: Message) -> None:
        match message["op"]:
            case "step":
                self._step = str(message["text"])
                self._silence_code = int(message["silence"])
                self._deadline = asyncio.get_running_loop().time() + float(message["within"])
                self._on_step(float(message["within"]))
            case "warning":
                self._on_warning(str(message["text"]))
            case "plan" | "released" | "declared" | "error":
                self._answer = message
                self.done.set()
            case _:
                pass  # nothing else is said

    def _lost(self, reason: str) -> None:
        self._fault = "" if reason == "closed" else reason
        self.done.set()
