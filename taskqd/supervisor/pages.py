"""The pages of memory that a process has for itself, and having the same ones beforehand.

A fork shares every page until it writes to it; then it gets a copy. Forks of one process write to nearly the same pages
on their way up, a thousand or more, and each costs a fault.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
from collections.abc import Iterator, Sequence

Pages = Sequence[tuple[int, int]]
"""Runs of pages: the address of the first, and how many bytes."""

_MADV_POPULATE_WRITE = 23
_PRESENT, _EXCLUSIVE = 1 << 63, 1 << 56
"""Of an entry of the kernel's page map: the page is in memory; no other process has it."""
_ENTRY = 8


def written_by(pid: int) -> Pages:
    """Return the pages that the fork ``pid`` of this process no longer shares; none where the system does not say."""
    found: list[tuple[int, int]] = []
    size = os.sysconf("SC_PAGESIZE")
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for begin, end in _writable():
            entries = array.array("Q")
            entries.frombytes(os.pread(pagemap.fileno(), (end - begin) // size * _ENTRY, begin // size * _ENTRY))
            found += _runs(entries, begin, size)
    return found


def write_to(pages: Pages) -> None:
    """Get a copy of each of ``pages`` of this process, whose contents stay. Does nothing where the system cannot."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, size in pages:
        advise(begin, size, _MADV_POPULATE_WRITE)


def _writable() -> Iterator[tuple[int, int]]:
    """Yield the private mappings of this process that it may write to."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, access, _ = line.split(None, 2)
            if access.startswith("rw") and access.endswith("p"):
                begin, end = span.split("-")
                yield int(begin, 16), int(end, 16)


def _runs(entries: Sequence[int], begin: int, size: int) -> Iterator[tuple[int, int]]:
    wanted = _PRESENT | _EXCLUSIVE
    first: int | None = None
    for position, entry in enumerate([*entries, 0]):
        if entry & wanted == wanted:
            first = position if first is None else first
        elif first is not None:
            yield begin + first * size, (position - first) * size
            first = None
