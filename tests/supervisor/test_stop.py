"""Stopping a real group."""

from __future__ import annotations

import time

from tests.supervisor.conftest import BOTH_WAYS, StartGroup

GRACE = 10.0


@BOTH_WAYS
def test_a_child_is_told_its_deadlines_and_may_use_them(group: StartGroup) -> None:
    g = group(modes={"io": "slow"}, tables={"[workers]": "cancellation_grace_period = 1\ncleanup_grace_period = 1"})
    g.wait_for("ready")
    began = time.monotonic()
    assert g.stop() == 0
    assert 1 <= time.monotonic() - began < GRACE
