"""F18: A worker leaks: it makes room for a fresh one in time. One that only shares much memory is left alone, and a
death for want of memory is called that.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.matrix.conftest import Trial
from tests.matrix.oracle import needs
from tests.supervisor.conftest import Group
from tests.support import wait_until

QUICK = "stable_after = 0\nbackoff_initial = 0.05\nburst_limit = 0\nsettle_after = 0"
MB = 1024**2
CGROUP = Path("/sys/fs/cgroup/memory")


def status(g: Group) -> dict[str, object]:
    """What the group says of its only process."""
    (child,) = g.ask("/status")[1]["children"]
    return dict(child)


@pytest.mark.parametrize("preload", ["off", "require"], ids=["exec", "fork"])
def test_f18_a_worker_that_leaks_makes_room_before_its_memory_is_gone(trial: Trial, preload: str) -> None:
    tables = {"supervisor": QUICK, "[workers]": "[workers.recycle]\nmax_private_mb = 60"}
    with trial(modes={"io": "leaking", "supervisor": "samples-often"}, tables=tables, preload=preload) as g:
        why = g.wait_for("recycle")[0]["why"]
        assert "max_private_mb = 60" in why
        held = int(why.split()[2])
        assert 54 <= held < 60 * 10, "within a few looks"
        g.wait_for("recycle-done")
        assert g.wait_for("child-exit")[0]["code"] == 75
        assert wait_until(lambda: status(g)["recycled"])
        assert status(g)["restarts"] == 0
        assert status(g)["last_exit"]["class"] == "recycle"  # type: ignore[index]


def test_f18_what_is_shared_with_the_process_it_was_forked_from_is_not_its_own(trial: Trial) -> None:
    tables = {"supervisor": QUICK, "[workers]": "[workers.recycle]\nmax_private_mb = 100"}
    modes = {"zygote": "heavy", "supervisor": "samples-often"}
    with trial(modes=modes, tables=tables, preload="require") as g:
        pid = g.events("ready")[0]["pid"]
        wait_until(lambda: status(g)["private_bytes"])
        assert psutil.Process(pid).memory_info().rss > 200 * MB
        seen = {wait_for_beat(g, number) for number in range(3)}
        assert max(seen) < 50 * MB
        assert not g.events("recycle")
        assert status(g)["pid"] == pid


def wait_for_beat(g: Group, number: int) -> int:
    """The private memory after one more beat than ``number``."""
    wait_until(lambda: status(g)["beat"]["seq"] > number)  # type: ignore[index]
    private = status(g)["private_bytes"]
    assert isinstance(private, int)
    return private


def test_f18_a_death_for_want_of_memory_is_named(trial: Trial) -> None:
    with memory_of(256 * MB) as home, trial(modes={"io": "hungry,once"}, tables={"supervisor": QUICK}, ready=0) as g:
        (home / "cgroup.procs").write_text(str(g.command.pid))
        end = g.wait_for("child-exit")[0]
        assert (end["code"], end["class"]) == (-signal.SIGKILL, "oom"), end
        assert end["why"] == "killed by the kernel: out of memory"
        g.wait_for("ready", 2)
        assert status(g)["last_exit"]["class"] == "oom"  # type: ignore[index]


@contextlib.contextmanager
def memory_of(limit: int) -> Iterator[Path]:
    """A control group with so much memory."""
    home = CGROUP / f"taskqd-test-{os.getpid()}"
    try:
        home.mkdir()
        (home / "memory.limit_in_bytes").write_text(str(limit))
    except OSError as error:
        needs(False, f"a writable memory control group of version 1: {error.strerror}")
    try:
        yield home
    finally:
        wait_until(lambda: not (home / "cgroup.procs").read_text().strip(), 20)
        home.rmdir()


@pytest.mark.parametrize("layout", ["low 0\nhigh 0\nmax 3\noom 1\noom_kill {}\n", "under_oom 0\noom_kill {}\n"])
def test_f18_a_kill_is_blamed_on_the_kernel_when_it_has_counted_one_more(trial: Trial, layout: str) -> None:
    """The same by a counter that stands in for the kernel's, in the form of either version of control groups."""
    with trial(modes={"supervisor": "counts-in-file"}, tables={"supervisor": QUICK}, ready=0) as g:
        counter = g.directory / "memory.events"
        counter.write_text(layout.format(4))
        for death, blamed in ((1, "oom"), (2, "crash")):
            pid = g.wait_for("ready", death)[-1]["pid"]
            counter.write_text(layout.format(5))
            os.kill(pid, signal.SIGKILL)
            ends = g.wait_for("child-exit", death)
            assert ends[-1]["class"] == blamed
