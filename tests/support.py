"""What tests of every layer share: waiting with a deadline, and real processes that never outlive a test."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parent.parent
_POLL = 0.02


def wait_until(predicate: Callable[[], T], timeout: float = 10.0, what: str = "") -> T:
    """Call ``predicate`` until it returns something true and return that; fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or _source(predicate)}"
        time.sleep(_POLL)
    return value


async def eventually(predicate: Callable[[], Awaitable[T] | T], timeout: float = 10.0, what: str = "") -> T:
    """Like :func:`wait_until`, on the event loop; ``predicate`` may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if inspect.isawaitable(value):
            value = await asyncio.wait_for(value, timeout)
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or _source(predicate)}"
        await asyncio.sleep(_POLL)


class Command:
    """A running ``taskqd`` command, or any other program, with its output in files, or its errors in ``stderr``."""

    def __init__(
        self, argv: Sequence[str], directory: Path, env: Mapping[str, str], *, stderr: int | None = None
    ) -> None:
        self.argv = list(argv)
        number = len(list(directory.glob("*.stderr")))
        self._stdout = directory / f"{number}.stdout"
        self._stderr = directory / f"{number}.stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if stderr is None else stderr,
                cwd=directory,
                env=dict(env),
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self._stdout.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What it logged so far."""
        return self._stderr.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """Return the living descendants; :meth:`end` remembers them even when their parent is gone."""
        try:
            found = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen.update({child.pid: child for child in found})
        return [child for child in self._seen.values() if _alive(child)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 30.0) -> int:
        """Return the exit code; fail with the output when the process does not end in time."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.argv} did not end within {timeout} s\n{self.stdout}\n{self.stderr}") from None

    def end(self) -> None:
        """Kill the process and all that it started. Safe to call again."""
        for child in self.children():
            if _alive(child):
                child.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def taskqd_argv(*args: str) -> list[str]:
    """Return the argument list of a ``taskqd`` command with this interpreter."""
    return [sys.executable, "-P", "-m", "taskqd", *args]


def child_environment(**extra: str) -> dict[str, str]:
    """Return an environment for child processes: this one without any taskqd variable, plus ``extra``."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TASKQ_", "TASKQD_"))}
    return kept | {"PYTHONPATH": str(REPOSITORY)} | extra


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _source(predicate: Callable[[], object]) -> str:
    try:
        return inspect.getsource(predicate).strip()
    except (OSError, TypeError):
        return repr(predicate)
