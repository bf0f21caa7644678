"""The supervisor stays in memory for as long as the group lives: what it imports is counted here."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support import child_environment

SCRIPT = """
import asyncio, json, logging, sys, tomllib
before = set(sys.modules)
import taskqd.cli.run, taskqd.supervisor.group
print(json.dumps(sorted(set(sys.modules) - before)))
"""
HEAVY = {"argparse", "difflib", "hashlib", "pathlib", "platform", "random", "urllib.parse", "uuid"}
"""Modules that cost a hundred kilobytes and more, and that something else can do instead or only when it is needed."""


def test_the_supervisor_imports_little_that_every_such_process_does_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=child_environment(), check=True, capture_output=True, text=True, timeout=60
    )
    loaded = set(json.loads(done.stdout))
    assert not HEAVY & loaded


def test_the_supervisor_does_without_tls() -> None:
    script = "import sys; from taskqd.cli.main import main; main(['run', 'none.toml']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment(), check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == "error: none.toml: no such file\n"
    loaded = done.stdout.split()
    assert "asyncio" in loaded
    assert not {"ssl", "_ssl"} & set(loaded)
