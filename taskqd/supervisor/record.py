"""What a supervisor leaves for its successor: which worker ran as which process, and whether that is gone.

One small file beside the group's lock, whose holder alone reads and writes it. Written when a worker tells who it
is and when one is settled, by rename, so that a supervisor that is killed leaves the old or the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache

_VERSION = 1
_LARGEST = 4 * 1024 * 1024
_NAMESPACE_WAIT = 1.0
"""Seconds within which the kernel has killed a whole PID namespace after its init."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker and its process. The last three say on which boot, in which PID namespace, and under an init of
    ours, as a pid means nothing elsewhere."""

    worker_id: str
    pid: int
    start_time: int | None
    boot_id: str | None
    pid_namespace: str | None
    under_init: bool


class Record:
    """The file at ``path``, read once at the beginning; a missing one is an empty one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._entries: dict[str, Entry] = {}
        self.fault = ""
        """Why the predecessor's file could not be read, if so. Its workers are left to their leases."""
        try:
            self._entries = {entry.worker_id: entry for entry in _read(path)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            self.fault = f"{path}: {type(error).__name__}: {error}"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every worker that may still hold rows."""
        return tuple(self._entries.values())

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._entries

    def add(self, worker_id: str, pid: int) -> None:
        """Remember that the worker runs as the process ``pid``, which is a living child of this one."""
        self._entries[worker_id] = Entry(
            worker_id, pid, start_time(pid), boot_id(), pid_namespace(), under_init=os.getpid() == 1
        )
        self.write()

    def forget(self, worker_ids: Iterable[str]) -> None:
        """The workers hold nothing any more."""
        before = len(self._entries)
        for worker_id in worker_ids:
            self._entries.pop(worker_id, None)
        if len(self._entries) < before:
            self.write()

    def write(self) -> None:
        """Write the file, or remove it when no worker may hold anything."""
        # What cannot be written is a full or vanished disk: rows then come back when their leases end.
        with contextlib.suppress(OSError):
            if not self._entries:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
                return
            text = json.dumps({"v": _VERSION, "workers": [asdict(entry) for entry in self._entries.values()]})
            new = f"{self._path}.new"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with open(file, "w", encoding="utf-8") as stream:
                    stream.write(text)
                os.rename(new, self._path)
            except OSError:  # better the old one than half of the new one
                os.unlink(new)


def is_gone(entry: Entry, held_for: float) -> bool:
    """True when the recorded process certainly runs no more; the group's lock was held for ``held_for`` seconds.

    A pid of another namespace says nothing here, unless the supervisor was that namespace's init: the lock is free
    because it died, and the kernel kills a namespace with its init.
    """
    if entry.boot_id != boot_id():
        return entry.boot_id is not None and boot_id() is not None
    if entry.pid_namespace != pid_namespace():
        return entry.under_init and held_for >= _NAMESPACE_WAIT
    return entry.start_time is not None and start_time(entry.pid) != entry.start_time


def start_time(pid: int) -> int | None:
    """Return when the process began, in clock ticks since boot, or None where none runs: a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything, parentheses and blanks too.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@cache
def boot_id() -> str | None:
    """Return the id of this boot of the machine, or None where the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


@cache
def pid_namespace() -> str | None:
    """Return the name of this process's PID namespace, or None where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _read(path: str) -> list[Entry]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(file, "rb") as stream:
        document = json.loads(stream.read(_LARGEST))
    if document["v"] != _VERSION:
        raise ValueError(f"it is of version {document['v']}, this release reads {_VERSION}")
    return [Entry(**entry) for entry in document["workers"]]
