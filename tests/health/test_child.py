"""The first lines of a supervised child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support import Command, child_environment, wait_until

ARM = "from taskqd.health.child import arm; arm(); "


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ARM + code],
        env=child_environment(**environ),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_child_of_somebody_else_ends_with_75() -> None:
    assert run("print('alive')", TASKQD_SUPERVISOR_PID="1").returncode == 75


def test_a_child_of_its_supervisor_goes_on_and_passes_the_bond_on_to_nobody() -> None:
    done = run("import os; print('TASKQD_SUPERVISOR_PID' in os.environ)", TASKQD_SUPERVISOR_PID=str(os.getpid()))
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_without_a_supervisor_it_only_shows_its_stack_when_asked(tmp_path: Path) -> None:
    code = ARM + "import time; print('up', flush=True); time.sleep(1000)"
    command = Command([sys.executable, "-c", code], tmp_path, child_environment())
    try:
        wait_until(lambda: "up" in command.stdout)
        command.signal(signal.SIGUSR1)
        wait_until(lambda: "most recent call first" in command.stderr)
        assert command.process.poll() is None
    finally:
        command.end()


def test_stacks_and_uncaught_errors_go_to_the_file_that_the_supervisor_reads() -> None:
    dump = os.memfd_create("test")
    try:
        done = subprocess.run(
            [sys.executable, "-c", ARM + "raise RuntimeError('the last words')"],
            env=child_environment(TASKQD_DUMP_FD=str(dump)),
            pass_fds=[dump],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert "the last words" in done.stderr
        assert "the last words" in os.pread(dump, 65536, 0).decode()
    finally:
        os.close(dump)
