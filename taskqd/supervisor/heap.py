"""The memory of a process: what is allocated where, and what goes back to the system.

A process that has imported much has free places on most pages of its memory. A fork that puts a new object into such
a place gets its own copy of the whole page, so that a few small objects cost it megabytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys

_SIZES = re.compile(r"^ +\d+ +(\d+) +\d+ +\d+ +(\d+)$", re.MULTILINE)
"""A line of the interpreter's statistics: the size of a block, and how many of that size are free on used pages."""


def fill_gaps() -> int:
    """Take the free blocks of all pages that are in use, for good; return how many bytes they were.

    What is allocated next comes from new pages. Does nothing where the interpreter does not tell what is free.
    """
    if not hasattr(sys, "_debugmallocstats") or not hasattr(os, "memfd_create"):
        return 0
    allocate = ctypes.pythonapi.PyObject_Malloc
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    taken = 0
    for size, free in _SIZES.findall(_statistics()):
        for _ in range(int(free)):
            allocate(int(size))
        taken += int(size) * int(free)
    return taken


def give_back() -> None:
    """Return to the system what was used once and is free: a start needs much that nothing needs afterwards."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only the GNU library has it
        ctypes.CDLL(None).malloc_trim(0)


def _statistics() -> str:
    """Return what the interpreter says of its memory, which it prints to standard error alone."""
    kept = os.dup(2)
    file = os.memfd_create("statistics")
    try:
        os.dup2(file, 2)
        sys._debugmallocstats()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    with open(file, encoding="ascii", errors="replace") as text:
        text.seek(0)
        return text.read()
