"""Inside a zygote: import once, then fork a process for each request.

A process is made by a double fork, zygote → middle → child: the middle one ends at once, and the child is adopted by
the supervisor, which is its parent from then on. So the death of a zygote touches no child, and the supervisor waits
for a forked child like for any other.

When the supervisor asks for it, a zygote lays in one process, the spare: forked, adopted, with copies of the pages that
those before it have written to. The supervisor gets the other end of its link, and with the request that it sends there
the spare becomes the next child, at once: nobody else is asked.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from taskqd.health.child import arm, die_with_parent, show_name
from taskqd.health.fork_safety import hazards, one_thread_each, open_sockets
from taskqd.health.forked import reseed
from taskqd.health.lines import encode
from taskqd.supervisor.handover import FORK_TIMEOUT, GO, WARM
from taskqd.supervisor.heap import fill_gaps
from taskqd.supervisor.pages import Pages, write_to, written_by

_GO_TIMEOUT = 30.0
_TRACEBACK_LIMIT = 16 * 1024
_ORPHANED = 75
_INTERNAL = 70


def leave(code: int) -> NoReturn:
    """End a forked process: like the end of any other, but for the destruction of what it shares with its siblings.

    Each object that is taken apart is copied first; with many imports this takes longer than all the rest.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """What modules print when they are imported is no output of the command that imports them."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


class ForkServer:
    """The zygote's side of its link. ``prepare`` imports everything that the children need."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._written: Pages = ()
        """What a child writes to on its way up."""
        self._dump = os.environ.get("TASKQD_DUMP_FD")
        arm()
        show_name("zygote")
        self._supervisor = os.getppid()
        number = int(os.environ.pop("TASKQD_CONTROL_FD"))
        os.set_inheritable(number, False)
        self._link = socket.socket(fileno=number)
        self._environment = dict(os.environ)
        self._changes: dict[str, str | None] = {}
        self._fds: list[int] = []

    def serve(self) -> list[str]:
        """Import, then fork a process for each request. Returns in each of them, with the arguments to run with."""
        self._import()
        request: dict[str, Any] | None = None
        while request is None:
            asked = self._receive()
            request = self._lay_in(asked["like"]) if asked["op"] == "spare" else self._fork(asked)
        return [str(argument) for argument in request["arguments"]]

    def apply_changes(self) -> None:
        """Set in the environment of a child what the imports had set in it.

        Settings are read before actors are imported: what an application puts into its environment when it is
        imported does not reach them, here no more than in a process that imports for itself.
        """
        _set_environment({**os.environ, **self._changes})

    # -- in the zygote ------------------------------------------------------------------------------

    def _import(self) -> None:
        began, inherited = time.monotonic(), open_sockets()
        gc.disable()  # what a collection touches could not be shared any more
        try:
            with one_thread_each(), _printing_to_stderr():
                self._prepare()
        except Exception as error:
            self._refuse([str(error) or type(error).__name__], traceback.format_exception(error.__cause__ or error))
        found = hazards(inherited)
        if found:
            self._refuse(found)
        now = dict(os.environ)
        self._changes = {
            name: now.get(name)
            for name in now.keys() | self._environment.keys()
            if now.get(name) != self._environment.get(name)
        }
        gc.collect()
        fill_gaps()
        gc.freeze()
        self._say({"op": "ready", "import_s": round(time.monotonic() - began, 3)})

    def _refuse(self, why: list[str], trace: list[str] | None = None) -> NoReturn:
        self._say({"op": "unfit", "why": why, "traceback": "".join(trace or [])[-_TRACEBACK_LIMIT:]})
        os._exit(0)

    def _say(self, message: Mapping[str, object]) -> None:
        self._send(encode(message))

    def _send(self, data: bytes, *passed: int) -> None:
        try:
            if passed:
                socket.send_fds(self._link, [data], passed)
            else:
                self._link.sendall(data)
        except OSError:
            os._exit(_ORPHANED)

    def _receive(self) -> dict[str, Any]:
        """Return the next request, and keep the descriptors that come with it. The supervisor awaits each answer."""
        line = b""
        while not line.endswith(b"\n"):
            try:
                data, numbers, _, _ = socket.recv_fds(self._link, 65536, 3, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                data, numbers = b"", []
            if not data:
                os._exit(_ORPHANED)
            line += data
            self._fds += numbers
        request: dict[str, Any] = json.loads(line)
        return request

    def _fork(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Make one process. Returns the request in the new process, None in the zygote."""
        answer = self._make()
        if answer is not None:
            # The child's ends of its link and its dump must not stay open here.
            for number in self._fds:
                os.close(number)
            self._fds = []
            self._say(answer)
            return None
        with _ending_here():
            self._become(request)
            _await_go(self._fds[0])
        return request

    def _lay_in(self, like: int | None) -> dict[str, Any] | None:
        """Make the spare, after the child ``like``. Returns its request in it, None in the zygote."""
        if like is not None and not self._written:
            self._written = written_by(like)
        ours, theirs = socket.socketpair()
        answer = self._make()
        if answer is not None:
            theirs.close()
            with ours:
                self._send(encode({"op": "spare", "pid": answer.get("pid")}), ours.fileno())
            return None
        with _ending_here():
            ours.close()
            die_with_parent()
            write_to(self._written)
            show_name("spare")
            self._link = theirs
            self._send(WARM)
            request = self._receive()
            self._fds.insert(0, theirs.detach())
            self._become(request)
        return request

    def _make(self) -> dict[str, Any] | None:
        """Fork twice. Returns what came of it in the zygote, None in the new process, which leads its own session."""
        reader, writer = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            return {"op": "failed", "why": error.strerror or str(error)}
        if middle:
            os.close(writer)
            answer = _hand_over(middle, reader)
            os.close(reader)
            return answer
        with _ending_here():
            middle = _leave_to_child()
            os.close(reader)
            os.setsid()
            os.write(writer, str(os.getpid()).encode())
            os.close(writer)
            self._link.close()
            self._await_adoption(middle)
        return None

    # -- in a child ---------------------------------------------------------------------------------

    def _become(self, request: Mapping[str, Any]) -> None:
        """Turn this copy of the zygote into what a new process would be."""
        link, *dump = self._fds
        if request["output"]:
            output = dump.pop(0)
            for number in (1, 2):
                os.dup2(output, number)
            os.close(output)
        own = {
            "TASKQD_SUPERVISOR_PID": str(self._supervisor),
            "TASKQD_CONTROL_FD": str(link),
            **({"TASKQD_DUMP_FD": str(dump[0])} if dump else {}),
        }
        _set_environment({**self._environment, **request["environment"], **own})
        sys.argv[1:] = request["arguments"]
        arm()
        if self._dump is not None:
            os.close(int(self._dump))
        reseed()
        gc.enable()

    def _await_adoption(self, middle: int) -> None:
        # Only then: the death signal that is armed next would come from the end of the middle process too.
        deadline = time.monotonic() + FORK_TIMEOUT
        while (parent := os.getppid()) != self._supervisor:
            if parent != middle or time.monotonic() > deadline:
                os._exit(_ORPHANED)
            time.sleep(0.0002)


@contextlib.contextmanager
def _ending_here() -> Iterator[None]:
    """Show an error and end the process: outside waits the zygote's code, which must not run in a fork."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(_INTERNAL)


def _leave_to_child() -> int:
    """Fork again and end. Returns in the child, with the number of the process that ended."""
    middle = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        os._exit(error.errno or _INTERNAL)
    if child:
        os._exit(0)
    return middle


def _hand_over(middle: int, reader: int) -> dict[str, Any]:
    """Wait until the child has told its number and left its parent; return the answer to the supervisor."""
    deadline = time.monotonic() + FORK_TIMEOUT
    told = os.read(reader, 32) if select.select([reader], [], [], FORK_TIMEOUT)[0] else b""
    status = _wait(middle, deadline)
    if told:
        return {"op": "forked", "pid": int(told)}
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        return {"op": "failed", "why": os.strerror(os.WEXITSTATUS(status))}
    return {"op": "failed", "why": f"the new process was not heard of within {FORK_TIMEOUT:g} s"}


def _wait(pid: int, deadline: float) -> int:
    """Return the status of a process that ends at once; one that does not until ``deadline`` is killed."""
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.0002)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _await_go(link: int) -> None:
    """Return when the supervisor watches this process; end it when that never comes."""
    line, deadline = b"", time.monotonic() + _GO_TIMEOUT
    while len(line) < len(GO):
        if not select.select([link], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os._exit(_ORPHANED)
        data = os.read(link, len(GO) - len(line))
        if not data:
            os._exit(_ORPHANED)
        line += data


def _set_environment(wanted: Mapping[str, str | None]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value
