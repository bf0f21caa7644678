"""Who is asked to settle a dead worker's jobs, in which order, and what follows when nobody can."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taskqd.domain.errors import DatabaseUnavailableError
from taskqd.supervisor import release as module
from taskqd.supervisor.journal import Journal
from taskqd.supervisor.record import Record
from taskqd.supervisor.release import Releaser
from taskqd.supervisor.slot import State
from tests.support import eventually


@dataclass
class Sibling:
    """What the releaser uses of a child: its state, what it says when asked, and what it was asked."""

    name: str
    role: str = "worker"
    state: State = State.READY
    beat_at: float | None = 1.0
    answer: dict[str, Any] | None = None
    worker_id: str | None = None
    left_nothing: bool = False
    zygote: int | None = None
    asked: list[list[str]] = field(default_factory=list)

    @property
    def slot(self) -> SimpleNamespace:
        return SimpleNamespace(state=self.state, pid=os.getpid())

    @property
    def spec(self) -> SimpleNamespace:
        return SimpleNamespace(role=self.role)

    async def ask(self, op: str, timeout: float, *, worker_ids: list[str]) -> dict[str, Any] | None:
        assert (op, timeout) == ("release", module.ANSWER_TIMEOUT)
        self.asked.append(worker_ids)
        return self.answer


class Bench:
    """A releaser among siblings, with a helper that a test can break."""

    def __init__(self, path: Path, siblings: Sequence[Sibling]) -> None:
        self._log, self._out = os.pipe()
        self.record = Record(str(path))
        self.helped: list[list[str]] = []
        self.helper_error: Exception | None = None
        self.releaser = Releaser(self.record, Journal(self._out, human=False), self._help)
        self.releaser.children = siblings  # type: ignore[assignment]

    async def _help(self, workers: Sequence[str]) -> int:
        self.helped.append(list(workers))
        if self.helper_error is not None:
            raise self.helper_error
        return 1

    def die(self, worker_id: str, code: int = -9, **more: Any) -> None:
        dead = Sibling("dead", worker_id=worker_id, **more)
        self.releaser.heard(dead)  # type: ignore[arg-type]
        self.releaser.ended(dead, code)  # type: ignore[arg-type]

    async def settled(self) -> None:
        await eventually(lambda: not self.record.entries)

    def told(self) -> list[dict[str, Any]]:
        os.set_blocking(self._log, False)
        try:
            return [json.loads(line) for line in os.read(self._log, 1 << 20).splitlines()]
        except BlockingIOError:
            return []


MakeBench = Callable[..., Bench]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[MakeBench]:
    made: list[Bench] = []

    def make(*siblings: Sibling) -> Bench:
        new = Bench(tmp_path / "g.state.json", siblings)
        new.releaser.start()
        made.append(new)
        return new

    yield make
    for each in made:
        await each.releaser.finish(0)


async def test_what_is_left_of_isolated_jobs_is_waited_for_and_not_for_ever(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench(sibling := Sibling("io.0", answer={"taken": 1}))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as zygote:
        made.die("a", zygote=zygote.pid)
        made.die("b")
        await eventually(lambda: sibling.asked == [["b"]])
        await asyncio.sleep(0.05)
        assert sibling.asked == [["b"]]
        zygote.kill()
    await eventually(lambda: sibling.asked == [["b"], ["a"]])
    monkeypatch.setattr(module, "_LINGER_TIME", 0.1)
    made.die("c", zygote=os.getpid())
    await eventually(lambda: sibling.asked == [["b"], ["a"], ["c"]])


async def test_a_worker_is_asked_before_the_scheduler_and_who_spoke_last_first(bench: MakeBench) -> None:
    scheduler = Sibling("scheduler.0", "scheduler", beat_at=9.0, answer={"taken": 0})
    older, newer = Sibling("io.0", beat_at=1.0, answer={"taken": 0}), Sibling("io.1", beat_at=2.0, answer={"taken": 7})
    made = bench(scheduler, older, newer)
    made.die("a")
    await made.settled()
    assert (scheduler.asked, older.asked, newer.asked, made.helped) == ([], [], [["a"]], [])
    (told,) = made.told()
    assert (told["event"], told["workers"], told["jobs"], told["by"]) == ("jobs-released", ["a"], 7, "io.1")


@pytest.mark.parametrize("answer", [None, {"error": "no"}, {"taken": "many"}, {}])
async def test_one_that_does_not_settle_is_passed_over(bench: MakeBench, answer: dict[str, Any] | None) -> None:
    mute = Sibling("io.0", beat_at=2.0, answer=answer)
    scheduler = Sibling("scheduler.0", "scheduler", answer={"taken": 1})
    made = bench(mute, scheduler)
    made.die("a")
    await made.settled()
    assert (len(mute.asked), len(scheduler.asked), made.helped) == (1, 1, [])


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
async def test_only_who_is_ready_is_asked_else_the_helper(bench: MakeBench, state: State) -> None:
    other = Sibling("io.0", state=state, answer={"taken": 1})
    made = bench(other)
    made.die("a")
    await made.settled()
    assert (other.asked, made.helped) == ([], [["a"]])


@pytest.mark.parametrize(
    "error", [DatabaseUnavailableError("away"), OSError("no process"), KeyError("taken"), ValueError()]
)
async def test_while_nobody_can_it_is_tried_again_and_the_record_keeps_it(
    bench: MakeBench, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    made = bench()
    made.helper_error = error
    made.die("a")
    await eventually(lambda: len(made.helped) >= 3)
    assert [entry.worker_id for entry in made.record.entries] == ["a"]
    made.helper_error = None
    await made.settled()
    told = made.told()
    assert [event["event"] for event in told[-2:]] == ["release-failed", "jobs-released"]
    assert "helper: " in told[0]["why"]


async def test_the_helper_is_spared_when_somebody_said_why_not(bench: MakeBench) -> None:
    away = Sibling("io.0", answer={"error": "the database is away"})
    made = bench(away)
    made.die("a")
    await eventually(lambda: away.asked)
    await made.releaser.finish(0)
    assert made.helped == []
    assert "io.0: the database is away" in made.told()[0]["why"]
    assert "a" in made.record


@pytest.mark.parametrize(
    ("code", "left_nothing", "released"),
    [(0, True, False), (0, False, True), (1, True, True), (-9, False, True), (75, True, False)],
)
async def test_who_ended_well_and_held_nothing_needs_nobody(
    bench: MakeBench, code: int, left_nothing: bool, released: bool
) -> None:
    sibling = Sibling("io.0", answer={"taken": 0})
    made = bench(sibling)
    made.die("a", code, left_nothing=left_nothing)
    await made.settled()
    assert bool(sibling.asked) is released


async def test_many_deaths_are_settled_in_bounded_lots(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 3)
    sibling = Sibling("io.0", answer={"taken": 0})
    made = bench(sibling)
    for number in range(7):
        made.die(f"w{number}")
    await made.settled()
    assert [len(asked) for asked in sibling.asked] == [3, 3, 1]


async def test_the_end_waits_for_what_is_under_way_and_no_longer(bench: MakeBench) -> None:
    made = bench()
    gate = asyncio.Event()

    async def slow(workers: Sequence[str]) -> int:
        await gate.wait()
        return 1

    made.releaser._helper = slow
    made.die("a")
    await asyncio.sleep(0)
    ending = asyncio.ensure_future(made.releaser.finish(10))
    await asyncio.sleep(0.05)
    assert not ending.done()
    gate.set()
    await ending
    assert made.record.entries == ()


async def test_a_process_that_never_said_who_it_is_left_nothing(bench: MakeBench) -> None:
    made = bench(Sibling("io.0"))
    nameless = Sibling("io.1", worker_id=None)
    made.releaser.heard(nameless)  # type: ignore[arg-type]
    made.releaser.ended(nameless, -9)  # type: ignore[arg-type]
    assert made.record.entries == ()
    await asyncio.sleep(0.01)
    assert made.told() == []
