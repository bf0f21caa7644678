"""pgqueuer on the same work, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.ground import PATIENCE, ROOT

BATCH = 100


def drain_pgqueuer(dsn: str, jobs: int) -> float:
    """Return its jobs per second, from the first handler call to the last."""
    command = [sys.executable, "-m", "benchmarks.peer_pgqueuer", dsn, str(jobs), str(BATCH)]
    answer = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE)
    return float(json.loads(answer.stdout)["jobs_per_second"])
