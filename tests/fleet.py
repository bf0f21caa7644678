"""Real worker and scheduler processes of one schema, and the record of what their actors did."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import Command, eventually, wait_until

ACTORS = "tests.apps.basic:actors"
QUICK = {
    "TASKQ_HEARTBEAT_INTERVAL": "0.5",
    "TASKQ_HEARTBEAT_COMMAND_TIMEOUT": "0.5",
    "TASKQ_MAX_HEARTBEAT_FAILURES": "1",
    "TASKQ_LOCK_LEASE": "4",
    "TASKQ_CANCELLATION_GRACE_PERIOD": "2",
    "TASKQ_CLEANUP_GRACE_PERIOD": "1",
    "TASKQ_TERMINATION_GRACE_PERIOD": "30",
    "TASKQ_WATCHDOG_ENABLED": "false",
    "TASKQ_SWEEP_INTERVAL": "1",
    "TASKQ_MAINTENANCE": "off",  # what a test plants is for whom it starts
    "TASKQ_NOTIFY_POLL_INTERVAL": "1",
}
"""Settings on which faults show within seconds. The lease floor of these is 2.5 s."""


@dataclass(frozen=True)
class Execution:
    """One line of the execution log."""

    event: str
    job: str
    actor: str
    key: str
    attempt: int
    epoch: int
    pid: int
    at: float


class Fleet:
    """Starts workers and schedulers on one schema and reads what they logged."""

    def __init__(self, start: Callable[..., Command], env: dict[str, str], directory: Path) -> None:
        self._start = start
        self._log = directory / "executions"
        self.directory = directory
        self.env = env | QUICK | {"EXECUTION_LOG": str(self._log)}

    def worker(
        self,
        *,
        actors: str = ACTORS,
        queues: str = "default",
        concurrency: int = 4,
        ready: bool = True,
        env: dict[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> Command:
        """Start a worker and, unless told otherwise, wait until it claims."""
        arguments = ["--actors", actors, "--queues", queues, "--max-concurrency", str(concurrency)]
        command = self._start("worker", *arguments, *flags, env=self.env | (env or {}))
        if ready:
            wait_for_event(command, "worker-ready")
        return command

    def scheduler(self, *, ready: bool = True, env: dict[str, str] | None = None) -> Command:
        """Start a scheduler and, unless told otherwise, wait until it works."""
        command = self._start("scheduler", "run", env=self.env | (env or {}))
        if ready:
            wait_for_event(command, "scheduler-ready")
        return command

    def executions(self, event: str = "start") -> list[Execution]:
        """Return the lines of the execution log with this event, oldest first."""
        try:
            text = self._log.read_text()
        except FileNotFoundError:
            return []
        lines = [Execution(**json.loads(line)) for line in text.splitlines()]
        return [line for line in lines if line.event == event]

    async def wait_for_executions(self, count: int, event: str = "start", timeout: float = 20.0) -> list[Execution]:
        """Wait until the log holds ``count`` lines with this event."""
        return await eventually(
            lambda: done if len(done := self.executions(event)) >= count else [], timeout, f"{count} × {event}"
        )


def events(command: Command, name: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the JSON log lines of a process, those of one event if named."""
    for line in command.stderr.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if isinstance(entry, dict) and name in (None, entry.get("event")):
                yield entry


def wait_for_event(command: Command, name: str, timeout: float = 30.0) -> dict[str, Any]:
    """Wait until the process has logged the event; fail early when it ends before."""

    def found() -> dict[str, Any] | None:
        ended = command.process.poll() is not None
        entry = next(events(command, name), None)
        assert entry or not ended, f"ended {command.process.returncode} before {name}:\n{command.stderr}"
        return entry

    entry = wait_until(found, timeout, name)
    assert entry is not None
    return entry


def ask(path: Path, target: str) -> str:
    """Send a GET to a health socket and return the whole answer."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        parts = []
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts).decode()
