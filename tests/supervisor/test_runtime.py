"""Where a group lives in the file system."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taskqd.domain.errors import ConfigError
from taskqd.health.probe import runtime_directories
from taskqd.supervisor.runtime import AlreadyRunningError, GroupFiles, choose_directory


def test_the_standard_directories_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/a:/run/b")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert runtime_directories() == [
        "/run/a",
        "/run/user/7/taskqd",
        "/run/taskqd",
        f"/tmp/taskqd-{os.getuid()}",
    ]


def test_the_first_usable_one_is_taken_and_made(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/proc/nothing")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    assert choose_directory(None) == f"{short_dir}/taskqd"
    assert (short_dir / "taskqd").stat().st_mode & 0o777 == 0o700


def test_the_lock_is_exclusive_names_its_holder_and_is_given_back(short_dir: Path) -> None:
    first, second = GroupFiles(str(short_dir), "g"), GroupFiles(str(short_dir), "g")
    first.acquire()
    with pytest.raises(AlreadyRunningError, match=f"process {os.getpid()} holds {short_dir}/g.lock"):
        second.acquire()
    first.release()
    assert list(short_dir.iterdir()) == []
    second.acquire()
    second.release()


def test_another_group_has_its_own_lock(short_dir: Path) -> None:
    first, second = GroupFiles(str(short_dir), "a"), GroupFiles(str(short_dir), "b")
    first.acquire()
    second.acquire()
    first.release()
    second.release()


def test_a_lock_that_is_a_link_is_not_followed(short_dir: Path) -> None:
    (short_dir / "g.lock").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="cannot open the group's lock"):
        GroupFiles(str(short_dir), "g").acquire()


def test_a_directory_that_was_cleaned_is_made_again(short_dir: Path) -> None:
    files = GroupFiles(str(short_dir), "g")
    files.acquire()
    (short_dir / "g").rmdir()
    assert files.prepare_child_socket("io", 0) == f"{short_dir}/g/io.0.sock"
    assert (short_dir / "g").is_dir()
    files.release()
