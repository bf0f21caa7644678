"""The state table in any order of events: 100,000 steps of groups that live, are changed, and stop.

A group of real slots in a real roster, with a clock and processes that are only numbers. What the shell promises is
done as it does it: deadlines are applied when they have passed, one change is made at a time, a signal that kills may
fail to. Everything else happens in any order. After every step every promise of the table is checked.
"""

from __future__ import annotations

import signal
from collections import Counter, deque
from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from taskqd.supervisor.child import Child
from taskqd.supervisor.events import (
    Beat,
    Broken,
    Due,
    Effect,
    EndGroup,
    Event,
    Exited,
    Kill,
    Progress,
    Ready,
    Rearm,
    Recycle,
    Retire,
    Send,
    Settle,
    Spawned,
    SpawnFailed,
    Start,
    Stop,
    Suspected,
)
from taskqd.supervisor.plan import ChildSpec
from taskqd.supervisor.restart import RestartRule
from taskqd.supervisor.roll import AWAY
from taskqd.supervisor.roster import Roster
from taskqd.supervisor.slot import ALIVE, RUNNING, State, Timing
from taskqd.supervisor.state import TABLE, step

EXAMPLES, STEPS = 100, 1000
SPECS = (
    ChildSpec("scheduler", "scheduler", ()),
    ChildSpec("io", "worker", (), replicas=2),
    ChildSpec("cpu", "worker", ()),
)
CODES = (0, 1, 3, 69, 70, 75, 78, -6, -9, -9, -11, -15)
NOT_YET = (State.SPAWNING, State.BOOTING, State.BACKOFF)
SURGE = 1
RULE = RestartRule(stable_after=10, burst_limit=6, burst_window=60)
TIMING = Timing(boot_timeout=20, boot_limit=50, stall_after=3, hang_kill_after=10, restart=RULE)
SAYS: tuple[Event, ...] = (Progress(), Ready(), Ready(), Beat(), Beat(), Beat(), Broken("garbage"), Suspected("x"))


class Tape(bytes):
    """What happens: three bytes for each step."""

    def __repr__(self) -> str:
        return f"<{len(self) // 3} steps>"


class World:
    """One group from its start to its end. ``seen`` counts the pairs of state and event that happened."""

    def __init__(self, seen: Counter[tuple[State, type]]) -> None:
        self.now = 0.0
        self.roster = Roster()
        self.seen = seen
        self.next_pid = 1
        self.born: dict[int, Child] = {}
        self.roll: tuple[Child, Child] | None = None
        self.stops = 0
        self.retired: set[Child] = set()
        self.lately: deque[str] = deque(maxlen=30)
        for spec in SPECS:
            for index in range(spec.replicas):
                child = Child(spec, index, TIMING, lambda *_: None)
                self.roster.place(child)
                self.apply(child, Start())

    # -- what can happen --------------------------------------------------------------------------

    def take(self, what: int, who: int, how: int) -> None:
        """Let one thing happen."""
        child = self.roster.all[who % len(self.roster.all)]
        if what < 60:
            self.time_passes(how)
        elif what < 110:
            self.spawn(how)
        elif what < 170:
            self.apply(child, SAYS[how % len(SAYS)])
        elif what < 185:
            self.all_is_well()
        elif what < 200:
            self.exit(child, how)
        elif what < 210:
            self.begin_roll(child)
        elif what < 222:
            self.end_trial(how)
        elif what < 232:
            self.apply(child, Recycle(self.now + 1 + how / 10, "old"))
        elif what < 238:
            self.apply(child, Rearm(how / 20))
        elif what < 246:
            self.retire(child, how)
        elif what < 252:
            self.rehire(child)
        elif what < 253:
            self.take_over(how)
        else:
            self.stop(how)
        self.tend_roll()
        self.roster.sweep()
        self.check()

    def time_passes(self, how: int) -> None:
        """Half of the time to just when the next deadline is due, which is then applied, as all that are."""
        due = [child.slot.deadline for child in self.roster.all if child.slot.deadline is not None]
        self.now = max(self.now, min(due)) if due and how % 2 else self.now + how / 100
        for child in list(self.roster.all):
            before = child.slot
            if before.deadline is not None and before.deadline <= self.now:
                self.apply(child, Due())
                moved = child.slot.deadline is None or child.slot.deadline > self.now
                assert moved or child.slot.state is not before.state, "a deadline that has passed is dealt with"

    def all_is_well(self) -> None:
        for child in self.roster.all:
            self.apply(child, Ready())
            self.apply(child, Beat())

    def spawn(self, how: int) -> None:
        """The next that waits is made, or cannot be."""
        waiting = [
            child for child in self.roster.all if child.slot.state is State.SPAWNING and self.roster.may_start(child)
        ]
        if not waiting:
            return
        child = waiting[how % len(waiting)]
        if how % 16 == 0:
            self.apply(child, SpawnFailed("no memory"))
            return
        assert not self.stops, "nothing is started after a stop"
        self.born[self.next_pid] = child
        self.apply(child, Spawned(self.next_pid))
        self.next_pid += 1

    def exit(self, child: Child, how: int) -> None:
        if child.slot.state not in ALIVE:
            return
        trial, retired = child.slot.trial, child in self.retired
        effects = self.apply(child, Exited(CODES[how % len(CODES)], came_up=how >= 64, goodbye=how % 5 == 0))
        if self.stops:
            assert child.slot.state is State.DOWN
        elif retired:
            assert child.slot.state is State.RETIRED
        elif trial:
            assert child.slot.state in (State.RETIRED, State.BACKOFF)  # the latter where it was recycled
        if retired or trial or self.stops:
            assert not any(isinstance(effect, EndGroup) for effect in effects)

    def retire(self, child: Child, how: int) -> None:
        """An operator drains a member."""
        if child not in self.roster.members or self.roll is not None:
            return
        before = child.slot.deadline if child.slot.state is State.DRAINING else None
        self.retired.add(child)
        self.apply(child, Retire(self.now + 1 + how / 10))
        if before is not None:
            assert child.slot.deadline is not None
            assert child.slot.deadline <= before, "an end only ever comes sooner"

    def rehire(self, child: Child) -> None:
        if child in self.roster.members and self.roll is None:
            lost = child.slot.state is State.LOST
            self.apply(child, Start())
            if not lost:
                self.retired.discard(child)

    def take_over(self, how: int) -> None:
        """Other limits hold from now on."""
        for child in self.roster.all:
            child.slot = replace(child.slot, timing=replace(TIMING, stall_after=1 + how / 50))

    def stop(self, how: int) -> None:
        """The group stops; asked a second time it hurries, a third time it kills."""
        self.stops = 3 if how % 3 == 0 else self.stops + 1
        self.roll = None
        for child in self.roster.all:
            if self.stops < 3:
                before = child.slot.deadline if child.slot.state is State.DRAINING else None
                self.apply(child, Stop(self.now + how / 10))
                assert before is None or (child.slot.deadline or 0) <= before, "an end only ever comes sooner"
                continue
            alive, hard = child.slot.state in ALIVE - {State.LOST}, child.slot.hard
            effects = self.apply(child, Kill("now"))
            killed = any(isinstance(effect, Send) and effect.number is signal.SIGKILL for effect in effects)
            assert killed or hard or not alive

    # -- one change at a time, as a roll makes it -------------------------------------------------

    def begin_roll(self, old: Child) -> None:
        """A successor starts beside the old process; that of a scheduler only when the old one is gone."""
        if self.roll is not None or self.stops or old not in self.roster.members:
            return
        if old.spec.role == "scheduler":
            self.retired.add(old)
            self.apply(old, Retire(self.now + 5))
        self.roll = (old, old)

    def end_trial(self, how: int) -> None:
        """A process on trial has proved itself."""
        if self.roll is None:
            return
        old, new = self.roll
        if new is not old and new.slot.state is State.READY and old in self.roster.members:
            self.apply(new, Settle())
            self.roster.seat(new, old)
            if old.spec.role == "worker":
                self.retired.add(old)
                self.apply(old, Retire(self.now + 5, "it is old" if how % 3 else None))

    def tend_roll(self) -> None:
        if self.roll is None:
            return
        old, new = self.roll
        if new is old:
            if old.spec.role == "scheduler" and old.slot.state not in AWAY:
                return
            if old.slot.state is State.LOST:
                self.roll = None  # it blocks its successor
                return
            new = Child(old.spec, old.index, TIMING, lambda *_: None)
            self.roster.admit(new)
            self.apply(new, Start(trial=True))
            self.roll = (old, new)
        elif new in self.roster.members:
            if old.slot.state in AWAY:
                self.roll = None
        elif new.slot.state in AWAY:
            self.roll = None
            if old.spec.role == "scheduler":
                self.rehire(old)

    # -- what must hold ---------------------------------------------------------------------------

    def apply(self, child: Child, event: Event) -> list[Effect]:
        before = child.slot
        child.slot, effects = step(before, event, self.now)
        after = child.slot
        self.seen[before.state, type(event)] += 1
        self.lately.append(f"{self.now:.1f} {child.name} #{before.pid} {before.state} {event} → {after.state}")
        if before.state is State.FATAL and after.state is not State.FATAL:
            assert isinstance(event, Start | Retire), "given up is left only by an operator or a change"
        if before.state is State.RETIRED and after != before:
            assert isinstance(event, Start | Stop | Kill), "retired is left only by an operator"
        if before.pid is not None and after.pid != before.pid:
            assert isinstance(event, Exited), "a process is forgotten only when it is gone"
            assert after.pid is None, "one process at a time in a slot"
        if before.pid is None and after.pid is not None:
            assert isinstance(event, Spawned)
            assert before.state is State.SPAWNING
        if self.stops:
            assert after.state not in NOT_YET or after.state is before.state, "nothing is begun after a stop"
        return effects

    def check(self) -> None:
        names: Counter[tuple[str, int]] = Counter()
        extras = 0
        for child in self.roster.all:
            slot = child.slot
            assert (slot.pid is not None) == (slot.state in ALIVE), "a process exists where the state says so"
            if slot.pid is not None:
                assert self.born[slot.pid] is child, "no process has two slots"
                names[child.name, slot.state is State.LOST] += 1
                extras += child not in self.roster.members and slot.state is not State.LOST
            if slot.state in RUNNING or slot.state in (State.DRAINING, State.KILLING, State.BACKOFF):
                assert slot.deadline is not None, "what must end or go on has a deadline"
            if self.stops:
                assert slot.state not in (State.SPAWNING, State.BACKOFF), "nothing waits for its start after a stop"
            if child in self.retired and child in self.roster.members:
                assert slot.state not in NOT_YET, "nothing is started after a retirement"
            assert len(slot.recent) <= RULE.burst_limit, "what is remembered is bounded"
        assert extras <= SURGE, "one process for each place, and the surge"
        assert names["scheduler.0", False] + names["scheduler.0", True] <= 1, "never two schedulers, one lost included"
        assert all(count <= 1 + SURGE for (_, lost), count in names.items() if not lost)

    @property
    def over(self) -> bool:
        return self.stops > 0 and not any(child.slot.state in ALIVE - {State.LOST} for child in self.roster.all)


def test_the_table_keeps_its_promises_in_any_order_of_events() -> None:
    seen: Counter[tuple[State, type]] = Counter()
    steps = 0

    # A history is told by its last events: one of 3,000 bytes, shrunk for minutes, would say less.
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate])
    @given(st.binary(min_size=3 * STEPS, max_size=3 * STEPS).map(Tape))
    def live(tape: Tape) -> None:
        nonlocal steps
        world = World(seen)
        for at in range(0, len(tape), 3):
            try:
                world.take(*tape[at : at + 3])
            except AssertionError as broken:
                broken.add_note("\n".join(world.lately))
                raise
            steps += 1
            if world.over:
                world = World(seen)

    live()
    print(f"{steps} steps")
    assert steps >= 100_000
    unseen = TABLE.keys() - seen.keys()
    assert not unseen, "the histories are such that everything in the table happens"


def test_a_scheduler_that_cannot_be_ended_keeps_every_other_from_its_start() -> None:
    world = World(Counter())
    first = world.roster.members[0]
    for event in (Spawned(1), Ready(), Kill("x"), Due(), Due()):
        world.apply(first, event)
    assert first.slot.state is State.LOST
    second = Child(first.spec, 0, TIMING, lambda *_: None)
    world.roster.admit(second)
    world.apply(second, Start(trial=True))
    assert not world.roster.may_start(second)
    world.apply(first, Exited(-9, came_up=True))
    assert world.roster.may_start(second)
    worker = world.roster.named("io")[0]
    assert world.roster.may_start(worker)
