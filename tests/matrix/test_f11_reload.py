"""F11: SIGHUP, or `taskqd reload`, at any time and with any file: whoever is not changed keeps his process, a file that
is refused and a replacement that fails change nothing, and the caller is told.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.matrix.conftest import Trial
from tests.supervisor.asking import SOON, TWO, edit, pids, taskqd
from tests.supervisor.conftest import Group
from tests.support import child_environment, taskqd_argv, wait_until

PICKY = {"[workers]": "replicas = 2", **SOON}


@pytest.fixture(scope="module")
def quiet_group(module_trial: Trial) -> Iterator[Group]:
    """A group of which no test changes anything: each puts the file back."""
    with module_trial(tables=SOON) as g:
        yield g


def test_f11_the_same_file(quiet_group: Group) -> None:
    g = quiet_group
    before, reloads = pids(g), len(g.events("reload-done"))
    g.command.signal(signal.SIGHUP)
    assert g.wait_for("reload-done", reloads + 1)[-1]["result"] == "reloaded: nothing to change"
    assert pids(g) == before
    assert g.ask("/ready")[0] == 200


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "io"', 'name = "io', "invalid TOML"),
        ('name = "io"', 'name = "io"\nmax_concurency = 3', "(did you mean 'max_concurrency'?)"),
        ('"group_actors:registry"', '"group_actors:gone"', "group_actors:gone"),
        ('name = "io"', 'name = "io"\nmax_concurrency = 1000', "connections"),
        ('runtime_dir = "run"', 'runtime_dir = "run"\nname = "other"', "needs a restart of the group"),
        ('runtime_dir = "run"', 'runtime_dir = "away"', "[supervisor] runtime_dir changes from 'run' to 'away'"),
    ],
    ids=["invalid TOML", "unknown key", "no actors", "over budget", "another name", "another directory"],
)
def test_f11_a_file_that_is_refused(quiet_group: Group, old: str, new: str, message: str) -> None:
    g = quiet_group
    before, failures = pids(g), len(g.events("reload-failed"))
    good = (g.directory / "group.toml").read_text()
    edit(g, (old, new))
    try:
        done = taskqd(g, "reload")
    finally:
        (g.directory / "group.toml").write_text(good)
    assert (done.returncode, message in done.stderr) == (78, True), done.stderr
    assert message in g.wait_for("reload-failed", failures + 1)[-1]["why"]
    assert pids(g) == before
    assert g.ask("/ready")[0] == 200
    assert not g.events("child-exit")


def test_f11_one_of_three_is_changed(trial: Trial) -> None:
    with trial(tables={**TWO, "scheduler": "enabled = true"}, ready=4) as g:
        before = pids(g)
        edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
        done = taskqd(g, "reload")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "reloaded: 2 unchanged, io replaced"
        after = pids(g)
        assert {name for name in before if after[name] != before[name]} == {"io.0", "io.1"}
        story = [(e["event"], e["child"]) for e in g.events() if e["event"] in ("ready", "child-exit")][4:]
        assert story == [("ready", "io.0"), ("child-exit", "io.0"), ("ready", "io.1"), ("child-exit", "io.1")]
        assert '"max_concurrency": 3' in psutil.Process(after["io.1"]).environ()["TASKQD_SETTINGS"]
        generations = {child["name"]: child["generation"] for child in g.ask("/status")[1]["children"]}
        assert generations == {"scheduler.0": 1, "io.0": 2, "io.1": 2, "cpu.0": 1}
        assert g.ask("/ready")[1]["reason"] == "4/4 ready"
        assert g.ask("/status")[1]["coming_or_going"] == []


def test_f11_one_is_removed_one_added_one_scaled(trial: Trial) -> None:
    with trial(tables=TWO, ready=3) as g:
        before = pids(g)
        edit(g, ("replicas = 2", "replicas = 3"), ('name = "cpu"', 'name = "gpu"'))
        done = taskqd(g, "reload", "--json")
        assert done.returncode == 0, done.stderr
        last = json.loads(done.stdout.splitlines()[-1])
        assert (last["removed"], last["added"], last["scaled"]) == (["cpu"], ["gpu"], {"io": {"from": 2, "to": 3}})
        after = pids(g)
        assert list(after) == ["io.0", "io.1", "io.2", "gpu.0"]
        assert (after["io.0"], after["io.1"]) == (before["io.0"], before["io.1"])
        edit(g, ("replicas = 3", "replicas = 1"))
        assert taskqd(g, "reload").returncode == 0
        assert list(pids(g)) == ["io.0", "gpu.0"]
        assert pids(g)["io.0"] == before["io.0"]


def test_f11_a_replacement_that_fails(trial: Trial) -> None:
    """It is never ready, it crashes in its trial, it refuses: the old ones are kept, until one comes up."""
    tables = {"[workers]": "replicas = 2", "supervisor": "settle_after = 0.5\nboot_timeout = 1"}
    with trial({"io": "picky"}, tables, ready=2, preload="require", TASKQ_DATABASE_BOOT_TIMEOUT="0.5") as g:
        before, now = pids(g), 'name = "io"'
        for unlucky, why in ((13, "was not ready after"), (14, "exit code 1"), (15, "refuses")):
            wanted = f'name = "io"\nmax_concurrency = {unlucky}'
            edit(g, (now, wanted))
            now = wanted
            done = taskqd(g, "reload")
            assert done.returncode == 1
            assert "reload aborted: io.0: the new process did not come up" in done.stderr
            assert why in done.stderr
            assert "not made: io" in done.stderr
            assert pids(g) == before
            assert g.ask("/ready")[0] == 200
        edit(g, (now, 'name = "io"\nmax_concurrency = 12'))
        assert taskqd(g, "reload").returncode == 0
        assert not set(pids(g).values()) & set(before.values())


def test_f11_an_added_one_that_fails(trial: Trial) -> None:
    with trial({"gpu": "exit-78"}, SOON) as g:
        before = pids(g)
        edit(g, ('name = "io"', 'name = "io"\n[[workers]]\nname = "gpu"'))
        done = taskqd(g, "reload")
        assert done.returncode == 1
        assert "gpu.0 did not come up: exit code 78" in done.stderr
        assert pids(g) == before
        assert g.ask("/ready")[0] == 200


def test_f11_many_at_once(trial: Trial) -> None:
    """Fifty signals and three commands: the change is made once, and all are answered."""
    with trial(tables=PICKY, ready=2) as g:
        before = pids(g)
        edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
        for _ in range(50):
            g.command.signal(signal.SIGHUP)
        asking = [reloading(g) for _ in range(3)]
        assert [process.wait(60) for process in asking] == [0, 0, 0]
        wait_until(lambda: g.ask("/status")[1]["change"] is None, 30)
        assert len(g.events("reload-begin")) <= 4
        assert len(g.events("spawn")) == 4, "the change was made once"
        assert not set(pids(g).values()) & set(before.values())


def reloading(g: Group) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*taskqd_argv("reload"), "--socket", str(g.socket)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_f11_during_a_boot(trial: Trial) -> None:
    """The change is made to processes that have not come up yet."""
    with trial({"io": "slow-boot,once"}, PICKY, ready=0) as g:
        g.wait_for("spawn", 2)
        edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
        g.command.signal(signal.SIGHUP)
        g.wait_for("reload-done", timeout=60)
        assert len(g.events("spawn")) == 4
        assert g.events("kill") == g.events("reload-failed") == []
        assert {child["generation"] for child in g.ask("/status")[1]["children"]} == {2}
        assert g.ask("/ready")[1]["reason"] == "2/2 ready"


def test_f11_during_a_roll(trial: Trial) -> None:
    """The change that is being made is made, then the next one."""
    with trial({"io": "picky"}, {**PICKY, "supervisor": "settle_after = 1"}, ready=2) as g:
        edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 3'))
        g.command.signal(signal.SIGHUP)
        g.wait_for("spawn", 3)
        edit(g, ("max_concurrency = 3", "max_concurrency = 4"))
        for _ in range(3):
            g.command.signal(signal.SIGHUP)
        g.wait_for("reload-done", 2, timeout=60)
        assert len(g.events("reload-begin")) == 2
        assert len(g.events("spawn")) == 6
        assert '"max_concurrency": 4' in psutil.Process(pids(g)["io.1"]).environ()["TASKQD_SETTINGS"]


def test_f11_during_a_stop(trial: Trial) -> None:
    with trial({"io": "slow"}, {"[workers]": "cancellation_grace_period = 2\ncleanup_grace_period = 1"}) as g:
        g.command.signal(signal.SIGTERM)
        g.wait_for("shutdown-begin")
        for _ in range(10):
            g.command.signal(signal.SIGHUP)
        done = taskqd(g, "reload")
        assert done.returncode != 0
        assert "the group is stopping" in done.stderr
        assert g.command.wait() == 0
        assert not g.events("reload-begin")


def test_f11_a_stop_during_a_roll_breaks_it_off(trial: Trial) -> None:
    with trial({"io": "picky"}, PICKY, ready=2) as g:
        edit(g, ('name = "io"', 'name = "io"\nmax_concurrency = 13'))
        waiting = reloading(g)
        g.wait_for("spawn", 3)
        began = time.monotonic()
        assert g.stop() == 0, g.command.stderr
        assert time.monotonic() - began < 10
        _, told = waiting.communicate(timeout=30)
        assert (waiting.returncode, "broken off: the group is stopping" in told) == (1, True)
        assert g.events("reload-broken-off")


def test_f11_a_stop_during_the_check_breaks_it_off(trial: Trial) -> None:
    with trial(tables=SOON) as g:
        g.command.signal(signal.SIGHUP)
        g.wait_for("reload-begin")
        assert g.stop() == 0
