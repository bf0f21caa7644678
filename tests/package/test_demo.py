"""What the demo does about a run that was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "sources"


def test_processes_that_were_killed_do_not_keep_postgres_running(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(30)
    users = tmp_path / "users.json"
    code = "import sys; from pathlib import Path; import demo; demo.forget_killed_users(Path(sys.argv[1]))"
    for text, left in (
        (f"[{ended.pid}, {os.getpid()}]", [os.getpid()]),
        ("[]", []),
        ("", None),  # cut off while it was written
    ):
        users.write_text(text)
        subprocess.run([sys.executable, "-c", code, str(users)], cwd=EXAMPLE, check=True, timeout=60)
        assert users.read_text() == text if left is None else json.loads(users.read_text()) == left
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "none.json")], cwd=EXAMPLE, check=True, timeout=60)
