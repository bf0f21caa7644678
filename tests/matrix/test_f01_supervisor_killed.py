"""F1: the supervisor is killed, whatever its processes do just then: all of them go with it at once, the next
supervisor starts, and what they were working on is settled.
"""

from __future__ import annotations

import signal

import pytest

from tests.jobs import JobTable
from tests.matrix.actors import ACTORS, started
from tests.matrix.conftest import Trial
from tests.matrix.oracle import tagged
from tests.supervisor.asking import taskqd
from tests.supervisor.conftest import Group
from tests.support import eventually, wait_until

GONE_WITHIN = 1.0
"""Ten times the target."""
BOTH = pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])


def kill_supervisor(g: Group, within: float = GONE_WITHIN) -> None:
    g.command.signal(signal.SIGKILL)
    g.command.wait()
    wait_until(lambda: not tagged(g.tag), within, "everybody is gone")


def succeed(g: Group, ready: int) -> None:
    """Start the next supervisor on what a killed one has left."""
    assert g.socket.exists()
    g.command = g.run_again()
    g.wait_for("ready", ready, timeout=60)
    assert g.ask("/live")[0] == 200


@BOTH
def test_f1_whatever_its_processes_do(trial: Trial, preload: str) -> None:
    """Idle, spinning, in a blocking sleep, holding the lock, booting, draining; forked ones with their zygote."""
    modes = {
        "io": "idle",
        "spins": "spinning,once",
        "sleeps": "blocked,once",
        "lock": "gil-held,once",
        "drains": "deaf,once",
        "boots": "never-ready,once",
    }
    tables = {"[workers]": "\n".join(f'[[workers]]\nname = "{name}"' for name in modes if name != "io")}
    with trial(modes, tables, ready=5, preload=preload) as g:
        taskqd(g, "drain", "drains", "--timeout", "0.1")
        wait_until(lambda: all((g.directory / f"lived.{name}.0").exists() for name in modes if name != "io"))
        others = 3 if preload == "require" else 1  # the supervisor, and the zygote with the spare that it lays in
        wait_until(lambda: len(tagged(g.tag)) == len(modes) + others, 20)
        kill_supervisor(g)
        succeed(g, len(modes))


@BOTH
def test_f1_while_all_are_being_made(trial: Trial, preload: str) -> None:
    """Who has not armed the death signal yet finds that his parent is another, or his link closed."""
    tables = {"[workers]": "replicas = 6", "supervisor": "max_booting = 6"}
    with trial(tables=tables, ready=0, preload=preload) as g:
        g.wait_for("spawn")
        kill_supervisor(g, within=20)
        succeed(g, 6)


def test_f1_during_the_check_before_the_start(trial: Trial) -> None:
    with trial(ready=0, TASKQ_PG_DSN="postgresql://nobody@127.0.0.1:9/none") as g:
        g.wait_for("preflight-warning")
        assert len(tagged(g.tag)) == 2
        kill_supervisor(g)
        g.command = g.run_again()
        g.wait_for("preflight-warning")


async def test_f1_real_workers_at_work(trial: Trial, jobs: JobTable) -> None:
    """A handler blocks the loop, one holds the lock, one spins: their jobs have crashed, and run again."""
    one = "max_concurrency = 1\nnotify_poll_interval = 0.5"
    tables = {
        "[workers]": f'{one}\nreplicas = 2\n[[workers]]\nname = "execed"\npreload = "off"\n{one}',
        "scheduler": "enabled = true",
    }
    with trial(tables=tables, ready=4, preload="require", actors=ACTORS) as g:
        for name in ("sleeps", "holds", "spins"):
            await jobs.plant(1, actor=f"'{name}'")
        await eventually(lambda: len(started(g.directory)) == 3, 30)
        assert len({pid for _, pid in started(g.directory)}) == 3
        kill_supervisor(g)
        succeed(g, 4)
        await eventually(lambda: sum(event["jobs"] for event in g.events("jobs-released")) == 3, 10)

        async def done() -> bool:
            return await jobs.counts() == {"succeeded": 3}

        await eventually(done, 30, g.command.stderr)
        crashed = await jobs.conn.fetch(f'select outcome, cause from "{jobs.schema}".job_attempts')
        assert [tuple(row) for row in crashed] == [("crashed", "worker_dead")] * 3
