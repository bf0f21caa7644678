"""The form of a process's log lines, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from taskqd.health.probe import main as probe
from taskqd.observe.sink import LINE_LIMIT
from tests.support import child_environment, wait_until

START = """\
import logging, os, sys, time
from taskqd.observe import logs
logs.configure("{format}", "INFO", worker="io.0")
log = logs.get_logger("test")
"""


def run(program: str, format: str = "json") -> tuple[int, list[bytes]]:
    """The exit code and the lines that ``program`` logs."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", START.format(format=format) + program],
        env=child_environment(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def events(lines: list[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_what_was_logged_last_is_out_when_the_process_ends() -> None:
    code, lines = run("for number in range(300): log.info('counted', number=number)")
    assert code == 0
    found = events(lines)
    assert [event["number"] for event in found] == list(range(300))
    assert {event["worker"] for event in found} == {"io.0"}


def test_a_hard_exit_after_a_flush_loses_nothing() -> None:
    code, lines = run("log.error('last words'); logs.flush(); os._exit(7)")
    assert code == 7
    assert [event["event"] for event in events(lines)] == ["last words"]


@pytest.mark.parametrize(
    "call",
    [
        "log.info('long', text='x' * 100_000)",
        "log.info('long', text='é\\n\\\"' * 50_000, other='y' * 9_000)",
        "log.info('long', value=list(range(10_000)))",
        "log.info('long', **{f'field{n}': 'z' * 500 for n in range(40)})",
        "logging.getLogger('app').info('long ' + 'w' * 100_000)",
    ],
    ids=["one field", "escapes", "no text", "many fields", "the standard library's"],
)
def test_no_line_is_too_long_and_each_stays_whole_json(call: str) -> None:
    _, lines = run(call)
    (line,) = lines
    assert len(line) < LINE_LIMIT
    (event,) = events(lines)
    assert event["event"].startswith("long")
    assert "characters cut" in line.decode() or "characters cut" in json.dumps(event, ensure_ascii=False)


def test_a_traceback_keeps_its_beginning_and_its_end() -> None:
    _, lines = run(
        "def down(n):\n"
        "    if n == 0: raise ValueError('the reason')\n"
        "    down(n - 1) if n % 2 else (lambda: down(n - 1))()\n"
        "try: down(200)\n"
        "except ValueError: log.exception('failed')\n"
    )
    (event,) = events(lines)
    assert event["exception"].startswith("Traceback")
    assert event["exception"].endswith("ValueError: the reason")


def test_of_more_fields_than_a_line_can_hold_what_happened_is_kept() -> None:
    _, lines = run("log.info('long', **{f'field{n}': n for n in range(2_000)})")
    (event,) = events(lines)
    assert (event["event"], event["worker"], event["level"]) == ("long", "io.0", "info")
    assert event["fields_cut"] == 2_000


def test_the_console_form_is_bounded_too() -> None:
    _, lines = run("log.info('long', text='x' * 100_000)", "console")
    assert sum(len(line) + 1 for line in lines) <= LINE_LIMIT


def test_a_stuck_reader_neither_holds_the_process_nor_keeps_it_from_ending() -> None:
    reader, writer = os.pipe()
    program = START.format(format="json") + (
        "slowest = 0\n"
        "for number in range(20_000):\n"
        "    began = time.perf_counter()\n"
        "    log.info('counted', number=number)\n"
        "    slowest = max(slowest, time.perf_counter() - began)\n"
        "print(slowest, logs.dropped())\n"
    )
    try:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=writer,
            timeout=60,
            check=True,
        )
        assert time.monotonic() - began < 30
    finally:
        os.close(reader)
        os.close(writer)
    slowest, dropped = done.stdout.split()
    assert float(slowest) < 1.0
    assert int(dropped) > 15_000


def test_a_reader_that_comes_back_is_told_what_it_missed() -> None:
    reader, writer = os.pipe()
    program = START.format(format="json") + (
        "for number in range(20_000): log.info('counted', number=number)\n"
        "print('full', flush=True)\n"
        "sys.stdin.read()\n"
        "log.info('after')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=writer,
    )
    os.close(writer)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"full\n"
        data = os.read(reader, 2**20)
        while b"log-lines-dropped" not in data:
            data += os.read(reader, 2**20)
        process.stdin.close()
        while part := os.read(reader, 2**20):
            data += part
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
        os.close(reader)
    found = events(data.splitlines())
    counted = sum(event["event"] == "counted" for event in found)
    missed = sum(event["count"] for event in found if event["event"] == "log-lines-dropped")
    assert counted + missed == 20_000
    assert found[-1]["event"] == "after"


def test_a_worker_on_a_stuck_standard_error_works_on(child_env: dict[str, str], short_dir: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"-" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    (short_dir / "jobs.py").write_text(
        "from pydantic import BaseModel\nfrom taskqd import actor\n"
        "class Nothing(BaseModel): pass\n"
        "@actor\nasync def nothing(payload: Nothing) -> None: pass\nactors = [nothing]\n"
    )
    socket = short_dir / "w.sock"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "taskqd", "worker", "--actors", "jobs:actors"],
        cwd=short_dir,
        env=child_env
        | {"PYTHONPATH": f"{short_dir}:{child_env['PYTHONPATH']}", "TASKQ_HEALTH_SOCKET_PATH": str(socket)},
        stdin=subprocess.DEVNULL,
        stderr=writer,
    )
    try:
        wait_until(lambda: socket.exists() and probe(["ready", "--socket", str(socket)]) == 0, 60)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(reader)
        os.close(writer)
