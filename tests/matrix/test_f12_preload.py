"""F12: what imports the actors, for workers to be forked from, starts a thread or opens a socket, fails, dies or hangs:
that is told in words, no worker that runs is touched, and new ones are exec'ed meanwhile, or the group refuses where
they must be forked. After a reload workers have the code of then.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

from tests.jobs import JobTable
from tests.matrix.conftest import Trial
from tests.matrix.oracle import tagged
from tests.supervisor.asking import edit, pids
from tests.supervisor.conftest import Group
from tests.support import eventually, wait_until

QUICK = {"supervisor": "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0"}


def preload(g: Group) -> dict[str, Any]:
    found: dict[str, Any] = g.ask("/status")[1]["preload"]
    return found


def ways(g: Group) -> list[str]:
    return [child["made_by"] for child in g.ask("/status")[1]["children"] if child["role"] == "worker"]


def zygote(g: Group) -> psutil.Process:
    return psutil.Process(g.wait_for("preload-ready")[-1]["pid"])


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("thread", "a fork is not safe after the import of group_actors:registry: thread 'exporter'"),
        ("socket", "a fork is not safe after the import of group_actors:registry: socket at 127.0.0.1:"),
        ("broken", "no module named 'gone'"),
    ],
)
def test_f12_what_must_not_be_forked_says_why_and_workers_are_execed(trial: Trial, mode: str, why: str) -> None:
    with trial({"zygote": mode}, preload="auto") as g:
        (unfit,) = g.events("preload-unfit")
        assert unfit["why"].startswith(why)
        assert ("standin_zygote.py" in unfit.get("traceback", "")) == (mode == "broken")
        assert ways(g) == ["exec"]
        assert (preload(g)["state"], preload(g)["why"]) == ("unfit", unfit["why"])
        assert "taskqd_preload_ready 0" in g.ask("/metrics")[1]["text"]
        assert g.ask("/ready")[0] == 200


@pytest.mark.parametrize(("mode", "code"), [("thread", 78), ("socket", 78), ("broken", 78), ("dies", 70)])
def test_f12_what_is_required_and_not_to_be_had_ends_the_group(trial: Trial, mode: str, code: int) -> None:
    with trial({"zygote": mode}, ready=0, ends=code, preload="require") as g:
        g.command.wait(60)
        assert not g.events("spawn")
        assert 'preload = "require" (io): ' in g.events("shutdown-begin")[0]["reason"]


def test_f12_what_dies_of_its_imports_is_tried_again_at_growing_intervals(trial: Trial) -> None:
    with trial({"zygote": "dies"}, preload="auto") as g:
        assert [event["retry_in"] for event in g.wait_for("preload-died", 2)] == [0, 2]
        assert ways(g) == ["exec"]


def test_f12_its_death_touches_no_worker_and_it_is_replaced(trial: Trial) -> None:
    with trial(tables={"[workers]": "replicas = 2", **QUICK}, ready=2, preload="require") as g:
        first = [event["pid"] for event in g.events("ready")]
        zygote(g).kill()
        (died,) = g.wait_for("preload-died")
        assert died["why"] == "ended by SIGKILL"
        g.wait_for("preload-ready", 2)
        assert sorted(pids(g).values()) == sorted(first)
        os.kill(first[0], signal.SIGKILL)
        g.wait_for("ready", 3)
        assert ways(g) == ["fork", "fork"]
        assert preload(g)["restarts"] == 1


@pytest.mark.parametrize("preload_", ["require", "auto"])
def test_f12_killed_while_it_forks(trial: Trial, preload_: str) -> None:
    """Before the fork: the worker is forked from the next one, or exec'ed where that may be."""
    with trial({"zygote": "hangs-in-fork"}, ready=0, preload=preload_) as g:
        wait_until((g.directory / "forking").exists, 30)
        zygote(g).kill()
        g.wait_for("ready")
        assert ways(g) == (["fork"] if preload_ == "require" else ["exec"])
        assert len(g.events("spawn")) == 1
        g.wait_for("preload-ready", 2)


def test_f12_killed_when_it_has_forked(trial: Trial) -> None:
    """Nobody was told of the new process: it finds its link closed and ends."""
    with trial({"zygote": "dies-in-fork"}, ready=0, preload="require") as g:
        g.wait_for("ready")
        g.wait_for("preload-ready", 2)
        wait_until(lambda: len(tagged(g.tag)) == 4, 20, "supervisor, second one to fork from, its spare, its worker")
        assert len(g.events("spawn")) == 1


def test_f12_while_it_hangs_workers_are_execed(trial: Trial) -> None:
    with trial(tables={"[workers]": "replicas = 2", **QUICK}, ready=2, preload="auto") as g:
        zygote(g).send_signal(signal.SIGSTOP)
        for event in g.events("ready")[:2]:  # one of them is what was laid in, at once
            os.kill(event["pid"], signal.SIGKILL)
        g.wait_for("ready", 4)
        assert "exec" in ways(g)
        assert g.events("preload-died"), "it did not answer in time"
        g.wait_for("preload-ready", 2)


def test_f12_a_stop_while_it_imports(trial: Trial) -> None:
    with trial({"zygote": "slow"}, ready=0, preload="require") as g:
        g.wait_for("workgroup.start")
        assert g.stop() == 0


CODE = """\
import os
from pydantic import BaseModel
from taskqd import actor

IMPORT = "old"

class Nothing(BaseModel):
    pass

@actor
async def which(payload: Nothing) -> None:
    with open("ran", "a") as file:
        file.write(f"{IMPORT} {os.getpid()}\\n")

registry = [which]
"""


async def test_f12_after_a_reload_workers_have_the_code_of_then(trial: Trial, jobs: JobTable) -> None:
    tables = {"[workers]": "notify_poll_interval = 0.5", "supervisor": "settle_after = 0"}
    with trial(tables=tables, preload="require", actors=CODE) as g:
        ran = g.directory / "ran"
        first = zygote(g).pid
        for number, code in enumerate(("old", "renewed")):
            if code == "renewed":
                (g.directory / "group_actors.py").write_text(CODE.replace('"old"', '"renewed"'))
                edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
                g.command.signal(signal.SIGHUP)
                g.wait_for("reload-done", timeout=60)
            await jobs.plant(1, actor="'which'")
            await eventually(lambda n=number: ran.exists() and len(ran.read_text().splitlines()) > n, 30)  # type: ignore[misc]
            assert ran.read_text().splitlines()[-1] == f"{code} {pids(g)['io.0']}"
        assert ways(g) == ["fork"]
        wait_until(lambda: not psutil.pid_exists(first), 10, "the one that has the old code is gone")
