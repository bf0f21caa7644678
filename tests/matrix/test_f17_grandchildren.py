"""F17: What a worker has started holds its output open, or ignores every request: it goes with its worker. Who has
made a session of its own stays, and delays nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest

from tests.matrix.conftest import Trial
from tests.support import wait_until

QUICK = "stable_after = 0\nburst_limit = 0\nbackoff_initial = 0.05"
BOTH_WAYS = pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])


@BOTH_WAYS
def test_f17_a_grandchild_does_not_survive_its_worker(trial: Trial, preload: str) -> None:
    with trial(modes={"io": "grandchild,once"}, tables={"supervisor": QUICK}, preload=preload) as g:
        (sleeper,) = [process for process in g.processes() if process.name() == "sleep"]
        os.kill(g.events("ready")[-1]["pid"], signal.SIGKILL)
        g.wait_for("ready", 2)
        wait_until(lambda: not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE)


def test_f17_one_that_ignores_the_request_does_not_survive_a_stop(trial: Trial) -> None:
    with trial(modes={"io": "deaf-grandchild"}) as g:
        began = time.monotonic()
        assert g.stop() == 0
        assert time.monotonic() - began < 8, "nobody waits for it"


@BOTH_WAYS
def test_f17_one_that_escaped_and_holds_the_output_delays_nothing(trial: Trial, preload: str) -> None:
    """It has a session of its own: nothing of the supervisor's reaches it, as the documentation says."""
    tables = {"supervisor": f'{QUICK}\nlogs = "capture"'}
    with trial(modes={"io": "escapee,once"}, tables=tables, preload=preload) as g:
        (escapee,) = wait_until(lambda: [process for process in g.processes() if process.name() == "sleep"])
        try:
            began = time.monotonic()
            os.kill(g.events("ready")[-1]["pid"], signal.SIGKILL)
            (end,) = g.wait_for("child-exit")
            assert end["code"] == -signal.SIGKILL
            assert "ready" in end["output"]
            g.wait_for("ready", 2)
            assert time.monotonic() - began < 10
            assert escapee.is_running()
            assert g.stop() == 0
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                escapee.kill()
