"""F10: SIGTERM comes to every process of the group at once, as with systemd's KillMode=control-group: who was asked to
stop by the supervisor too takes it for the same request, and his jobs keep their time.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.jobs import JobTable
from tests.matrix.actors import ACTORS, started
from tests.matrix.conftest import Trial
from tests.support import eventually


@pytest.mark.parametrize("first", ["supervisor", "processes"])
async def test_f10_everybody_is_told(trial: Trial, jobs: JobTable, first: str) -> None:
    graces = "cancellation_grace_period = 3.9\ncleanup_grace_period = 1"
    tables = {
        "[workers]": f"replicas = 2\nnotify_poll_interval = 0.5\n{graces}",
        "scheduler": "enabled = true",
    }
    with trial(tables=tables, ready=3, preload="require", actors=ACTORS) as g:
        await jobs.plant(1, actor="'waits'")
        ((_, busy),) = await eventually(lambda: started(g.directory), 30)
        # With the one that workers are forked from, and the one that it lays in.
        processes = await eventually(lambda: found if len(found := [p.pid for p in g.processes()]) == 5 else [], 30)
        everybody = [g.command.pid, *processes] if first == "supervisor" else [*processes, g.command.pid]
        for pid in everybody:
            with contextlib.suppress(ProcessLookupError):  # the supervisor has ended what it forks from by now
                os.kill(pid, signal.SIGTERM)
        asked = await eventually(lambda: [e for e in g.events("shutdown-phase") if e.get("inflight") == 1], 30)
        (g.directory / "go").touch()
        assert g.command.wait() == 0, g.command.stderr
        assert [event["phase"] for event in asked] == ["draining"], "its time is not cut short"
        row = await jobs.conn.fetchrow(f'select status::text, attempt, interrupt_count from "{jobs.schema}".jobs')
        assert tuple(row or ()) == ("succeeded", 1, 0)
        assert started(g.directory) == [("waits", busy)]
