"""A fork has copies of the pages that another one has written to, before it writes to them itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import child_environment

SCRIPT = """
import json, mmap, os, resource, sys
from taskqd.supervisor.pages import write_to, written_by

PAGES, SIZE = 400, mmap.PAGESIZE
shared = mmap.mmap(-1, PAGES * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(PAGES):
    shared[page * SIZE] = 7

def write():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for page in range(0, PAGES, 2):
        assert shared[page * SIZE] == 7, "what is on a page stays"
        shared[page * SIZE] = 8
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def fork(work):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(work()).encode())
        os.read(held, 1)
        os._exit(0)
    return pid, json.loads(os.read(reader, 100))

def prepared():
    write_to(pages)
    return write()

held, let_go = os.pipe()
first, plain = fork(write)
pages = written_by(first)
second, after = fork(prepared)
os.close(let_go)
os.kill(first, 9), os.kill(second, 9), os.wait(), os.wait()
print(json.dumps({"plain": plain, "after": after, "pages": sum(size for _, size in pages) // SIZE}))
print(json.dumps(written_by(first)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux only")
def test_a_fork_writes_without_a_fault_where_another_one_has_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=child_environment(), check=True, capture_output=True, text=True, timeout=60
    )
    found, of_the_dead = map(json.loads, done.stdout.splitlines())
    assert found["plain"] >= 200
    assert found["pages"] >= 200
    assert found["after"] < 20
    assert of_the_dead == []
