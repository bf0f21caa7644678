"""Making a process: its environment, its link, its file for last words."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taskqd.supervisor.plan import ChildSpec

_NOT_FOR_CHILDREN = frozenset(
    {
        "NOTIFY_SOCKET",
        "MAINPID",
        # Listeners are the group's: its processes cannot share a port or a path.
        "TASKQ_METRICS_PORT",
        "TASKQ_HEALTH_SOCKET_PATH",
        "TASKQ_HEALTH_PORT",
    }
)
_NOT_FOR_CHILDREN_EITHER = ("WATCHDOG_", "LISTEN_", "TASKQD_")


RUNTIME_DIR = "TASKQD_RUNTIME_DIR"
"""The variable that tells what the supervisor starts where it keeps its group's files."""


@dataclass(slots=True)
class Forked:
    """A process that a zygote has forked for the supervisor, who is its parent; the part of ``Popen`` that is used."""

    pid: int
    returncode: int | None = None
    waits: bool = False
    """It goes on when it is told that the supervisor watches it."""


@dataclass(frozen=True, slots=True)
class NewProcess:
    """A process that was just made, and the supervisor's ends of what connects them."""

    process: subprocess.Popen[bytes] | Forked
    link: socket.socket
    dump: int | None
    """A file in memory into which the process writes stacks and its last words; None where there is none."""

    def drop(self) -> None:
        """Let go of it: a process that nobody takes over finds its link closed, and ends."""
        self.link.close()
        if self.dump is not None:
            os.close(self.dump)


def child_command(spec: ChildSpec) -> list[str]:
    """Return the command of a child. ``-P``: the working directory must not shadow installed modules."""
    return [sys.executable, "-P", "-m", "taskqd", *spec.arguments]


def is_kept_from_children(name: str) -> bool:
    """True for a variable that is the supervisor's alone, or that it sets for each process."""
    return name in _NOT_FOR_CHILDREN or name.startswith(_NOT_FOR_CHILDREN_EITHER)


def base_environment(environ: Mapping[str, str], app_dir: str | None) -> dict[str, str]:
    """Return what every process that the supervisor makes gets of its own environment."""
    kept = {name: value for name, value in environ.items() if not is_kept_from_children(name)}
    if app_dir:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [app_dir, kept.get("PYTHONPATH")]))
    kept["TASKQD_SUPERVISOR_PID"] = str(os.getpid())
    if RUNTIME_DIR in environ:
        kept[RUNTIME_DIR] = environ[RUNTIME_DIR]
    return kept


def child_environment(
    base: Mapping[str, str], spec: ChildSpec, index: int, *, group: str, instance: str, health_socket: str
) -> dict[str, str]:
    """Return the environment of one child; secrets are in ``base`` or in files, never in what is added here."""
    named = {
        "worker_label": f"{spec.name}.{index}",
        "worker_group": group,
        "workgroup_instance": instance,
    }
    return {
        **base,
        "TASKQD_GROUP": group,
        "TASKQD_ROLE": spec.role,
        "TASKQD_NAME": spec.name,
        "TASKQD_INDEX": str(index),
        "TASKQD_SETTINGS": json.dumps({**named, **given_settings(spec)}),
        **({"TASKQD_ENV_SETTINGS": " ".join(spec.env_settings)} if spec.env_settings else {}),
        "TASKQD_HEALTH_SOCKET": health_socket,
    }


def given_settings(spec: ChildSpec) -> dict[str, Any]:
    """Return the settings that a process of ``spec`` is given; the rest it resolves by itself."""
    return {**spec.settings, **{f"pg_credential_{key}": value for key, value in (spec.source or {}).items()}}


def spawn(command: Sequence[str], environment: Mapping[str, str], *, output: int | None = None) -> NewProcess:
    """Make a process in a session of its own, that prints to ``output``. Raises ``OSError`` when the system refuses.

    Must be called on the main thread: the death signal follows the thread that made the process.
    """
    ours, theirs = socket.socketpair()
    dump = None
    try:
        dump = dump_file()
        passed = [theirs.fileno(), *([] if dump is None else [dump])]
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            start_new_session=True,
            env={
                **environment,
                "TASKQD_CONTROL_FD": str(theirs.fileno()),
                **({} if dump is None else {"TASKQD_DUMP_FD": str(dump)}),
            },
        )
    except BaseException:
        ours.close()
        if dump is not None:
            os.close(dump)
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    return NewProcess(process, ours, dump)


def dump_file() -> int | None:
    """Return a new file in memory for a process's last words, or None where there is none."""
    if not hasattr(os, "memfd_create"):  # only Linux has it; elsewhere dumps go to standard error
        return None
    dump = os.memfd_create("taskqd-dump")
    # Appending, so that the supervisor may empty the file while the child goes on writing.
    fcntl.fcntl(dump, fcntl.F_SETFL, fcntl.fcntl(dump, fcntl.F_GETFL) | os.O_APPEND)
    return dump
