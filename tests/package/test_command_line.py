"""The command line: exit codes, one message per error, help that comes at once."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from taskqd import __version__
from taskqd.cli import main as command_line
from taskqd.domain.errors import DatabaseUnavailableError, RegistryError
from tests.support import child_environment, taskqd_argv


def taskqd(*args: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in an empty directory."""
    return subprocess.run(
        taskqd_argv(*args),
        cwd=directory,
        env=child_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version(tmp_path: Path) -> None:
    done = taskqd("--version", directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"taskqd {__version__}\n")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command(flag: str, tmp_path: Path) -> None:
    done = taskqd(flag, directory=tmp_path)
    assert done.returncode == 0
    for command in ("run", "check", "budget", "health", "worker", "scheduler", "migrate"):
        assert f"\n  {command} " in done.stdout


def test_help_comes_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    taskqd("--help", directory=tmp_path)
    assert time.monotonic() - started < 1.5  # ten times what it takes


@pytest.mark.parametrize("command", ["worker", "migrate", "scheduler"])
def test_each_command_has_help(command: str, tmp_path: Path) -> None:
    done = taskqd(command, "--help", directory=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: taskqd {command} ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["wroker"], "unknown command 'wroker' (did you mean 'worker'?)"),
        (["xyzzy"], "unknown command 'xyzzy'"),
        (["--verbose"], "No such option '--verbose'"),
        (["worker"], "Missing option '--actors'"),
        (["worker", "--actors", "a:b", "--max-concurency", "3"], "--max-concurrency"),
        (["scheduler", "run", "--twice"], "No such option '--twice'"),
    ],
)
def test_wrong_usage_is_explained_and_ends_with_2(args: Sequence[str], message: str, tmp_path: Path) -> None:
    done = taskqd(*args, directory=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_refused_settings_end_with_78_and_one_message(tmp_path: Path) -> None:
    done = taskqd(
        "worker", "--actors", "a:b", "--max-concurrency", "0", directory=tmp_path, TASKQ_HEARTBEAT_INTERVAL="99m"
    )
    assert done.returncode == 78
    assert done.stderr == (
        "error: settings refused, 2 problems:\n"
        "  --max-concurrency = '0': must be a whole number from 1 to 10000\n"
        "  TASKQ_HEARTBEAT_INTERVAL = '99m' (environment): must be a duration from 0.5 to 300 seconds\n"
    )


@pytest.mark.parametrize("command", [["worker", "--actors", "a:b"], ["scheduler", "run"], ["migrate", "status"]])
def test_an_unknown_variable_stops_every_process(command: Sequence[str], tmp_path: Path) -> None:
    done = taskqd(*command, directory=tmp_path, TASKQ_LOCK_LEESE="60")
    assert done.returncode == 78
    assert "TASKQ_LOCK_LEESE (environment): unknown setting (did you mean 'TASKQ_LOCK_LEASE'?)" in done.stderr


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from taskqd.cli import main as m; m._dispatch = lambda argv: print('x' * 1000000); "
            "import sys; sys.exit(m.main([]))",
        ],
        cwd=tmp_path,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(30) == 1
    process.stderr.close()


def _fails_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def dispatch(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(command_line, "_dispatch", dispatch)
    return command_line.main([])


def test_an_expected_error_is_one_line_and_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = DatabaseUnavailableError("the database is down")
    error.__cause__ = ConnectionRefusedError()
    assert _fails_with(error, monkeypatch) == 69
    assert capsys.readouterr().err == "error: the database is down\n"


def test_a_broken_actor_module_shows_its_traceback_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RegistryError("actors = 'a:b' does not import")
    error.__cause__ = ZeroDivisionError("in the module")
    assert _fails_with(error, monkeypatch) == 78
    printed = capsys.readouterr().err
    assert printed.count("ZeroDivisionError: in the module") == 1
    assert printed.endswith("error: actors = 'a:b' does not import\n")


def test_an_unexpected_error_shows_its_traceback_and_ends_with_70(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fails_with(RuntimeError("a defect"), monkeypatch) == 70
    assert "RuntimeError: a defect" in capsys.readouterr().err


def test_an_interrupt_ends_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _fails_with(KeyboardInterrupt(), monkeypatch) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_no_obstacle(closed: tuple[int, ...], tmp_path: Path) -> None:
    closing = "; ".join(f"os.close({number})" for number in closed)
    show = "os.stat(0).st_rdev, os.stat(1).st_rdev, os.stat(2).st_rdev"
    # A new interpreter, which finds them closed; its child is what a supervisor would start.
    code = (
        "import subprocess, sys; from taskqd.cli import main as m; "
        f"m._dispatch = lambda argv: subprocess.call([sys.executable, '-c', 'import os; {show}; print(1)']); "
        "sys.exit(m.main([]))"
    )
    starting = f"import os, sys; {closing}; os.execv(sys.executable, [sys.executable, '-c', {code!r}])"
    done = subprocess.run(
        [sys.executable, "-c", starting],
        cwd=tmp_path,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if 1 in closed else "1\n")


@pytest.mark.parametrize("command", [["run", "group.toml"], ["worker", "--actors", "a:b"], ["migrate", "status"]])
def test_a_working_directory_that_is_gone_is_one_message(command: Sequence[str], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from taskqd.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *command],
        cwd=gone,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 78
    message = "error: the working directory cannot be used (No such file or directory): start in one that exists\n"
    assert done.stderr == message
