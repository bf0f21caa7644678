"""A file system that never answers: whoever looks into it hangs in the kernel, and no signal ends him."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.matrix.oracle import needs
from tests.support import wait_until

_MNT_FORCE, _MNT_DETACH = 1, 2
_INIT = 26
_IN_HEADER = struct.Struct("=IIQQIIII")
_INIT_IN = struct.Struct("=IIII")
_OUT_HEADER = struct.Struct("=IiQ")
_INIT_OUT = struct.Struct("=IIIIHHIIHHI28x")


class StuckPlace:
    """The mount, and the kernel's end of it."""

    def __init__(self, path: Path, device: int) -> None:
        self.path = path
        self._device = device

    def somebody_hangs(self) -> bool:
        """True once the kernel has passed somebody's question on, which nobody will answer."""
        try:
            return len(os.read(self._device, 1 << 20)) > 0
        except BlockingIOError:
            return False

    def introduce(self) -> bool:
        """Answer the one question that the kernel itself asks: which protocol is spoken."""
        try:
            request = os.read(self._device, 1 << 20)
        except BlockingIOError:
            return False
        _, operation, number, *_ = _IN_HEADER.unpack_from(request)
        assert operation == _INIT, operation
        major, minor, ahead, _ = _INIT_IN.unpack_from(request, _IN_HEADER.size)
        answer = _INIT_OUT.pack(major, min(minor, 31), ahead, 0, 12, 9, 4096, 1, 1, 0, 0)
        os.write(self._device, _OUT_HEADER.pack(_OUT_HEADER.size + len(answer), 0, number) + answer)
        return True


@contextlib.contextmanager
def stuck_place() -> Iterator[StuckPlace]:
    """Mount such a file system. At the end it is gone, and who hung in it goes on."""
    device = -1
    with contextlib.suppress(OSError):
        device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    needs(device >= 0, "FUSE (/dev/fuse), for a process that hangs in the kernel")
    libc = ctypes.CDLL(None, use_errno=True)
    path = Path(tempfile.mkdtemp(prefix="tqstuck", dir="/tmp"))
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    mounted = libc.mount(b"stuck", str(path).encode(), b"fuse", 0, options.encode()) == 0
    try:
        needs(mounted, "the right to mount a FUSE file system, for a process that hangs in the kernel")
        place = StuckPlace(path, device)
        wait_until(place.introduce, 10, "the kernel introduces itself")
        yield place
    finally:
        os.close(device)
        if mounted:
            libc.umount2(str(path).encode(), _MNT_FORCE | _MNT_DETACH)
        path.rmdir()
