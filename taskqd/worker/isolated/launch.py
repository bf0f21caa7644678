"""Starting the zygote of a worker: a fork of it, or a program of its own where a fork is not safe."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from taskqd.actors.registry import Registry, load_registry
from taskqd.domain.errors import RegistryError
from taskqd.health.child import die_with_parent, leave_supervisor, show_name
from taskqd.health.fork_safety import hazards, one_thread_each, open_sockets
from taskqd.health.lines import encode
from taskqd.observe import logs
from taskqd.settings import Settings, load_settings
from taskqd.worker.isolated.inside import run_attempt, warm_up
from taskqd.worker.isolated.warden import keep
from taskqd.worker.isolated.zygote import Zygote

_INTERNAL = 70
_HARMLESS = ("thread 'taskqd-log'",)
"""Our own thread that writes log lines: a fork goes on without it."""


@dataclass(slots=True)
class Launched:
    """The warden of a zygote, and the worker's end of the zygote's link.

    ``forked``: it can be used at once, else it says so first.
    """

    pid: int
    link: socket.socket
    forked: bool


def launch(
    registry: Registry, reference: str, settings: Settings, inherited: Mapping[int, int], log: Mapping[str, Any]
) -> Launched | None:
    """Start the zygote, None when no actor of ``registry`` is isolated. Call it before anything starts a thread.

    ``inherited``: the sockets that were open before the actors were imported. ``log``: the arguments of
    ``logs.configure``, for a zygote that is a program of its own. Raises ``RegistryError``.
    """
    if not any(ref.isolated for ref in registry.values()):
        return None
    if sys.platform != "linux":
        raise RegistryError(f"isolation='process' needs Linux: nothing binds a process to this one on {sys.platform}")
    forked = not _unsafe(inherited)
    ours, theirs = socket.socketpair()
    pid = _fork(registry, settings, inherited, ours, theirs) if forked else _spawn(reference, inherited, theirs, log)
    theirs.close()
    ours.setblocking(False)
    return Launched(pid, ours, forked)


def _unsafe(inherited: Mapping[int, int]) -> list[str]:
    return [hazard for hazard in hazards(inherited) if hazard not in _HARMLESS]


def _fork(
    registry: Registry,
    settings: Settings,
    inherited: Mapping[int, int],
    ours: socket.socket,
    theirs: socket.socket,
) -> int:
    worker = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ours.close()
        for number in _control_link(inherited):
            os.close(number)
        leave_supervisor()
        _serve(registry, settings, worker, theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_INTERNAL)


def _spawn(reference: str, inherited: Mapping[int, int], theirs: socket.socket, log: Mapping[str, Any]) -> int:
    order = {"actors": reference, "worker": os.getpid(), "link": theirs.fileno(), "log": dict(log)}
    command = [sys.executable, "-P", "-m", "taskqd.worker.isolated.launch", json.dumps(order)]
    theirs.set_inheritable(True)
    kept = {name: value for name, value in os.environ.items() if name not in ("TASKQD_CONTROL_FD", "TASKQD_DUMP_FD")}
    closed = [(os.POSIX_SPAWN_CLOSE, number) for number in _control_link(inherited)]
    return os.posix_spawn(sys.executable, command, kept, file_actions=closed)


def _control_link(inherited: Mapping[int, int]) -> list[int]:
    """The worker's link to its supervisor, which must not stay open here when the worker ends."""
    number = int(os.environ.get("TASKQD_CONTROL_FD", "-1"))
    return [number] if number in inherited else []


def _serve(registry: Registry, settings: Settings, worker: int, link: socket.socket) -> NoReturn:
    os.setsid()  # no signal that is meant for the worker's group is meant for this process
    warm_up(settings)
    gc.disable()  # what a collection touches could not be shared any more
    gc.freeze()
    keep(worker, lambda warden: _be_zygote(registry, settings, link, warden))


def _be_zygote(registry: Registry, settings: Settings, link: socket.socket, warden: int) -> NoReturn:
    show_name("isolator")
    Zygote(link, warden, lambda attempt: run_attempt(attempt, registry, settings)).serve()


def main(order: str) -> None:
    """Be a zygote that imports the actors itself."""
    given = json.loads(order)
    die_with_parent()
    link = socket.socket(fileno=given["link"])
    os.set_inheritable(link.fileno(), False)
    logs.configure(**given["log"])
    inherited = open_sockets()
    settings = load_settings()
    with one_thread_each():
        registry = load_registry(given["actors"])
    found = _unsafe(inherited)
    link.sendall(encode({"op": "unfit", "why": found} if found else {"op": "ready"}))
    if not found:
        _serve(registry, settings, given["worker"], link)


if __name__ == "__main__":
    main(sys.argv[1])
