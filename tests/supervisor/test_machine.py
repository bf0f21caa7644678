"""What the machine does to the whole group, and what follows: no processor, no memory, many that stall or die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import taskqd.supervisor.renewal as renewal_module
from taskqd.supervisor.cgroup import Cgroup, Memory
from taskqd.supervisor.child import Child
from taskqd.supervisor.deaths import APART, AT_LEAST, PAUSE, STAGGER, TOGETHER, Deaths
from taskqd.supervisor.events import Beat, Due, Event, Ready, Recycle, Spawned, Start
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.machine import LOOK_INTERVAL, Machine
from taskqd.supervisor.memory import Held
from taskqd.supervisor.pardon import KILLS_APART, Pardons
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.renewal import RELIEF_PAUSE, Renewal
from taskqd.supervisor.restart import RestartRule
from taskqd.supervisor.slot import State, Timing
from taskqd.supervisor.state import step
from tests.supervisor.conftest import StartGroup
from tests.support import wait_until

MB = 1024**2
REAL = Path("/sys/fs/cgroup")
TIMING = Timing(stall_after=3, hang_kill_after=30, restart=RestartRule(stable_after=10))


class FakeCgroup:
    """The files of one control group below a directory, of either version."""

    def __init__(self, directory: Path, version: int) -> None:
        self.version = version
        self.root, self.own = directory / "fs", directory / "own"
        self.own.write_text("0::/pod/me\n" if version == 2 else "4:memory:/pod/me\n1:cpu,cpuacct:/pod/me\n0::/\n")
        self.memory = self.root / ("pod/me" if version == 2 else "memory/pod/me")
        self.cpu = self.root / ("pod/me" if version == 2 else "cpu/pod/me")
        for place in (self.memory, self.cpu):
            place.mkdir(parents=True, exist_ok=True)
        self.fill(used=100 * MB, limit=None)
        self.throttle(0)
        self.kill(0)
        self.press(0)

    def open(self) -> Cgroup:
        return Cgroup(str(self.root), str(self.own))

    def fill(self, *, used: int, limit: int | None, droppable: int = 0, at: Path | None = None) -> None:
        place = at or self.memory
        names = ("current", "max") if self.version == 2 else ("usage_in_bytes", "limit_in_bytes")
        none = "max" if self.version == 2 else str(2**63 - 4096)
        (place / f"memory.{names[0]}").write_text(f"{used}\n")
        (place / f"memory.{names[1]}").write_text(f"{limit or none}\n")
        field = "inactive_file" if self.version == 2 else "total_inactive_file"
        (place / "memory.stat").write_text(f"anon 1\n{field} {droppable}\n")

    def throttle(self, seconds: float) -> None:
        field = f"throttled_usec {seconds * 1e6:.0f}" if self.version == 2 else f"throttled_time {seconds * 1e9:.0f}"
        (self.cpu / "cpu.stat").write_text(f"nr_periods 10\n{field}\n")

    def kill(self, count: int) -> None:
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        (self.memory / name).write_text(f"low 0\nunder_oom 0\noom_kill {count}\n")

    def press(self, percent: float) -> None:
        if self.version == 2:
            some = f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\n"
            (self.memory / "memory.pressure").write_text(f"{some}full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return FakeCgroup(tmp_path, request.param)


# -- what is read ---------------------------------------------------------------------------------


def test_a_group_without_a_limit_is_never_full(fake: FakeCgroup) -> None:
    assert fake.open().memory() is None


def test_files_that_the_kernel_can_drop_do_not_count_as_used(fake: FakeCgroup) -> None:
    fake.fill(used=950 * MB, limit=1000 * MB, droppable=300 * MB)
    assert fake.open().memory() == Memory(650 * MB, 1000 * MB)


def test_of_nested_groups_the_fullest_counts(fake: FakeCgroup) -> None:
    fake.fill(used=100 * MB, limit=1000 * MB)
    fake.fill(used=450 * MB, limit=500 * MB, at=fake.memory.parent)
    assert fake.open().memory() == Memory(450 * MB, 500 * MB)


def test_time_without_the_processor_and_kills_are_read(fake: FakeCgroup) -> None:
    cgroup = fake.open()
    fake.throttle(12.5)
    fake.kill(3)
    assert (cgroup.throttled(), cgroup.oom_kills()) == (12.5, 3)
    fake.press(33.25)
    assert cgroup.pressure() == (33.25 if fake.version == 2 else None)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    fake = FakeCgroup(tmp_path, 2)
    fake.own.write_text("0::/../../kubepods/elsewhere\n")
    (fake.root / "memory.current").write_text("5\n")
    (fake.root / "memory.max").write_text("10\n")
    assert fake.open().memory() == Memory(5, 10)


def test_where_there_is_no_control_group_nothing_is_known(tmp_path: Path) -> None:
    cgroup = Cgroup(str(tmp_path), str(tmp_path / "none"))
    assert (cgroup.memory(), cgroup.throttled(), cgroup.pressure(), cgroup.oom_kills()) == (None, None, None, None)


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_strange_files_break_nothing(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        for version in (1, 2):
            fake = FakeCgroup(Path(directory), version)
            for file in (*fake.memory.iterdir(), *fake.cpu.iterdir()):
                file.write_text(text)
            cgroup = fake.open()
            cgroup.memory(), cgroup.throttled(), cgroup.pressure(), cgroup.oom_kills()


def test_a_real_group_whose_processor_time_is_limited_says_so(tmp_path: Path) -> None:
    home = REAL / "cpu" / f"taskqd-test-{os.getpid()}"
    try:
        home.mkdir()
        (home / "cpu.cfs_quota_us").write_text("10000")
    except OSError as error:
        pytest.skip(f"no writable cpu control group of version 1: {error.strerror}")
    own = tmp_path / "own"
    own.write_text(f"1:cpu:/{home.name}\n")
    cgroup = Cgroup(str(REAL), str(own))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = cgroup.throttled()
        assert before is not None
        (home / "cgroup.procs").write_text(str(busy.pid))
        wait_until(lambda: (cgroup.throttled() or 0) - before > 0.3, 30)
    finally:
        busy.kill()
        busy.wait()
        wait_until(lambda: not (home / "cgroup.procs").read_text().strip(), 20)
        home.rmdir()


# -- what it comes to -----------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with open(tmp_path / "journal", "w") as file:
        yield Journal(file.fileno(), human=False)


def test_a_group_is_throttled_when_it_waits_more_than_it_runs(fake: FakeCgroup, journal: Journal) -> None:
    machine = Machine(fake.open(), journal)
    machine.look(100)
    fake.throttle(0.4 * LOOK_INTERVAL)
    machine.look(100 + LOOK_INTERVAL)
    assert (round(machine.throttled, 2), machine.withholds) == (0.4, False)
    fake.throttle(1.1 * LOOK_INTERVAL)
    machine.look(100 + 1.5 * LOOK_INTERVAL)
    assert not machine.withholds, "it is not time to look"
    machine.look(100 + 2 * LOOK_INTERVAL)
    assert (round(machine.throttled, 2), machine.withholds) == (0.7, True)
    machine.look(100 + 3 * LOOK_INTERVAL)
    assert not machine.withholds


def test_want_of_memory_is_a_full_group_or_one_that_waits_for_it(fake: FakeCgroup, journal: Journal) -> None:
    machine = Machine(fake.open(), journal)

    def want(at: float) -> str:
        machine.look(at)
        return machine.want_of_memory()

    assert want(10) == ""
    fake.fill(used=900 * MB, limit=1000 * MB)
    assert want(20) == ""
    fake.fill(used=901 * MB, limit=1000 * MB)
    assert want(30) == "the group holds 901 of 1000 MB"
    fake.fill(used=500 * MB, limit=1000 * MB)
    fake.press(31)
    waits = "the group holds 500 of 1000 MB and waits for memory 31 % of the time"
    assert want(40) == (waits if fake.version == 2 else "")


# -- many at once ---------------------------------------------------------------------------------


class Bench:
    """Slots of ready processes, driven by a clock."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.applied: list[tuple[str, Event]] = []
        self.dumped: list[Child] = []
        self.children = [Child(ChildSpec("io", "worker", ()), index, TIMING, lambda *_: None) for index in range(count)]
        for number, child in enumerate(self.children):
            for event in (Start(), Spawned(number + 1), Ready()):
                self.apply(child, event)
        self.applied.clear()

    def apply(self, child: Child, event: Event) -> None:
        self.applied.append((child.name, event))
        child.slot, _ = step(child.slot, event, self.now)

    def due(self) -> None:
        for child in self.children:
            if child.slot.deadline is not None and child.slot.deadline <= self.now:
                self.apply(child, Due())

    def states(self) -> list[str]:
        return [str(child.slot.state) for child in self.children]


def run(bench: Bench, pardons: Pardons, until: float, *, throttled: bool = False, beating: int = 0) -> None:
    """Rounds of half a second; the first ``beating`` processes beat."""
    while bench.now < until:
        bench.now += 0.5
        for child in bench.children[:beating]:
            bench.apply(child, Beat())
        pardons.round(bench.children, bench.now, throttled=throttled)
        bench.due()


def test_of_those_that_went_silent_together_one_at_a_time_is_killed(journal: Journal) -> None:
    bench = Bench(4)
    pardons = Pardons(bench.apply, journal, dump=bench.dumped.append)
    run(bench, pardons, 62)
    assert bench.states() == ["stalled"] * 4, "none before the second hang_kill_after has passed"
    killed: list[float] = []
    while bench.now < 62 + 4 * KILLS_APART:
        before = bench.states().count("stalled")
        run(bench, pardons, bench.now + 0.5)
        killed += [bench.now] * (before - bench.states().count("stalled"))
    assert len(killed) == 4
    assert all(later - sooner >= KILLS_APART for sooner, later in pairwise(killed))


def test_when_most_went_silent_together_the_others_show_where_they_are_too(journal: Journal) -> None:
    bench = Bench(5)
    run(bench, Pardons(bench.apply, journal, dump=bench.dumped.append), 40, beating=2)
    assert bench.states() == ["ready", "ready", "stalled", "stalled", "stalled"]
    assert bench.dumped == bench.children[:2], "once"


def test_one_that_is_silent_alone_is_killed_in_its_time(journal: Journal) -> None:
    bench = Bench(4)
    run(bench, Pardons(bench.apply, journal, dump=bench.dumped.append), 33.5, beating=3)
    assert bench.states()[3] == "killing"


def test_a_group_that_gets_no_processor_has_twice_the_time_and_no_more(journal: Journal) -> None:
    bench = Bench(3)
    pardons = Pardons(bench.apply, journal, dump=bench.dumped.append)
    run(bench, pardons, 5.5, throttled=True, beating=2)
    assert bench.states()[2] == "ready", "stall_after counts twice"
    run(bench, pardons, 65.5, throttled=True, beating=2)
    assert bench.states()[2] == "stalled", "and so does hang_kill_after"
    run(bench, pardons, 67.5, throttled=True, beating=2)
    assert bench.states() == ["ready", "ready", "killing"]


def test_too_many_deaths_pause_and_then_space_the_starts() -> None:
    deaths = Deaths()
    assert [deaths.died(f"io.{index}", 100 + index, 8) for index in range(4)] == [[]] * 4
    assert deaths.may_start(104)
    assert deaths.died("io.4", 104, 8) == [f"io.{index}" for index in range(5)], "more than half"
    assert deaths.died("io.5", 104.5, 8) == [], "told once"
    assert (deaths.may_start(105.9), deaths.next_start(105.9)) == (False, 104 + PAUSE)
    assert deaths.may_start(106)
    deaths.started(106)
    assert not deaths.may_start(106 + APART / 2)
    assert deaths.may_start(106 + APART)
    deaths.started(106 + STAGGER)
    assert deaths.may_start(106 + STAGGER), "it is over"


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=40), st.integers(1, 20))
def test_deaths_together_by_their_definition(history: list[tuple[float, int]], of: int) -> None:
    deaths, now, died = Deaths(), 0.0, dict[str, float]()
    for gap, who in history:
        now += gap
        died[f"io.{who}"] = now
        together = {name for name, at in died.items() if now - at <= TOGETHER}
        told = deaths.died(f"io.{who}", now, of)
        if told:
            assert set(told) == together
            assert len(together) > max(AT_LEAST, of / 2)
            assert not deaths.may_start(now)
        elif deaths.may_start(now):
            assert len(together) <= max(AT_LEAST, of / 2)


# -- want of memory -------------------------------------------------------------------------------


def test_for_want_of_memory_the_one_that_holds_most_goes_and_one_at_a_time(
    fake: FakeCgroup, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(3)
    held = dict(zip((1, 2, 3), (100, 300, 200), strict=True))
    monkeypatch.setattr(renewal_module, "held_by", lambda pid: Held(900 * MB - held[pid] * MB, held[pid] * MB))
    machine = Machine(fake.open(), journal)
    renewal = Renewal(lambda: Plan("g", ()), bench.apply, machine, is_wedged=lambda *_: "", tell=lambda *_: None)
    renewal.succeed = lambda *_: pytest.fail("a successor beside it would need more memory")

    def round_at(now: float) -> list[str]:
        bench.now = now
        machine.look(now)
        for _ in bench.children:  # one is measured a round
            renewal.round(bench.children, now)
        gone = [name for name, event in bench.applied if isinstance(event, Recycle)]
        bench.applied.clear()
        return gone

    fake.fill(used=950 * MB, limit=1000 * MB)
    assert round_at(5) == [], "nobody who has just begun"
    assert round_at(20) == ["io.1"]
    assert bench.children[1].slot.replaced == "the group holds 950 of 1000 MB, and it the most of them, 300 MB"
    assert round_at(100) == [], "not while it is on its way"
    bench.children[1].slot = bench.children[1].slot.enter(State.READY, 100, None, ready_at=100)
    assert round_at(103) == [], "its successor may show first what was won"
    assert round_at(106 + RELIEF_PAUSE) == ["io.1"]

    # It has not helped: the next one has twice the time. It has helped: all is as at first.
    back = 150.0
    bench.children[1].slot = bench.children[1].slot.enter(State.READY, back, None, ready_at=back)
    assert round_at(back) == []
    assert round_at(back + RELIEF_PAUSE + 5) == []
    fake.fill(used=500 * MB, limit=1000 * MB)
    assert round_at(back + 2 * RELIEF_PAUSE + 5) == []
    fake.fill(used=950 * MB, limit=1000 * MB)
    assert round_at(back + 2 * RELIEF_PAUSE + 10) == ["io.1"]
    back = 300.0
    bench.children[1].slot = bench.children[1].slot.enter(State.READY, back, None, ready_at=back)
    assert round_at(back) == []
    assert round_at(back + RELIEF_PAUSE + 5) == ["io.1"]


def test_nobody_goes_whose_end_would_win_nothing(
    fake: FakeCgroup, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(2)
    machine = Machine(fake.open(), journal)
    renewal = Renewal(lambda: Plan("g", ()), bench.apply, machine, is_wedged=lambda *_: "", tell=lambda *_: None)
    fake.fill(used=950 * MB, limit=1000 * MB)
    monkeypatch.setattr(renewal_module, "held_by", lambda _pid: Held(49 * MB, 49 * MB))
    machine.look(50)
    for _ in range(3):
        renewal.round(bench.children, 50)
    assert not any(isinstance(event, Recycle) for _, event in bench.applied)


# -- real processes -------------------------------------------------------------------------------


def test_a_group_in_a_control_group_heeds_it(tmp_path: Path, group: StartGroup) -> None:
    fake = FakeCgroup(tmp_path, 2)
    quick = "stable_after = 0.5\nbackoff_initial = 0.05\nburst_limit = 0"
    g = group(tables={"supervisor": quick, "[workers]": "replicas = 3"}, STANDIN_CGROUP=str(tmp_path))
    began = time.monotonic()
    first, second, _ = (int(event["pid"]) for event in g.wait_for("ready", 3))

    # Kills for want of memory are named; another SIGKILL is not taken for one.
    fake.kill(1)
    os.kill(first, signal.SIGKILL)
    assert g.wait_for("child-exit")[0]["class"] == "oom"
    os.kill(second, signal.SIGKILL)
    assert g.wait_for("child-exit", 2)[1]["class"] == "crash"
    g.wait_for("ready", 5)

    # It gets no processor since it began: deadlines are doubled until it gets some again.
    def throttle() -> bool:
        fake.throttle(time.monotonic() - began)
        return bool(g.events("throttled"))

    wait_until(throttle, 30)
    assert g.events("throttled")[0]["deadlines"] == "doubled"
    g.wait_for("throttled-no-more")

    # Its memory is full: the process that holds most makes room, and one is enough.
    wait_until(lambda: all(child["private_bytes"] for child in g.ask("/status")[1]["children"]), 60)
    fake.fill(used=95 * MB, limit=100 * MB)
    (recycle,) = g.wait_for("recycle")
    fake.fill(used=50 * MB, limit=100 * MB)
    assert "the group holds 95 of 100 MB, and it the most of them, " in recycle["why"]
    end = g.wait_for("child-exit", 3)[2]
    assert (end["code"], end["class"]) == (75, "recycle")
    g.wait_for("ready", 6)
    assert len(g.events("recycle")) == 1
    assert g.stop() == 0, g.command.stderr


def test_when_many_die_at_one_time_nothing_is_started_for_a_moment(group: StartGroup) -> None:
    g = group(tables={"supervisor": "stable_after = 0.2\nbackoff_initial = 0.05", "[workers]": "replicas = 5"})
    pids = [int(event["pid"]) for event in g.wait_for("ready", 5)]
    wait_until(lambda: all(child["for_s"] > 0.5 for child in g.ask("/status")[1]["children"]), 20)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    (told,) = g.wait_for("correlated-exit")
    assert (told["of"], len(told["children"])) == (5, 4), "more than three, and more than half"
    g.wait_for("ready", 10)
    began = when(told)
    later = [at for at in map(when, g.events("spawn")) if at > began]
    assert len(later) >= 2, "those that had died by then, at least"
    assert later[0] - began > PAUSE - 0.1
    assert all(after - before > APART - 0.1 for before, after in pairwise(later))
    assert g.stop() == 0, g.command.stderr


def when(event: dict[str, object]) -> float:
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()
