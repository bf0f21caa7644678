"""Whether a process may be forked: nothing runs in it but its main thread, and it shares no connection.

A fork copies only the thread that calls it: a lock that another one held stays locked in the copy for ever. A
socket or an event loop would be used by both copies at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""What keeps numeric libraries from starting a thread for each CPU when they are imported."""


def open_sockets() -> dict[int, int]:
    """Return the inode of every socket and event poll that this process has open, by its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            number = int(name)
            state = os.fstat(number)
            if stat.S_ISSOCK(state.st_mode) or os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                found[number] = state.st_ino
    return found


def hazards(inherited: Mapping[int, int] | None = None) -> list[str]:
    """Return what makes a fork of this process unsafe, in words; ``inherited`` sockets are none."""
    known = inherited or {}
    sockets = [number for number, inode in sorted(open_sockets().items()) if known.get(number) != inode]
    return [*_threads(), *(_describe(number) for number in sockets)]


@contextmanager
def one_thread_each(environ: MutableMapping[str, str] | None = None) -> Iterator[None]:
    """Limit numeric libraries that are imported inside to one thread; what the operator has set stays."""
    environ = os.environ if environ is None else environ
    ours = [name for name in THREAD_VARIABLES if name not in environ]
    environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            environ.pop(name, None)


def _threads() -> Iterator[str]:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    main = os.getpid()
    for task in sorted(map(int, os.listdir("/proc/self/task"))):
        if task == main:
            continue
        own = names.get(task) or _command_name(task)
        # Without a name of its own a thread has that of the one that started it.
        yield "a thread of a library" if own == _command_name(main) else f"thread {own!r}"


def _command_name(task: int) -> str:
    try:
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:  # it has ended meanwhile
        return str(task)


def _describe(number: int) -> str:
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            return f"socket to {_address(copy.getpeername())}"
    except OSError:  # not connected, or no socket
        pass
    if os.readlink(f"/proc/self/fd/{number}").startswith("anon_inode"):
        return "an event loop (epoll)"
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            return f"socket at {_address(copy.getsockname())}"
    except OSError:
        return f"socket (descriptor {number})"


def _address(address: object) -> str:
    match address:
        case (str(host), int(port), *_):
            return f"{host}:{port}"
        case "" | b"":
            return "a pair of its own"
        case bytes():
            return address.decode("utf-8", "backslashreplace")
        case _:
            return str(address)
