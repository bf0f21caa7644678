"""The table of a slot's life: complete, and what each event does."""

from __future__ import annotations

import signal
from typing import get_args

import pytest

from taskqd.domain.exit_codes import ExitCode
from taskqd.supervisor.events import (
    AskToDrain,
    Beat,
    Broken,
    Due,
    Effect,
    EndGroup,
    Event,
    Exited,
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
    Tell,
)
from taskqd.supervisor.exits import ExitClass
from taskqd.supervisor.restart import RestartRule
from taskqd.supervisor.slot import Slot, State, Timing
from taskqd.supervisor.state import ABORT_WAIT, IGNORED, REAP_WAIT, TABLE, step

TIMING = Timing(
    boot_timeout=60, boot_limit=300, stall_after=3, hang_kill_after=30, restart=RestartRule(stable_after=10)
)


def drive(*events: tuple[float, Event], slot: Slot | None = None) -> tuple[Slot, list[Effect]]:
    """The slot after the events, each at its time, and everything that was asked of the shell."""
    current, asked = slot or Slot("io.0", TIMING), list[Effect]()
    for now, event in events:
        current, effects = step(current, event, now)
        asked += effects
    return current, asked


def signals(effects: list[Effect]) -> list[int]:
    return [effect.number for effect in effects if isinstance(effect, Send)]


def ready_slot() -> Slot:
    return drive((0, Start()), (0, Spawned(100)), (1, Ready()))[0]


def test_every_pair_of_state_and_event_is_decided() -> None:
    pairs = {(state, event) for state in State for event in get_args(Event)}
    assert TABLE.keys() | IGNORED == pairs
    assert not TABLE.keys() & IGNORED


def test_a_slot_comes_up() -> None:
    slot = ready_slot()
    assert (slot.state, slot.pid, slot.deadline) == (State.READY, 100, 1 + 3)


def test_a_beat_moves_the_stall_deadline() -> None:
    slot, _ = drive((2, Beat()), slot=ready_slot())
    assert slot.deadline == 2 + 3


def test_silence_is_dumped_then_aborted_then_killed_then_lost() -> None:
    slot, asked = drive((4, Due()), slot=ready_slot())
    assert (slot.state, signals(asked)) == (State.STALLED, [signal.SIGUSR1])
    slot, asked = drive((34, Due()), slot=slot)
    assert (slot.state, signals(asked), slot.deadline) == (State.KILLING, [signal.SIGABRT], 34 + ABORT_WAIT)
    slot, asked = drive((35, Due()), slot=slot)
    assert (slot.state, signals(asked), slot.deadline) == (State.KILLING, [signal.SIGKILL], 35 + REAP_WAIT)
    slot, asked = drive((40, Due()), slot=slot)
    assert (slot.state, slot.pid) == (State.LOST, 100)


def test_a_hung_process_that_died_is_restarted_and_called_hung() -> None:
    slot, _ = drive((44, Due()), (74, Due()), (74.1, Exited(-6, True)), slot=ready_slot())
    assert slot.state is State.BACKOFF
    assert slot.last_exit is not None
    assert slot.last_exit.kind is ExitClass.HUNG
    assert "sent no beat for 33 s" in slot.last_exit.why


def test_a_beat_ends_a_stall() -> None:
    slot, _ = drive((4, Due()), (20, Beat()), slot=ready_slot())
    assert (slot.state, slot.deadline) == (State.READY, 23)


def test_boot_progress_renews_the_deadline_up_to_the_limit() -> None:
    slot, _ = drive((0, Start()), (0, Spawned(1)), (50, Progress()))
    assert slot.deadline == 110
    slot, _ = drive((290, Progress()), slot=slot)
    assert slot.deadline == 300
    slot, asked = drive((300, Due()), slot=slot)
    assert (slot.state, signals(asked)) == (State.KILLING, [signal.SIGABRT])


def test_a_standstill_of_the_supervisor_accuses_nobody() -> None:
    slot, asked = drive((61, Rearm(60)), (61, Beat()), slot=ready_slot())
    assert (slot.state, asked) == (State.READY, [])
    slot, _ = drive((61, Rearm(60)), slot=ready_slot())
    assert slot.deadline == 64


def test_a_standstill_does_not_extend_a_stop() -> None:
    slot, _ = drive((5, Stop(20)), (15, Rearm(10)), slot=ready_slot())
    assert slot.deadline == 20


def test_a_stop_drains_then_kills() -> None:
    slot, asked = drive((5, Stop(20)), slot=ready_slot())
    assert slot.state is State.DRAINING
    assert AskToDrain() in asked
    slot, asked = drive((20, Due()), slot=slot)
    assert (slot.state, signals(asked)) == (State.KILLING, [signal.SIGKILL])
    slot, _ = drive((20.1, Exited(-9, True)), slot=slot)
    assert (slot.state, slot.unclean) == (State.DOWN, True)


def test_a_stop_only_ever_comes_sooner() -> None:
    slot, _ = drive((5, Stop(20)), (6, Stop(10)), (7, Stop(30)), slot=ready_slot())
    assert slot.deadline == 10


def test_a_stopped_process_that_ends_well_is_clean() -> None:
    slot, _ = drive((5, Stop(20)), (6, Exited(0, True)), slot=ready_slot())
    assert (slot.state, slot.unclean) == (State.DOWN, False)


@pytest.mark.parametrize("code", [70, 1, -11, -15])
def test_a_ready_process_that_fails_while_stopping_is_unclean(code: int) -> None:
    slot, _ = drive((5, Stop(20)), (6, Exited(code, True)), slot=ready_slot())
    assert slot.unclean


def test_a_late_sigterm_from_elsewhere_does_not_taint_what_had_said_goodbye() -> None:
    slot, _ = drive((5, Stop(20)), (6, Exited(-15, True, goodbye=True)), slot=ready_slot())
    assert not slot.unclean


@pytest.mark.parametrize("code", [0, -15, 69])
def test_how_a_booting_process_ends_when_stopped_is_no_loss(code: int) -> None:
    slot, _ = drive((0, Start()), (0, Spawned(1)), (1, Stop(20)), (2, Exited(code, False)))
    assert (slot.state, slot.unclean) == (State.DOWN, False)


def test_a_stop_cancels_what_is_only_planned() -> None:
    waiting, _ = drive((0, Start()))
    assert drive((1, Stop(20)), slot=waiting)[0].state is State.DOWN
    backoff, _ = drive((0, Start()), (0, Spawned(1)), (1, Exited(1, False)))
    assert drive((1, Stop(20)), slot=backoff)[0].state is State.DOWN


def test_a_process_that_speaks_another_protocol_is_ended_and_replaced() -> None:
    slot, asked = drive((2, Broken("garbage")), (2.1, Exited(-6, True)), slot=ready_slot())
    assert signal.SIGABRT in signals(asked)
    assert slot.state is State.BACKOFF


@pytest.mark.parametrize("code", [0, 75])
def test_a_recycled_process_is_followed_at_once_and_counts_against_nobody(code: int) -> None:
    slot, asked = drive((5, Recycle(20, "ran 10 jobs")), (7, Exited(code, True)), slot=ready_slot())
    assert AskToDrain() in asked
    assert (slot.state, slot.deadline, slot.unstable, slot.restarts) == (State.BACKOFF, 7, 0, 0)
    assert (slot.recent, slot.recycled) == ((), 1)
    assert slot.last_exit is not None
    assert (slot.last_exit.kind, slot.last_exit.why) == (ExitClass.RECYCLE, "recycled: ran 10 jobs")


@pytest.mark.parametrize(("code", "unclean"), [(0, False), (75, False), (1, True)])
def test_a_process_whose_successor_stands_beside_it_may_say_that_it_was_recycled(code: int, unclean: bool) -> None:
    slot, _ = drive((5, Retire(20, "ran 10 jobs")), (7, Exited(code, True)), slot=ready_slot())
    assert (slot.state, slot.unclean) == (State.RETIRED, unclean)


def test_the_end_says_for_how_long_it_drained_and_what_came_of_it() -> None:
    def drained(*events: tuple[float, Event]) -> tuple[float, str]:
        _, asked = drive((5, Stop(20)), *events, slot=ready_slot())
        (end,) = [effect.fields for effect in asked if isinstance(effect, Tell) and effect.event == "child-exit"]
        return end["drain_s"], end["drained"]

    assert drained((7, Exited(0, True))) == (2, "well")
    assert drained((7, Exited(1, True))) == (2, "failed")
    assert drained((20, Due()), (21, Exited(-9, True))) == (16, "killed")


def test_each_deadly_signal_is_told_with_its_cause() -> None:
    _, asked = drive((4, Due()), (34, Due()), (35, Due()), slot=ready_slot())
    kills = [effect.fields for effect in asked if isinstance(effect, Tell) and effect.event == "kill"]
    assert [(kill["signal"], kill["cause"]) for kill in kills] == [("SIGABRT", "stall"), ("SIGKILL", "stall")]


def test_a_process_that_is_ready_again_says_how_long_that_took_since_the_crash() -> None:
    history: list[tuple[float, Event]] = [(20, Exited(-9, True)), (20, Due()), (20, Spawned(7)), (21, Exited(1, True))]
    _, asked = drive(*history, (22, Due()), (22, Spawned(8)), (23, Ready()), slot=ready_slot())
    (ready,) = [effect.fields for effect in asked if isinstance(effect, Tell) and effect.event == "ready"]
    assert ready["after_crash_s"] == 3


def test_a_recycled_process_that_does_not_end_is_killed_and_followed() -> None:
    slot, asked = drive((5, Recycle(20, "old")), (20, Due()), (21, Exited(-9, True)), slot=ready_slot())
    assert signal.SIGKILL in signals(asked)
    assert (slot.state, slot.restarts) == (State.BACKOFF, 1)


def test_a_recycled_process_that_fails_on_its_way_out_counts_as_failed() -> None:
    slot, _ = drive((5, Recycle(20, "old")), (6, Exited(1, True)), slot=ready_slot())
    assert (slot.state, slot.restarts, slot.unstable) == (State.BACKOFF, 1, 1)


def test_a_stop_during_a_recycle_ends_it_for_good() -> None:
    slot, _ = drive((5, Recycle(20, "old")), (6, Stop(15)), (7, Exited(0, True)), slot=ready_slot())
    assert (slot.state, slot.unclean) == (State.DOWN, False)


def test_what_a_silent_process_suffers_from_is_said_when_it_is_killed() -> None:
    slot, _ = drive((4, Due()), (5, Suspected("blocked loop")), (34, Due()), slot=ready_slot())
    assert slot.kill_reason == "sent no beat for 33 s: blocked loop"
    slot, _ = drive((4, Due()), (5, Suspected("blocked loop")), (6, Beat()), slot=ready_slot())
    assert slot.suspicion == ""


def test_a_process_that_could_not_be_made_is_tried_again() -> None:
    slot, _ = drive((0, Start()), (0, SpawnFailed("no memory")), (0.5, Due()))
    assert (slot.state, slot.unstable) == (State.SPAWNING, 1)


def test_refusal_in_the_boot_phase_ends_the_group() -> None:
    slot, asked = drive((0, Start()), (0, Spawned(1)), (1, Exited(78, False)))
    assert slot.state is State.FATAL
    assert [effect.code for effect in asked if isinstance(effect, EndGroup)] == [ExitCode.REFUSED]


def test_refusal_later_gives_up_that_process_alone() -> None:
    slot, asked = drive((20, Exited(78, True)), slot=ready_slot())
    assert slot.state is State.FATAL
    assert not any(isinstance(effect, EndGroup) for effect in asked)


def test_a_retired_process_drains_and_stays_away_until_started() -> None:
    slot, asked = drive((5, Retire(20)), slot=ready_slot())
    assert (slot.state, slot.deadline) == (State.DRAINING, 20)
    assert AskToDrain() in asked
    slot, _ = drive((6, Exited(0, True)), (7, Due()), (8, Beat()), slot=slot)
    assert (slot.state, slot.unclean) == (State.RETIRED, False)
    assert drive((9, Start()), slot=slot)[0].state is State.SPAWNING


def test_what_was_retired_and_is_wanted_again_comes_back_at_once() -> None:
    slot, _ = drive((5, Retire(20)), (6, Start()), (7, Exited(0, True)), slot=ready_slot())
    assert (slot.state, slot.restarts, slot.unstable) == (State.SPAWNING, 0, 0)


def test_a_retired_process_that_is_late_is_killed_and_not_started_again() -> None:
    slot, asked = drive((5, Retire(20)), (20, Due()), (20.1, Exited(-9, True)), slot=ready_slot())
    assert signals(asked) == [signal.SIGKILL]
    assert (slot.state, slot.unclean) == (State.RETIRED, True)
    slot, _ = drive((30, Stop(40)), slot=slot)
    assert (slot.state, slot.unclean) == (State.DOWN, False), "the stop of the group itself was clean"


def test_a_stop_of_the_group_goes_before_a_retirement() -> None:
    slot, _ = drive((5, Retire(20)), (6, Stop(10)), (7, Start()), (8, Exited(0, True)), slot=ready_slot())
    assert slot.state is State.DOWN


@pytest.mark.parametrize(
    "history",
    [
        [(0, SpawnFailed("no memory"))],
        [(0, Spawned(1)), (1, Exited(78, False))],
        [(0, Spawned(1)), (60, Due()), (61, Due()), (61.1, Exited(-9, False))],
        [(0, Spawned(1)), (1, Ready()), (2, Exited(1, True))],
    ],
)
def test_what_fails_on_trial_is_neither_restarted_nor_ends_the_group(history: list[tuple[float, Event]]) -> None:
    slot, asked = drive((0, Start(trial=True)), *history)
    assert slot.state is State.RETIRED
    assert not any(isinstance(effect, EndGroup) for effect in asked)


def test_what_passed_its_trial_is_restarted() -> None:
    slot, _ = drive((0, Start(trial=True)), (0, Spawned(1)), (1, Ready()), (3, Settle()), (4, Exited(1, True)))
    assert slot.state is State.BACKOFF
