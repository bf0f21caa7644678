"""When a process has done enough: the limits, what is measured, and how it is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskqd.supervisor.cgroup import Cgroup
from taskqd.supervisor.memory import OomCounter, held_by
from taskqd.supervisor.recycle import JITTER, NO_LIMITS, RecycleLimits, overdue
from tests.supervisor.conftest import Group, StartGroup
from tests.support import wait_until

QUICK = "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0\nsettle_after = 0"
MB = 1024**2


# -- the rules ------------------------------------------------------------------------------------


def test_no_limits_are_never_reached() -> None:
    assert overdue(NO_LIMITS, 1.0, jobs=10**9, age=1e9, private=10**12) == ""


def test_each_limit_names_what_was_reached() -> None:
    limits = RecycleLimits(max_jobs=100, max_age=60.0, max_private_mb=512)
    assert overdue(limits, 1.0, jobs=99, age=59.0, private=511 * MB) == ""
    assert overdue(limits, 1.0, jobs=100, age=0, private=None) == "it ran 100 jobs, max_jobs = 100"
    assert overdue(limits, 1.0, jobs=0, age=60.0, private=None) == "it is 60 s old, max_age = 60"
    memory = overdue(limits, 1.0, jobs=0, age=0, private=512 * MB)
    assert memory == "it holds 512 MB for itself, max_private_mb = 512"


@given(st.floats(1 - JITTER, 1 + JITTER), st.integers(1, 10**6), st.integers(0, 2 * 10**6))
def test_the_jitter_moves_a_limit_by_its_share_and_no_more(factor: float, limit: int, jobs: int) -> None:
    why = overdue(RecycleLimits(max_jobs=limit), factor, jobs=jobs, age=0, private=None)
    if jobs >= limit * (1 + JITTER) and jobs >= 1:
        assert why
    if jobs < max(1, limit * (1 - JITTER)):
        assert not why


def test_nothing_is_recycled_before_it_did_anything() -> None:
    assert overdue(RecycleLimits(max_jobs=1), 0.9, jobs=0, age=0, private=None) == ""


# -- what is measured -----------------------------------------------------------------------------


def test_private_memory_counts_what_ends_with_the_process() -> None:
    before = held_by(os.getpid())
    assert before is not None
    hoard = bytearray(b"x") * (64 * MB)
    after = held_by(os.getpid())
    assert after is not None
    assert after.private - before.private > 60 * MB
    assert after.dirty - before.dirty > 60 * MB
    del hoard


def test_no_process_no_memory() -> None:
    assert held_by(2**22 + 1) is None


def test_each_kill_of_the_kernel_is_blamed_on_one_process() -> None:
    kills: list[int | None] = [5]
    counter = OomCounter(lambda: kills[-1])
    assert not counter.take(), "what was before is nobody's"
    kills.append(7)
    assert [counter.take(), counter.take(), counter.take()] == [True, True, False]


def test_a_kill_of_something_else_is_forgotten_in_time() -> None:
    kills = [0]
    counter = OomCounter(lambda: kills[-1])
    kills.append(1)
    counter.forget()
    counter.forget()
    assert not counter.take()


def test_without_control_groups_nobody_is_blamed(tmp_path: Path) -> None:
    counter = OomCounter(Cgroup(str(tmp_path), str(tmp_path / "missing")).oom_kills)
    counter.forget()
    assert not counter.take()


# -- real processes -------------------------------------------------------------------------------


def child(group: Group, name: str) -> dict[str, object]:
    return next(each for each in group.ask("/status")[1]["children"] if each["name"] == name)


@pytest.mark.parametrize(
    ("limit", "mode", "why"),
    [
        ("max_age = 1", "", "s old, max_age = 1"),
        ("max_jobs = 5", "busy", "jobs, max_jobs = 5"),
        ("max_private_mb = 1", "", "MB for itself, max_private_mb = 1"),
    ],
)
def test_a_successor_starts_first_and_nothing_counts_as_a_failure(
    group: StartGroup, limit: str, mode: str, why: str
) -> None:
    g = group(
        modes={"io": mode} if mode else {},
        tables={"supervisor": QUICK, "[workers]": f"[workers.recycle]\n{limit}"},
    )
    first = int(g.wait_for("ready")[0]["pid"])
    recycle = g.wait_for("recycle")[0]
    assert why in recycle["why"]
    g.wait_for("recycle-done")
    names = [(event["event"], event.get("pid")) for event in g.events()]
    second = int(g.events("ready")[1]["pid"])
    assert names.index(("ready", second)) < names.index(("child-exit", None)), "the successor is ready first"
    status = wait_until(lambda: found if (found := child(g, "io.0"))["recycled"] else None, 10)
    assert status["restarts"] == 0
    assert status["pid"] != first
    assert status["last_exit"]["class"] == "recycle"
    assert why in status["last_exit"]["why"]
    assert g.stop() == 0, g.command.stderr


def test_where_the_budget_has_no_room_it_drains_first(group: StartGroup, max_connections: int) -> None:
    g = group(
        tables={
            "supervisor": QUICK,
            "budget": f"app_connections = {max_connections - 3 - 24 - 1}",
            "[workers]": "[workers.recycle]\nmax_age = 1",
        }
    )
    g.wait_for("recycle")
    end = g.wait_for("child-exit")[0]
    assert (end["code"], end["class"]) == (75, "recycle")
    g.wait_for("ready", 2)
    names = [event["event"] for event in g.events() if event["event"] in ("ready", "child-exit")]
    assert names[:3] == ["ready", "child-exit", "ready"]
    status = child(g, "io.0")
    assert (status["restarts"], status["degraded"]) == (0, False)
    assert g.stop() == 0, g.command.stderr


def test_one_at_a_time(group: StartGroup) -> None:
    g = group(tables={"supervisor": QUICK, "[workers]": "replicas = 3\n[workers.recycle]\nmax_age = 1"})
    g.wait_for("recycle-done", 3)
    steps = [event["event"] for event in g.events() if event["event"] in ("recycle", "recycle-done")]
    assert steps[:6] == ["recycle", "recycle-done"] * 3
    assert g.stop() == 0, g.command.stderr


def test_the_limits_are_bounded(group: StartGroup) -> None:
    g = group(tables={"[workers]": "[workers.recycle]\nmax_jobs = 0\nmax_ag = 5"})
    assert g.command.wait() == 78
    assert "workers.io.recycle.max_jobs: 0 must be a whole number from 1" in g.command.stderr
    assert "workers.io.recycle.max_ag: unknown key (did you mean 'max_age'?)" in g.command.stderr


@pytest.fixture
async def max_connections(conn: object) -> int:
    return int(await conn.fetchval("show max_connections"))  # type: ignore[attr-defined]
