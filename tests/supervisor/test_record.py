"""What a supervisor leaves for its successor, and when a recorded process is certainly gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from taskqd.supervisor.record import Entry, Record, boot_id, is_gone, pid_namespace, start_time
from tests.support import wait_until


def entry(pid: int) -> Entry:
    return Entry("w", pid, start_time(pid), boot_id(), pid_namespace(), under_init=False)


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield process  # type: ignore[misc]
    process.kill()
    process.wait(10)


def test_what_was_added_is_read_back_and_what_was_settled_is_not(tmp_path: Path) -> None:
    path = tmp_path / "g.state.json"
    record = Record(str(path))
    assert (record.entries, record.fault) == ((), "")
    record.add("a", os.getpid())
    record.add("b", os.getpid())
    record.forget(["a", "never there"])
    again = Record(str(path))
    assert [found.worker_id for found in again.entries] == ["b"]
    assert again.entries[0].start_time == start_time(os.getpid())
    assert path.stat().st_mode & 0o777 == 0o600
    again.forget(["b"])
    assert list(tmp_path.iterdir()) == []


def test_settling_what_is_not_there_writes_nothing(tmp_path: Path) -> None:
    Record(str(tmp_path / "x")).forget(["a"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"v": 2, "workers": []}', '{"v": 1, "workers": [{"pid": 1}]}', "\x00"]
)
def test_an_unreadable_file_is_told_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "g.state.json"
    path.write_text(text)
    record = Record(str(path))
    assert record.entries == ()
    assert str(path) in record.fault
    record.add("a", os.getpid())
    assert len(json.loads(path.read_text())["workers"]) == 1


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "g.state.json"
    path.symlink_to(target)
    record = Record(str(path))
    assert record.fault
    record.add("a", os.getpid())
    assert target.read_text() == "precious"
    assert not path.is_symlink()


def test_a_directory_that_vanished_does_not_stop_the_supervisor(tmp_path: Path) -> None:
    record = Record(str(tmp_path / "gone" / "g.state.json"))
    record.add("a", os.getpid())
    assert "a" in record


def test_a_living_process_is_never_gone(sleeper: subprocess.Popen[bytes]) -> None:
    assert not is_gone(entry(sleeper.pid), 1000)


def test_a_zombie_and_an_absent_process_are_gone(sleeper: subprocess.Popen[bytes]) -> None:
    recorded = entry(sleeper.pid)
    sleeper.kill()
    wait_until(lambda: is_gone(recorded, 0))  # nobody has waited for it: a zombie
    sleeper.wait(10)
    assert is_gone(recorded, 0)


def test_another_process_under_the_same_pid_is_not_it(sleeper: subprocess.Popen[bytes]) -> None:
    recorded = entry(sleeper.pid)
    assert recorded.start_time is not None
    assert is_gone(replace(recorded, start_time=recorded.start_time - 1), 0)


def test_another_boot_has_ended_everything() -> None:
    assert is_gone(replace(entry(os.getpid()), boot_id="another"), 0)


@pytest.mark.parametrize(
    ("under_init", "held_for", "gone"), [(True, 1.0, True), (True, 0.5, False), (False, 99, False)]
)
def test_a_pid_of_another_namespace_says_nothing_unless_its_init_died(
    under_init: bool, held_for: float, gone: bool
) -> None:
    recorded = replace(entry(1), pid_namespace="pid:[1]", under_init=under_init)
    assert is_gone(recorded, held_for) is gone


def test_nothing_is_proven_where_the_system_tells_nothing() -> None:
    assert not is_gone(replace(entry(os.getpid()), start_time=None), 1000)
    assert not is_gone(replace(entry(os.getpid()), boot_id=None), 1000)


def test_a_name_with_parentheses_and_blanks_does_not_confuse_the_start_time(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "1000"])
    try:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith("a)"))
        assert start_time(process.pid) == int(
            Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        )
    finally:
        process.kill()
        process.wait(10)
