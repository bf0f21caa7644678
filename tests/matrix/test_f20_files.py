"""F20: The files of a group are stale, strange, somebody else's or in a bad place: they are taken over, or refused in
words that help. What is removed while the group runs is made again.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.matrix.conftest import Trial
from tests.matrix.oracle import needs, works
from tests.supervisor.asking import edit
from tests.supervisor.conftest import ACTORS, Group
from tests.supervisor.test_bad_input import refused
from tests.support import Command, wait_until


def test_f20_the_next_supervisor_takes_over_what_a_killed_one_left(trial: Trial) -> None:
    with trial(ends=-signal.SIGKILL) as g:
        g.command.signal(signal.SIGKILL)
        g.command.wait()
        assert g.socket.exists(), "a stale socket"
        # The lock of a dead holder, whose number somebody else has now.
        (g.runtime / "group.lock").write_text(f"{os.getpid()}\n")
        again = g.run_again()
        try:
            wait_until(lambda: '"event": "ready"' in again.stderr, 30)
            assert g.ask("/live")[0] == 200
            again.signal(signal.SIGTERM)
            assert again.wait() == 0
        finally:
            again.end()


def test_f20_a_second_instance_is_refused_and_names_the_first(trial: Trial) -> None:
    with trial() as g:
        message = refused(g.run_again(), 75)
        assert message.startswith(f"workgroup 'group' is already running: process {g.command.pid} holds")
        assert g.ask("/live")[0] == 200


@pytest.fixture(scope="module")
def stopped(module_trial: Trial) -> Iterator[Group]:
    """A group that has run once and is to be started again."""
    with module_trial() as g:
        assert g.stop() == 0
        yield g


def test_f20_each_bad_place_is_refused_in_words_that_help(stopped: Group) -> None:
    shared = stopped.directory / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "mine").mkdir(mode=0o755)
    long = "d" * 110
    places = {
        long: f"{len(str(stopped.directory)) + 112 + 10} bytes long, the limit is 107: use a shorter directory",
        "/proc/taskqd": "[supervisor] runtime_dir = '/proc/taskqd': cannot be made: ",
        "group.toml": "[supervisor] runtime_dir = 'group.toml': cannot be made: File exists",
        "/dev/null/x": "[supervisor] runtime_dir = '/dev/null/x': cannot be made: ",
        f"{shared}/mine": "must be a directory of this user with mode 0700",
        "/proc/self": "",
    }
    before = "run"
    for place, why in places.items():
        edit(stopped, (f'"{before}"', f'"{place}"'))
        before = place
        assert why in refused(stopped.run_again(), 78)
    edit(stopped, (f'"{before}"', '"run"'))
    (stopped.directory / long).rmdir()


def test_f20_a_file_in_place_of_the_socket_is_left_alone(stopped: Group) -> None:
    stopped.socket.write_text("precious")
    assert "exists and is not a socket" in refused(stopped.run_again(), 78)
    assert stopped.socket.read_text() == "precious"
    stopped.socket.unlink()


def test_f20_a_read_only_file_system_is_named(stopped: Group) -> None:
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro none "${RUN:-/tmp}" && exec "$@"', "sh"]
    needs(works(*mount, "true"), "the right to mount a file system")
    command = Command([*mount, *stopped.command.argv], stopped.directory, {**stopped._env, "RUN": str(stopped.runtime)})
    assert refused(command, 78) == "[supervisor] runtime_dir = 'run': is not writable"


def test_f20_a_runtime_directory_that_is_removed_comes_back(trial: Trial) -> None:
    with trial(actors=ACTORS) as g:
        wait_until(lambda: list(g.runtime.glob("*.json")), 30)
        before = {str(path.relative_to(g.runtime)) for path in g.runtime.rglob("*")}
        assert before == {"group", "group/io.0.sock", "group.lock", "group.sock", "group.state.json"}
        shutil.rmtree(g.runtime)
        wait_until(lambda: all((g.runtime / path).exists() for path in before), 30)
        told = g.wait_for("files-restored", 2)
        assert [event["what"] for event in told] == [str(g.runtime), str(g.socket)]
        assert g.runtime.stat().st_mode & 0o777 == 0o700
        assert g.socket.stat().st_mode & 0o777 == 0o600
        assert g.ask("/ready")[0] == 200
        assert "taskq_" in g.ask("/metrics")[1]["text"], "its worker is asked at its new socket"
        assert "is already running" in refused(g.run_again(), 75)
        assert not g.events("child-exit")


def test_f20_a_socket_that_is_replaced_is_taken_back_once_nobody_listens_there(trial: Trial) -> None:
    with trial() as g:
        g.socket.unlink()
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(str(g.socket))
            stranger.listen()
            (told,) = g.wait_for("files-lost")
            assert f"another process listens on '{g.socket}'" in told["why"]
            assert stranger.getsockname() == str(g.socket)
        g.wait_for("files-restored")
        assert g.ask("/ready")[0] == 200


def test_f20_a_directory_that_went_to_another_supervisor_stays_with_it(trial: Trial) -> None:
    with trial() as g:
        g.command.signal(signal.SIGSTOP)
        shutil.rmtree(g.runtime)
        other = g.run_again()
        try:
            wait_until(lambda: '"event": "ready"' in other.stderr, 60)
            g.command.signal(signal.SIGCONT)
            why = f"is already running: process {other.pid} holds"
            wait_until(lambda: any(why in event["why"] for event in g.events("files-lost")), 30)
            assert g.stop() == 0
            assert g.ask("/live")[0] == 200, "the files are the other's"
            assert len(list(Path(g.runtime).iterdir())) == 3
            other.signal(signal.SIGTERM)
            assert other.wait() == 0
        finally:
            other.end()
