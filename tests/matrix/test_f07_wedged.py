"""F7: a worker beats on but looks for no more work: it is drained and replaced, and what it runs is run to its end."""

from __future__ import annotations

from tests.jobs import JobTable
from tests.matrix.actors import ACTORS, started
from tests.matrix.conftest import Trial
from tests.support import eventually

WEDGED = """\
import taskqd.supervisor.verdict as verdict
verdict.WEDGED_AFTER = 3.0
"""
"""For the supervisor: so long without a look at the queue is too long."""
STUCK = """\
from taskqd.worker.producer import Producer

claim = Producer._claim

async def stuck(self, room):
    if os.path.exists("started") and not os.path.exists("wedged"):
        open("wedged", "w").close()
        await asyncio.sleep(1000)
    return await claim(self, room)

Producer._claim = stuck
"""
"""For the workers: the first one never comes back from a claim once it has a job."""


async def test_f7_it_is_drained_and_replaced_and_its_job_completes(trial: Trial, jobs: JobTable) -> None:
    tables = {
        "supervisor": "settle_after = 0",
        "defaults": "notify_enabled = false\npoll_interval = 0.2\ndispatcher_command_timeout = 1",
        "[workers]": "cancellation_grace_period = 3.9\ncleanup_grace_period = 1",
    }
    with trial(tables=tables, actors=ACTORS + STUCK, first_lines=WEDGED) as g:
        await jobs.plant(1, actor="'waits'")
        await eventually(lambda: started(g.directory), 30)
        (recycle,) = await eventually(lambda: g.events("recycle"), 60, g.command.stderr)
        assert recycle["why"].startswith("wedged: ")
        await eventually(lambda: [e for e in g.events("shutdown-phase") if e["inflight"] == 1], 60, g.command.stderr)
        (g.directory / "go").touch()  # while it drains
        await eventually(lambda: g.events("recycle-done"), 60, "its successor is ready and it has gone")
        (end,) = g.events("child-exit")
        assert (end["code"], g.events("kill")) == (75, [])
        row = await jobs.conn.fetchrow(f'select status::text, attempt from "{jobs.schema}".jobs')
        assert tuple(row or ()) == ("succeeded", 1)
        await jobs.plant(1, actor="'waits'")

        async def done() -> bool:
            return await jobs.counts() == {"succeeded": 2}

        await eventually(done, 30, "its successor looks for work")
