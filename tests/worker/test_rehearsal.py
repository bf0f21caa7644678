"""What is done once before workers are forked leaves nothing that a fork could share, and is not done again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import child_environment

SCRIPT = """
import json, os, sys, threading
from taskqd.actors.registry import load_registry
from taskqd.health.fork_safety import hazards, open_sockets
from taskqd.worker.rehearsal import rehearse

registry = load_registry("tests.apps.basic:actors")
files, sockets = set(os.listdir("/proc/self/fd")), open_sockets()
rehearse(registry)
found = {"hazards": hazards(sockets), "files": sorted(set(os.listdir("/proc/self/fd")) - files)}
known = set(sys.modules)
rehearse(registry)
print(json.dumps(found | {"imported later": sorted(set(sys.modules) - known)}))
"""


@pytest.mark.parametrize("level", ["INFO", "nonsense"], ids=["", "with-settings-that-are-refused"])
def test_a_rehearsal_leaves_no_thread_and_no_socket(level: str) -> None:
    env = child_environment(TASKQ_LOG_LEVEL=level, TASKQ_PG_DSN="postgresql://nobody@192.0.2.1/nothing")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, cwd=os.getcwd(), check=True, capture_output=True, text=True, timeout=60
    )
    found = json.loads(done.stdout)
    # The C library of the event loop keeps a pipe of its own, which it makes anew in every fork.
    assert found["hazards"] == []
    assert len(found["files"]) <= 2
    assert found["imported later"] == []
    assert done.stderr == ""
