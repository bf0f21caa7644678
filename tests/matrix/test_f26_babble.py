"""F26: A process says on its link what it should not, or nothing, or takes itself for another: it alone is killed, and
replaced.
"""

from __future__ import annotations

import pytest

from tests.matrix.conftest import Trial
from tests.support import wait_until

FAULTS = {
    "says-bytes": "not a message: b'\\x00garbage'",
    "says-no-object": "not a message: b'[1, 2, 3]'",
    "says-no-word": "not a message: b'{\"op\": 5}'",
    "says-deep": "not a message: b'[[[",
    "says-long": "a line of more than 65536 bytes",
    "says-endless": "a line of more than 65536 bytes",
    "wrong-version": "it speaks version 99 of the control protocol",
    "other-name": "it takes itself for somebody.0",
    "other-index": "it takes itself for other-index.7",
    "no-hello": "it said 'beat' before hello",
}
"""What each does in its first life, and why it is killed."""


@pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])
def test_f26_only_the_one_that_babbles_is_killed(trial: Trial, preload: str) -> None:
    faults = FAULTS if preload == "off" else {"says-bytes": FAULTS["says-bytes"]}
    tables = {
        "supervisor": "backoff_initial = 0.05\nstable_after = 0\nburst_limit = 0\nmax_booting = 4",
        "[workers]": "".join(f'[[workers]]\nname = "{mode}"\n' for mode in faults),
    }
    modes = {mode: f"{mode},once" for mode in faults} | {"io": "odd-answers"}
    with trial(modes=modes, tables=tables, ready=0, preload=preload) as g:
        wait_until(lambda: len(g.events("kill")) >= len(faults) and g.ask("/ready")[0] == 200, 60)
        killed = {event["child"]: event["why"] for event in g.events("kill")}
        for mode, why in faults.items():
            assert why in killed.pop(f"{mode}.0")
        assert not killed, "nobody else"
        assert "io.0" not in {event["child"] for event in g.events("child-exit")}
        wait_until(lambda: all(child["beat_age_s"] is not None for child in g.ask("/status")[1]["children"]))


def test_f26_one_that_says_nothing_at_all_is_killed_when_its_boot_takes_too_long(trial: Trial) -> None:
    short = {"supervisor": "boot_timeout = 4\nbackoff_initial = 0.05"}
    with trial(modes={"io": "mute,once"}, tables=short, ready=0, TASKQ_DATABASE_BOOT_TIMEOUT="0.5") as g:
        g.wait_for("ready", timeout=60)
        assert "was not ready after 4 s" in g.events("kill")[0]["why"]


def test_f26_a_process_to_fork_from_that_babbles_is_replaced(trial: Trial) -> None:
    with trial(modes={"zygote": "babbles"}, preload="require") as g:
        assert [event["why"] for event in g.events("preload-died")] == ["ended by SIGKILL"]
        assert len(g.events("spawn")) == 1
