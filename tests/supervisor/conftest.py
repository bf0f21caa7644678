"""A group under test: a workgroup file, its real supervisor, its processes, and what is left afterwards."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import Command, taskqd_argv, wait_until

TAG = "TEST_GROUP_TAG"
"""Set in the environment of a group under test, and so of every process that it makes."""
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
    """A supervisor started on a file made of ``tables``, with stand-ins for children, or real ones of ``actors``.

    ``first_lines``: what the supervisor of real ones runs before anything else.
    """

    def __init__(
        self,
        directory: Path,
        env: dict[str, str],
        tables: dict[str, str],
        modes: dict[str, str],
        preload: str,
        actors: str | None = None,
        first_lines: str = "",
    ) -> None:
        self.directory = directory
        self.runtime = directory / "run"
        self.tag = uuid.uuid4().hex
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
        (directory / "group_actors.py").write_text(actors or ACTORS)
        self._argv = [sys.executable, "-P", str(RUNNER), str(file), *(f"{k}={v}" for k, v in modes.items())]
        if actors is not None:
            run = f"{first_lines}\nimport sys\nfrom taskqd.cli.main import main\nsys.exit(main(['run', '{file}']))"
            self._argv = [sys.executable, "-P", "-c", run] if first_lines else taskqd_argv("run", str(file))
        self._env = {**env, TAG: self.tag}
        self.command = self.run_again()

    def run_again(self, *, stderr: int | None = None) -> Command:
        """Start one more supervisor of the same file, which logs to a file of its own or to ``stderr``."""
        return Command(self._argv, self.directory, self._env, stderr=stderr)

    @property
    def socket(self) -> Path:
        return self.runtime / "group.sock"

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What the supervisor logged so far, or its events called ``name``."""
        return [event for event in _events(self.command.stderr) if not name or event["event"] == name]

    def everything_logged(self) -> str:
        """What every supervisor of this group and its processes have logged."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.directory.glob("*.stderr")))

    def all_events(self) -> list[dict[str, Any]]:
        """The events in :meth:`everything_logged`."""
        return _events(self.everything_logged())

    def wait_for(self, name: str, count: int = 1, timeout: float = 30.0) -> list[dict[str, Any]]:
        """Wait until ``name`` was logged ``count`` times."""

        def enough() -> list[dict[str, Any]]:
            found = self.events(name)
            ended = self.command.process.poll()
            assert ended is None or len(found) >= count, f"it ended with {ended}\n{self.command.stderr}"
            return found if len(found) >= count else []

        return wait_until(enough, timeout, f"{count} times {name}; logged: {self.command.stderr}")

    def ask(self, path: str) -> tuple[int, dict[str, Any]]:
        """GET ``path`` of the group's socket; again when the machine was so busy that we were hung up on."""
        answer = b""
        for _ in range(3):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                answer = answer or self._get(path)
        head, _, body = answer.partition(b"\r\n\r\n")
        code = int(head.split()[1])
        return code, json.loads(body) if body.startswith(b"{") else {"text": body.decode()}

    def _get(self, path: str) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(self.socket))
            sock.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
            answer = b""
            while part := sock.recv(65536):
                answer += part
        return answer

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
    with starter(short_dir, child_env, getattr(request, "param", "off")) as start:
        yield start


@contextlib.contextmanager
def starter(directory: Path, env: dict[str, str], preload: str) -> Iterator[StartGroup]:
    """Yield what starts groups below ``directory``; whatever still runs at the end is killed."""
    usual = preload
    started: list[Group] = []

    def start(
        modes: dict[str, str] | None = None,
        tables: dict[str, str] | None = None,
        *,
        preload: str | None = None,
        actors: str | None = None,
        first_lines: str = "",
        **more: str,
    ) -> Group:
        own = directory / str(len(started))
        own.mkdir()
        new = Group(own, {**env, **more}, tables or {}, modes or {}, preload or usual, actors, first_lines)
        started.append(new)
        return new

    try:
        yield start
    finally:
        for each in started:
            each.command.end()


def _events(text: str) -> list[dict[str, Any]]:
    """Read the lines that are whole: a long one is written in pieces."""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]
