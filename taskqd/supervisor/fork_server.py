"""Inside a zygote: import once, then fork a process for each request.

A process is made by a double fork, zygote → middle → child: the middle one ends at once, and the child is adopted by
the supervisor, which is its parent from then on. So the death of a zygote touches no child, and the supervisor waits
for a forked child like for any other.

While nothing is asked of it a zygote lays in one process, the spare: forked, adopted, its memory warm. It becomes the
next child at once. Until then it is of the zygote's process group and ends with the zygote.
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
from dataclasses import dataclass
from typing import Any, NoReturn

from taskqd.health.child import arm, show_name
from taskqd.health.fork_safety import hazards, one_thread_each, open_sockets
from taskqd.health.forked import reseed
from taskqd.health.lines import encode
from taskqd.supervisor.handover import FORK_TIMEOUT, GO
from taskqd.supervisor.heap import fill_gaps

_CALM = 0.25
"""Seconds without a request after which there is time to lay in a spare."""
_WARM, _TAKEN = b"w", b"t"
"""What a spare says: it can be used; it is what was asked for, and leads its own session."""
_TAKE_TIMEOUT = 1.0
"""Seconds that a spare may take to answer; then it is done without."""
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


@dataclass(frozen=True, slots=True)
class _Spare:
    """A process that waits at the other end of ``link`` for the request that it is to fulfil."""

    pid: int
    link: socket.socket


class ForkServer:
    """The zygote's side of its link. ``prepare`` imports everything that the children need.

    ``rehearse`` is called in a spare, and does what a child does at its start and leaves nothing behind.
    """

    def __init__(self, prepare: Callable[[], None], rehearse: Callable[[], None]) -> None:
        self._prepare = prepare
        self._rehearse = rehearse
        self._spare: _Spare | None = None
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
        while True:
            request = self._lay_in() if self._spare is None and self._is_calm() else None
            if request is not None:  # this is the spare
                break
            request = self._receive()
            if not self._hand_to_spare(request) and self._fork(request):
                break
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

    def _send(self, data: bytes) -> None:
        try:
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

    def _is_calm(self) -> bool:
        return not select.select([self._link], [], [], _CALM)[0]

    def _fork(self, request: Mapping[str, Any]) -> bool:
        """Make one process. True in the new process, False in the zygote."""
        answer = self._make(os.setsid)
        if answer is not None:
            self._finish(answer)
            return False
        with _ending_here():
            self._become(request)
        return True

    def _lay_in(self) -> dict[str, Any] | None:
        """Make the spare. Returns its request in it, when its turn has come; None in the zygote."""
        ours, theirs = socket.socketpair()
        answer = self._make(ours.close)
        if answer is not None:
            theirs.close()
            if answer["op"] == "forked":
                self._spare = _Spare(answer["pid"], ours)
                self._say({"op": "spare", "pid": self._spare.pid})
            else:
                ours.close()
            return None
        with _ending_here():
            show_name("spare")
            self._rehearse()
            self._link = theirs
            self._send(_WARM)
            request = self._receive()
            os.setsid()
            self._send(_TAKEN)
            self._link.close()
            self._become(request)
            return request

    def _hand_to_spare(self, request: Mapping[str, Any]) -> bool:
        """Let the spare fulfil ``request``; False when there is none, it is not warm yet, or of no use any more."""
        spare = self._spare
        if spare is None or not select.select([spare.link], [], [], 0)[0]:
            return False
        self._spare = None
        spare.link.settimeout(_TAKE_TIMEOUT)
        try:
            taken = spare.link.recv(1)  # it is warm, or it has ended
            if taken:
                socket.send_fds(spare.link, [encode(request)], self._fds)
                taken = spare.link.recv(1)
        except OSError:
            taken = b""
        spare.link.close()  # one that takes it only now finds this out, and ends
        if taken:
            self._finish({"op": "forked", "pid": spare.pid})
        return bool(taken)

    def _make(self, first: Callable[[], None]) -> dict[str, Any] | None:
        """Fork twice. Returns what came of it in the zygote, None in the new process, which did ``first`` at first."""
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
            first()
            os.write(writer, str(os.getpid()).encode())
            os.close(writer)
            self._link.close()
            self._await_adoption(middle)
        return None

    def _finish(self, answer: Mapping[str, object]) -> None:
        # The child's ends of its link and its dump must not stay open here.
        for number in self._fds:
            os.close(number)
        self._fds = []
        self._say(answer)

    # -- in a child ---------------------------------------------------------------------------------

    def _become(self, request: Mapping[str, Any]) -> None:
        """Turn this copy of the zygote into what a new process would be; returns when the supervisor knows it."""
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
        _await_go(link)
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
