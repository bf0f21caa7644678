"""A group under test: a workgroup file, its real supervisor, its processes, and what is left afterwards."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import Command, wait_until

RUNNER = Path(__file__).with_name("group_of_standins.py")
ACTORS = """\
from pydantic import BaseModel
from taskqd import actor

class Nothing(BaseModel):
    pass

@actor
async def nothing(payload: Nothing) -> None:
    pass

registry = [nothing]
"""


class Group:
    """A supervisor with stand-ins for children, started on a file made of ``tables``."""

    def __init__(
        self, directory: Path, env: dict[str, str], tables: dict[str, str], modes: dict[str, str], preload: str
    ) -> None:
        self.directory = directory
        self.runtime = directory / "run"
        parts = {
            "": 'actors = "group_actors:registry"',
            "supervisor": f'runtime_dir = "run"\ntermination_grace_period = 10\npreload = "{preload}"',
            "scheduler": "enabled = false",
            "[workers]": 'name = "io"',
        }
        for name, text in tables.items():
            parts[name] = f"{parts[name]}\n{text}" if name in ("supervisor", "[workers]") else text
        file = directory / "group.toml"
        file.write_text("\n".join(f"[{name}]\n{text}" if name else text for name, text in parts.items()))
        (directory / "group_actors.py").write_text(ACTORS)
        self._argv = [sys.executable, "-P", str(RUNNER), str(file), *(f"{k}={v}" for k, v in modes.items())]
        self._env = env
        self.command = self.run_again()

    def run_again(self) -> Command:
        """Start one more supervisor of the same file."""
        return Command(self._argv, self.directory, self._env)

    @property
    def socket(self) -> Path:
        return self.runtime / "group.sock"

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What the supervisor logged so far, or its events called ``name``."""
        lines = [line for line in self.command.stderr.splitlines() if line.startswith("{")]
        found = [json.loads(line) for line in lines]
        return [event for event in found if not name or event["event"] == name]

    def wait_for(self, name: str, count: int = 1, timeout: float = 30.0) -> list[dict[str, Any]]:
        """Wait until ``name`` was logged ``count`` times."""

        def enough() -> list[dict[str, Any]]:
            found = self.events(name)
            ended = self.command.process.poll()
            assert ended is None or len(found) >= count, f"it ended with {ended}\n{self.command.stderr}"
            return found if len(found) >= count else []

        return wait_until(enough, timeout, f"{count} times {name}; logged: {self.command.stderr}")

    def ask(self, path: str) -> tuple[int, dict[str, Any]]:
        """GET ``path`` of the group's socket."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(self.socket))
            sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            answer = b""
            while part := sock.recv(65536):
                answer += part
        head, _, body = answer.partition(b"\r\n\r\n")
        code = int(head.split()[1])
        return code, json.loads(body) if body.startswith(b"{") else {"text": body.decode()}

    def processes(self) -> list[psutil.Process]:
        """Every living process below the supervisor."""
        return self.command.children()

    def stop(self, timeout: float = 30.0) -> int:
        """Ask the group to stop and return its exit code."""
        self.command.signal(signal.SIGTERM)
        return self.command.wait(timeout)

    def left_over(self) -> list[str]:
        """What should not be there once the supervisor has ended by itself."""
        files = [str(path) for path in self.runtime.rglob("*")] if self.runtime.exists() else []
        return [*files, *(f"{process.pid} {process.cmdline()}" for process in self.processes())]


StartGroup = Callable[..., Group]

BOTH_WAYS = pytest.mark.parametrize("group", ["off", "require"], ids=["exec", "fork"], indirect=True)
"""Run a test with exec'ed workers, and with forked ones."""


@pytest.fixture
def group(short_dir: Path, child_env: dict[str, str], request: pytest.FixtureRequest) -> Iterator[StartGroup]:
    """Start a group: keyword ``tables`` adds to the file, ``modes`` says what each kind of child does.

    Its workers are exec'ed, unless the test is parametrized with :data:`BOTH_WAYS` or another ``preload``.
    """
    preload = getattr(request, "param", "off")
    started: list[Group] = []

    def start(modes: dict[str, str] | None = None, tables: dict[str, str] | None = None, **env: str) -> Group:
        directory = short_dir / str(len(started))
        directory.mkdir()
        new = Group(directory, {**child_env, **env}, tables or {}, modes or {}, preload)
        started.append(new)
        return new

    yield start
    for each in started:
        each.command.end()
