"""The oracle itself: it must see what it looks for, or every test of the matrix proves nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from taskqd.supervisor import vocabulary
from tests.matrix import oracle
from tests.matrix.conftest import Trial
from tests.matrix.oracle import check_flat, check_log, check_nothing_left, tagged, vitals
from tests.supervisor.conftest import TAG
from tests.support import wait_until


def test_it_sees_processes_files_and_descriptors_and_what_nobody_declared(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trial() as g:
        assert len(tagged(g.tag)) == 2, "the supervisor and its worker"
        before = vitals(g.command.pid)
        check_flat(g.command.pid, before)
    monkeypatch.setattr(oracle, "GONE_WITHIN", 0.1)
    escaped = subprocess.Popen(["sleep", "1000"], env={TAG: g.tag}, start_new_session=True)
    try:
        with pytest.raises(AssertionError, match="not within"):
            check_nothing_left(g)
    finally:
        escaped.kill()
        escaped.wait()
    (g.runtime / "left").touch()
    with pytest.raises(AssertionError, match="left"):
        check_nothing_left(g)
    monkeypatch.setattr(oracle, "EVENTS", {name: "" for name in vocabulary.EVENTS if name != "ready"})
    with pytest.raises(AssertionError, match="ready"):
        check_log(g)


def test_the_declared_exit_code_is_compared(trial: Trial) -> None:
    with pytest.raises(AssertionError, match="exit code 0 instead of 3"), trial(ends=3):
        pass


def test_a_tag_passes_to_whatever_is_started(trial: Trial) -> None:
    with trial(modes={"io": "grandchild"}, preload="require") as g:
        wait_until(lambda: len(tagged(g.tag)) == 5, 20, "supervisor, what it forks from, its spare, worker, grandchild")
    process = subprocess.Popen([sys.executable, "-c", "input()"], env={TAG: g.tag}, stdin=subprocess.PIPE)
    assert tagged(g.tag) == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tagged(g.tag) == []
