"""Where a group lives in the file system: its directory, its lock, its sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable

from taskqd.domain.errors import ConfigError, TaskQError
from taskqd.domain.exit_codes import ExitCode
from taskqd.health.probe import runtime_directories
from taskqd.health.server import check_socket_path

_ATTEMPTS = 100


class AlreadyRunningError(TaskQError):
    """Another supervisor runs this group."""

    exit_code = ExitCode.TRY_AGAIN


class GroupFiles:
    """The files of one group. Nobody else has them while the lock is held.

    A lock, not a pid file: the kernel gives it back however its holder ends, and a pid may be anybody's
    later.
    """

    def __init__(self, directory: str, group: str) -> None:
        self._group = group
        self.directory = directory
        """The runtime directory, which other groups may share."""
        self._lock_path = os.path.join(directory, f"{group}.lock")
        self._lock: int | None = None
        self._children = os.path.join(directory, group)
        self.socket = os.path.join(directory, f"{group}.sock")
        """The group's own socket."""
        self.record = os.path.join(directory, f"{group}.state.json")
        """Which workers run as which processes."""

    def child_socket(self, name: str, index: int, *, second: bool = False) -> str:
        """Return the health socket of one child; of the ``second`` while two of one name live."""
        return os.path.join(self._children, f"{name}.{index}{'.next' if second else ''}.sock")

    def prepare_child_socket(self, name: str, index: int, *, second: bool = False) -> str:
        """Return the health socket of a child that is about to start, with nothing of a predecessor in its way."""
        path = self.child_socket(name, index, second=second)
        # What fails here is the child's to report: it will not be able to listen.
        with contextlib.suppress(OSError):
            os.makedirs(self._children, mode=0o700, exist_ok=True)  # somebody may clean temporary files
            os.unlink(path)
        return path

    def settle_child_socket(self, path: str, name: str, index: int) -> str:
        """Move the socket at ``path`` to the usual place of its child, whose namesake has ended; return where it is."""
        usual = self.child_socket(name, index)
        if path == usual:
            return path
        try:
            os.rename(path, usual)  # who listens on it goes on to
        except OSError:
            return path  # it does not listen yet, or has no socket
        return usual

    def check_paths(self, slots: Iterable[tuple[str, int]]) -> None:
        """Raise ``ConfigError`` when a socket's path would be longer than the kernel allows."""
        for path in (self.socket, *(self.child_socket(name, index) for name, index in slots)):
            check_socket_path(path)

    def acquire(self) -> None:
        """Take the lock. Raises ``AlreadyRunningError`` that names the holder."""
        for _ in range(_ATTEMPTS):
            lock = self._open()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(lock, 32).decode("ascii", "replace").strip()
                os.close(lock)
                who = f"process {holder}" if holder else "another process"
                raise AlreadyRunningError(
                    f"workgroup {self._group!r} is already running: {who} holds {self._lock_path}"
                ) from None
            if self._is_current(lock):
                self._keep(lock)
                return
            os.close(lock)  # its holder removed the file between our open and our lock
        raise AlreadyRunningError(f"workgroup {self._group!r}: {self._lock_path} changes hands all the time")

    def restore(self) -> bool:
        """Make again what somebody has removed of the directories and the lock; True when something was missing.

        Raises ``ConfigError`` when that is not possible, ``AlreadyRunningError`` when another supervisor has the place.
        """
        if self._lock is None or (self._is_current(self._lock) and os.path.isdir(self._children)):
            return False
        fault = _fault(self.directory, make_parents=True)
        if fault:
            raise ConfigError(f"the runtime directory {self.directory!r} was removed, and {fault}")
        if not self._is_current(self._lock):
            before, self._lock = self._lock, None
            try:
                self.acquire()
            except BaseException:
                self._lock = before
                raise
            os.close(before)
        os.makedirs(self._children, mode=0o700, exist_ok=True)
        return True

    def release(self) -> None:
        """Remove what belongs to the group and give the lock back. Safe to call without holding it."""
        if self._lock is None:
            return
        if self._is_current(self._lock):  # else it was removed, and what is there now is another supervisor's
            with contextlib.suppress(OSError):  # cleaned by somebody else, or not empty: not worth a failed stop
                for name in os.listdir(self._children):
                    os.unlink(os.path.join(self._children, name))
                os.rmdir(self._children)
            with contextlib.suppress(OSError):
                os.unlink(self._lock_path)
        os.close(self._lock)
        self._lock = None

    def _open(self) -> int:
        try:
            return os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"cannot open the group's lock {self._lock_path!r}: {why}") from None

    def _is_current(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self._lock_path))
        except OSError:  # it is gone, or somebody may no longer look there
            return False

    def _keep(self, lock: int) -> None:
        with contextlib.suppress(OSError):  # on a full disk nobody is told who holds it
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        os.makedirs(self._children, mode=0o700, exist_ok=True)
        self._lock = lock


def choose_directory(wanted: str | None) -> str:
    """Return a usable runtime directory, made if need be: ``wanted``, else the first good standard one.

    Raises ``ConfigError`` that says what is wrong with it, or with each.
    """
    if wanted is not None:
        path = os.path.abspath(wanted)
        fault = _fault(path, make_parents=True)
        if fault:
            raise ConfigError(f"[supervisor] runtime_dir = {wanted!r}: {fault}")
        return path
    faults = []
    for path in runtime_directories():
        fault = _fault(path, make_parents=False)
        if not fault:
            return path
        faults.append(f"{path}: {fault}")
    raise ConfigError("no usable runtime directory, set [supervisor] runtime_dir: " + "; ".join(faults))


def _fault(path: str, *, make_parents: bool) -> str:
    """Return why ``path`` cannot be used, or an empty string."""
    try:
        if make_parents:
            os.makedirs(path, mode=0o700, exist_ok=True)
        elif not os.path.lexists(path):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
    except OSError as error:
        return f"cannot be made: {error.strerror or error}"
    # A directory that anybody may make beforehand, as in /tmp, must be shown to be ours alone.
    shared = os.stat(os.path.dirname(path)).st_mode & stat.S_IWOTH
    if shared and (stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077):
        return "must be a directory of this user with mode 0700, as its parent is writable by others"
    if not os.path.isdir(path):
        return "is not a directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return "is not writable"
    return ""
