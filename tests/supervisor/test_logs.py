"""What processes print: inherited, or captured with the name before each line."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from taskqd.supervisor.capture import KEPT, LONGEST_LINE, TAIL, Capture
from tests.supervisor.conftest import RUNNER, StartGroup
from tests.support import Command, child_environment, eventually, taskqd_argv, wait_until

QUICK = "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0"
CAPTURE = {"supervisor": f'{QUICK}\nlogs = "capture"'}


def taskqd(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        taskqd_argv(*args), env=child_environment(), capture_output=True, text=True, timeout=60, check=False
    )


# -- the capture ----------------------------------------------------------------------------------


async def test_lines_are_led_by_the_name_but_json_names_its_process_itself() -> None:
    passed: list[bytes] = []
    capture = Capture("io.0", passed.append, colour=False, width=6)
    writer = capture.open()
    os.write(writer, b"half a li")
    os.write(writer, b'ne\n{"event": "x"}\nno end')
    await eventually(lambda: len(passed) == 2)
    os.close(writer)
    capture.finish()
    assert passed == [b"io.0   | half a line\n", b'{"event": "x"}\n', b"io.0   | no end\n"]
    assert capture.tail() == 'half a line\n{"event": "x"}\nno end'


async def test_colours_tell_neighbours_apart_and_stay_out_of_the_tail() -> None:
    passed: dict[str, list[bytes]] = {"io.0": [], "io.1": []}
    for name, lines in passed.items():
        capture = Capture(name, lines.append, colour=True)
        writer = capture.open()
        os.write(writer, b"\x1b[1mbold\x1b[0m\n")
        os.close(writer)
        capture.finish()
        assert capture.tail() == "bold"
    assert passed["io.0"][0].startswith(b"\x1b[")
    assert passed["io.0"][0][:5] != passed["io.1"][0][:5]


async def test_memory_is_bounded_and_endless_lines_come_in_pieces() -> None:
    passed: list[bytes] = []
    capture = Capture("io.0", passed.append, colour=False)
    writer = capture.open()
    for number in range(1, 41):
        os.write(writer, b"x" * 60_000)
        await eventually(lambda wanted=60_000 * number: capture.total == wanted)  # type: ignore[misc]
    os.close(writer)
    capture.finish()
    assert capture.total == 40 * 60_000 + 1
    assert max(map(len, passed)) <= LONGEST_LINE + 20
    assert len(capture.since(0)) == KEPT


async def test_only_the_last_lines_are_told() -> None:
    capture = Capture("io.0", lambda _line: None, colour=False)
    writer = capture.open()
    os.write(writer, b"".join(b"%d\n" % number for number in range(100)))
    os.close(writer)
    capture.finish()
    assert capture.tail().splitlines() == [str(number) for number in range(100 - TAIL, 100)]
    mark = capture.total
    assert capture.since(mark) == ""
    assert capture.since(mark - 3) == "99\n"


async def test_a_descriptor_that_somebody_keeps_does_not_hold_the_end() -> None:
    capture = Capture("io.0", lambda _line: None, colour=False)
    writer = capture.open()
    os.write(writer, b"last words")
    capture.finish()
    assert capture.tail() == "last words"
    os.close(writer)


# -- groups ---------------------------------------------------------------------------------------


def test_inherited_lines_come_out_as_they_are(group: StartGroup) -> None:
    g = group()
    g.wait_for("ready")
    wait_until(lambda: "ready\n" in g.command.stdout, 20)
    done = taskqd("logs", "--socket", str(g.socket))
    assert done.returncode == 1
    assert "nothing is captured here" in done.stderr
    assert g.stop() == 0, g.command.stderr


def test_captured_lines_carry_the_name_and_the_last_ones_explain_an_end(group: StartGroup) -> None:
    g = group(modes={"io": "crash-ready,once"}, tables=CAPTURE)
    end = g.wait_for("child-exit")[0]
    assert "RuntimeError: crashed after it was ready" in end["output"]
    g.wait_for("ready", 2)
    assert "io.0         | ready" in g.command.stderr
    done = taskqd("logs", "io.0", "--socket", str(g.socket))
    assert "RuntimeError: crashed after it was ready" in done.stdout
    assert "RuntimeError" in taskqd("logs", "--socket", str(g.socket)).stdout
    done = taskqd("logs", "oi.0", "--socket", str(g.socket))
    assert (done.returncode, done.stderr) == (1, "error: no process 'oi.0' (did you mean 'io.0'?)\n")
    assert g.stop() == 0, g.command.stderr
    assert "output" not in g.events("child-exit")[-1], "a good end needs no explanation"


def test_following_goes_on_with_what_is_printed_later(group: StartGroup, start: Callable[..., Command]) -> None:
    g = group(tables=CAPTURE)
    pid = int(g.wait_for("ready")[0]["pid"])
    following = start("logs", "-f", "io", "--socket", str(g.socket))
    wait_until(lambda: "ready" in following.stdout, 20)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: "sigterm" in following.stdout, 20)
    following.signal(signal.SIGINT)
    assert following.wait() == 0
    assert g.stop() == 0, g.command.stderr


@pytest.mark.parametrize("preload", ["auto", "off"])
def test_real_workers_are_captured_however_they_are_made(
    start: Callable[..., Command], short_dir: Path, child_env: dict[str, str], preload: str
) -> None:
    (short_dir / "group_actors.py").write_text(
        "from pydantic import BaseModel\nfrom taskqd import actor\nclass Nothing(BaseModel): pass\n"
        "@actor\nasync def nothing(payload: Nothing) -> None: pass\nregistry = [nothing]\n"
    )
    (short_dir / "group.toml").write_text(
        'actors = "group_actors:registry"\n'
        f'[supervisor]\nruntime_dir = "run"\nlogs = "capture"\npreload = "{preload}"\n'
        '[scheduler]\nenabled = false\n[[workers]]\nname = "io"\n'
    )
    command = start("run", "group.toml", env=child_env)
    wait_until(lambda: '"event": "ready"' in command.stderr, 60, command.stderr)
    socket = str(short_dir / "run" / "group.sock")
    wait_until(lambda: '"event": "worker-ready"' in taskqd("logs", "io.0", "--socket", socket).stdout, 30)
    (line,) = [line for line in command.stderr.splitlines() if '"event": "worker-ready"' in line]
    assert json.loads(line)["worker"] == "io.0"
    command.process.terminate()
    assert command.wait() == 0, command.stderr


def test_on_a_terminal_lines_are_captured_and_progress_stands_below_them(group: StartGroup, short_dir: Path) -> None:
    g = group(modes={"io": "lazy"}, tables={"[workers]": "replicas = 3"})
    g.wait_for("ready")
    assert g.stop() == 0
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", str(RUNNER), str(g.directory / "group.toml"), "io=lazy"],
        cwd=g.directory,
        env={**g._env, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    try:
        seen = b""
        while seen.count(b"| \x1b[0mready") < 3:
            seen += os.read(master, 65536)
        process.terminate()
        with contextlib.suppress(OSError):  # nobody holds the other end any more
            while part := os.read(master, 65536):
                seen += part
        assert process.wait(30) == 0
        assert b"starting " in seen
        assert b"0/3 ready" in seen
        assert b"stopping " in seen
        left = [line.rpartition(b"\r\x1b[K")[2] for line in seen.split(b"\n")]
        assert not [line for line in left if b"starting " in line or b"stopping " in line], "nothing of it stays"
    finally:
        process.kill()
        process.wait(10)
        os.close(master)
