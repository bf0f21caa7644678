"""What a fork makes goes to pages of its own: those that it shares stay shared."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import child_environment

SCRIPT = """
import json, os, resource, sys
from taskqd.supervisor.heap import fill_gaps

kept = [(number, str(number)) for number in range(200_000)]
del kept[1::2]  # every page is half empty now
taken = fill_gaps() if sys.argv[1] == "filled" else 0
reader, writer = os.pipe()
if os.fork() == 0:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [(number, str(number)) for number in range(20_000)]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    os.write(writer, json.dumps({"taken": taken, "faults": faults}).encode())
    os._exit(0)
os.wait()
print(os.read(reader, 1000).decode())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux only")
def test_a_fork_does_not_use_the_gaps_in_shared_pages() -> None:
    def run(way: str) -> dict[str, int]:
        command = [sys.executable, "-c", SCRIPT, way]
        done = subprocess.run(command, env=child_environment(), check=True, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""  # the interpreter's statistics are printed there
        found: dict[str, int] = json.loads(done.stdout)
        return found

    filled, plain = run("filled"), run("plain")
    assert filled["taken"] > 1_000_000
    assert filled["faults"] < plain["faults"]


def test_what_a_start_needed_once_goes_back_to_the_system() -> None:
    script = """
import ctypes
from taskqd.supervisor.heap import give_back

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

parts = [bytearray(10_000) for _ in range(5000)]
parts = parts[49::50]  # what still is in use behind the rest keeps the library from returning it by itself
before = resident()
give_back()
print(before - resident())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment(), check=True, capture_output=True, text=True, timeout=60
    )
    assert int(done.stdout) > 10_000_000
