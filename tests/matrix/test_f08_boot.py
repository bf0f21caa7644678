"""F8: processes that boot: one that hangs is killed in its time, a slow one that gets on is waited for, only so many
boot at once, and the scheduler waits for nobody.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.matrix.conftest import Trial

QUICK = "boot_timeout = 1\nbackoff_initial = 0.05"


def test_f8_a_boot_that_hangs_is_ended(trial: Trial) -> None:
    with trial({"io": "never-ready"}, {"supervisor": QUICK}, ready=0, ends=70, TASKQ_DATABASE_BOOT_TIMEOUT="0.5") as g:
        g.command.wait(60)
        assert len(g.events("spawn")) == len(g.events("kill")) == 3
        assert "was not ready after" in g.events("kill")[0]["why"]


def test_f8_a_slow_boot_is_waited_for_as_long_as_it_gets_on(trial: Trial) -> None:
    quick = {"supervisor": QUICK}
    with trial({"io": "slow-boot"}, quick, preload="require", TASKQ_DATABASE_BOOT_TIMEOUT="0.5") as g:
        assert g.events("ready")[0]["boot_s"] > 2.5, "three times its boot timeout"
        assert g.events("kill") == []


@pytest.mark.parametrize(("preload", "replicas"), [("require", 20), ("off", 4)], ids=["fork", "exec"])
def test_f8_only_so_many_boot_at_once(trial: Trial, preload: str, replicas: int) -> None:
    tables = {
        "[workers]": f"replicas = {replicas}",
        "supervisor": "max_booting = 2",
        "budget": 'enforce = "warn"',  # nobody connects
    }
    with trial(tables=tables, ready=replicas, preload=preload) as g:
        booting, peak = 0, 0
        for event in g.events():
            booting += {"spawn": 1, "ready": -1}.get(event["event"], 0)
            peak = max(peak, booting)
        assert peak <= 2
        assert peak == 2 or preload == "require", "forks are asked for one after the other"
        assert [event["child"] for event in g.events("spawn")] == [f"io.{index}" for index in range(replicas)]


def test_f8_the_scheduler_waits_for_nobody(trial: Trial) -> None:
    tables = {"scheduler": "enabled = true", "supervisor": "max_booting = 1"}
    with trial({"io": "never-ready"}, tables) as g:
        (ready,) = g.events("ready")
        assert ready["child"] == "scheduler.0"
        assert g.ask("/ready")[1]["reason"] == "1/2 ready: io.0 is booting"
        os.kill(ready["pid"], signal.SIGKILL)
        assert g.wait_for("ready", 2)[-1]["child"] == "scheduler.0"
