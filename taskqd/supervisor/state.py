"""The life of one process slot, as a table: state × event → handler.

Pure: no clock, no process, no log. :func:`step` takes a slot and an event and returns the slot as it is then
and what the shell must do. A pair that is in neither :data:`TABLE` nor :data:`IGNORED` is a bug, and a test
says so. ``docs/states.md`` is drawn from the table by ``scripts/docs``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from taskqd.supervisor.ending import Outcome, exited
from taskqd.supervisor.events import (
    AskToDrain,
    Beat,
    Broken,
    Due,
    Effect,
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
    Tell,
)
from taskqd.supervisor.slot import ALIVE, RUNNING, KillCause, Slot, State

ABORT_WAIT = 1.0
"""Seconds that a hung process has to print its stack after SIGABRT before SIGKILL."""

REAP_WAIT = 5.0
"""Seconds after SIGKILL until a process counts as lost: it sits in the kernel and cannot be killed."""


def step(slot: Slot, event: Event, now: float) -> Outcome:
    """Return the slot after ``event`` and what to do about it."""
    handler = TABLE.get((slot.state, type(event)))
    return handler(slot, event, now) if handler else (slot, [])


# -- coming up ------------------------------------------------------------------------------------


def _start(slot: Slot, event: Start, now: float) -> Outcome:
    if slot.stopping:
        return slot, []
    return slot.wanted(now, trial=event.trial), []


def _keep_after_all(slot: Slot, event: Start, now: float) -> Outcome:
    return replace(slot, retiring=False), []


def _spawned(slot: Slot, event: Spawned, now: float) -> Outcome:
    fresh = slot.enter(
        State.BOOTING,
        now,
        now + slot.timing.boot_timeout,
        pid=event.pid,
        spawned_at=now,
        ready_at=None,
        replaced=None,
        suspicion="",
        kill_reason=None,
        kill_cause=None,
        drain_since=None,
        hard=False,
    )
    return fresh, [Tell("spawn", fields={"pid": event.pid})]


def _spawn_failed(slot: Slot, event: SpawnFailed, now: float) -> Outcome:
    if slot.trial:
        return slot.enter(State.RETIRED, now), [Tell("spawn-failed", "error", {"why": event.why})]
    rule = slot.timing.restart
    count = slot.unstable + 1
    delay = min(rule.backoff_max, rule.backoff_initial * 2 ** min(count - 1, 16)) * event.jitter
    waiting = slot.enter(State.BACKOFF, now, now + delay, unstable=count)
    return waiting, [Tell("spawn-failed", "error", {"why": event.why, "retry_in": round(delay, 2)})]


def _progress(slot: Slot, event: Progress, now: float) -> Outcome:
    timing = slot.timing
    later = min(now + timing.boot_timeout, slot.spawned_at + timing.boot_limit)
    return replace(slot, deadline=max(later, slot.deadline or later)), []


def _ready(slot: Slot, event: Ready, now: float) -> Outcome:
    up = slot.enter(State.READY, now, now + slot.timing.stall_after, ready_at=now, crashed_at=None)
    fields = {"pid": slot.pid, "boot_s": round(now - slot.spawned_at, 3)}
    if slot.crashed_at is not None:
        fields["after_crash_s"] = round(now - slot.crashed_at, 3)
    return up, [Tell("ready", fields=fields)]


def _settled(slot: Slot, event: Settle, now: float) -> Outcome:
    return replace(slot, trial=False), []


def _due_to_start(slot: Slot, event: Due, now: float) -> Outcome:
    return slot.enter(State.SPAWNING, now), []


# -- being watched --------------------------------------------------------------------------------


def _beat(slot: Slot, event: Beat, now: float) -> Outcome:
    steady = slot.ready_at is not None and now - slot.ready_at >= slot.timing.restart.stable_after
    return replace(slot, deadline=now + slot.timing.stall_after, degraded=slot.degraded and not steady), []


def _stalled(slot: Slot, event: Due, now: float) -> Outcome:
    silent = slot.enter(State.STALLED, now, now + slot.timing.hang_kill_after)
    told = Tell("stalled", "warning", {"pid": slot.pid, "kill_in": slot.timing.hang_kill_after})
    return silent, [Send(signal.SIGUSR1), told]


def _recovered(slot: Slot, event: Beat, now: float) -> Outcome:
    alive = slot.enter(State.READY, now, now + slot.timing.stall_after, suspicion="")
    fields = {"pid": slot.pid, "stalled_s": round(now - slot.since, 1), "judged": bool(slot.suspicion)}
    return alive, [Tell("recovered", fields=fields)]


def _rearm(slot: Slot, event: Rearm, now: float) -> Outcome:
    return replace(slot, deadline=(slot.deadline or now) + event.gap), []


def _suspected(slot: Slot, event: Suspected, now: float) -> Outcome:
    return replace(slot, suspicion=event.what), [Tell("verdict", "warning", {"pid": slot.pid, "verdict": event.what})]


def _hung(slot: Slot, event: Due, now: float) -> Outcome:
    why = f"sent no beat for {now - slot.since + slot.timing.stall_after:.0f} s"
    return _abort(slot, now, f"{why}: {slot.suspicion}" if slot.suspicion else why, KillCause.STALL)


def _boot_overdue(slot: Slot, event: Due, now: float) -> Outcome:
    return _abort(slot, now, f"was not ready after {now - slot.spawned_at:.0f} s", KillCause.BOOT)


def _broken(slot: Slot, event: Broken, now: float) -> Outcome:
    return _abort(slot, now, event.why, KillCause.PROTOCOL)


def _abort(slot: Slot, now: float, why: str, cause: KillCause) -> Outcome:
    """Kill by SIGABRT first: its handler prints every thread's stack, even with the interpreter lock held."""
    dying = slot.enter(State.KILLING, now, now + ABORT_WAIT, kill_reason=why, kill_cause=cause)
    return dying, _deadly(dying, signal.SIGABRT)


def _deadly(slot: Slot, number: signal.Signals) -> list[Effect]:
    fields = {"pid": slot.pid, "why": slot.kill_reason, "signal": number.name, "cause": str(slot.kill_cause)}
    return [Send(number), Tell("kill", "error", fields)]


# -- being stopped --------------------------------------------------------------------------------


def _stop_nothing(slot: Slot, event: Stop | Kill, now: float) -> Outcome:
    return replace(slot, stopping=True), []


def _stop_unborn(slot: Slot, event: Stop | Kill, now: float) -> Outcome:
    return slot.enter(State.DOWN, now, stopping=True), []


def _drain(slot: Slot, event: Stop, now: float) -> Outcome:
    effects: list[Effect] = [AskToDrain()]
    if slot.state is State.STALLED:
        effects.append(Send(signal.SIGUSR1))
    return slot.enter(State.DRAINING, now, event.deadline, stopping=True, drain_since=now), effects


def _recycle(slot: Slot, event: Recycle, now: float) -> Outcome:
    leaving = slot.enter(State.DRAINING, now, event.deadline, replaced=event.why, drain_since=now)
    return leaving, [AskToDrain(), Tell("recycle", fields={"pid": slot.pid, "why": event.why})]


def _hurry(slot: Slot, event: Stop, now: float) -> Outcome:
    sooner = event.deadline if slot.deadline is None else min(slot.deadline, event.deadline)
    return replace(slot, deadline=sooner, stopping=True), [AskToDrain()]


def _retire_nothing(slot: Slot, event: Retire, now: float) -> Outcome:
    return (slot, []) if slot.stopping else (slot.enter(State.RETIRED, now), [])


def _stop_retired(slot: Slot, event: Stop | Kill, now: float) -> Outcome:
    return slot.enter(State.DOWN, now, stopping=True, unclean=False), []


def _retire(slot: Slot, event: Retire, now: float) -> Outcome:
    draining, effects = _drain(slot, Stop(event.deadline), now)
    return replace(draining, stopping=slot.stopping, retiring=True, replaced=event.replaced), effects


def _retire_sooner(slot: Slot, event: Retire, now: float) -> Outcome:
    sooner, effects = _hurry(slot, Stop(event.deadline), now)
    return replace(sooner, stopping=slot.stopping, retiring=True), effects


def _retire_dying(slot: Slot, event: Retire, now: float) -> Outcome:
    return replace(slot, retiring=True), []


def _drain_overdue(slot: Slot, event: Due, now: float) -> Outcome:
    return _destroy(slot, now, f"did not stop within {now - slot.since:.0f} s", KillCause.DRAIN)


def _kill(slot: Slot, event: Kill, now: float) -> Outcome:
    return _destroy(replace(slot, stopping=True), now, event.why, KillCause.STOP)


def _kill_harder(slot: Slot, event: Kill, now: float) -> Outcome:
    if slot.hard:
        return replace(slot, stopping=True), []
    return _destroy(replace(slot, stopping=True), now, slot.kill_reason or event.why, slot.kill_cause or KillCause.STOP)


def _destroy(slot: Slot, now: float, why: str, cause: KillCause) -> Outcome:
    dying = slot.enter(State.KILLING, now, now + REAP_WAIT, kill_reason=why, kill_cause=cause, hard=True)
    return dying, _deadly(dying, signal.SIGKILL)


def _kill_overdue(slot: Slot, event: Due, now: float) -> Outcome:
    if not slot.hard:
        hard = slot.enter(State.KILLING, now, now + REAP_WAIT, hard=True)
        return hard, _deadly(hard, signal.SIGKILL)
    lost = slot.enter(State.LOST, now)
    return lost, [Tell("lost", "error", {"pid": slot.pid, "why": "SIGKILL did not end it"})]


Handler = Callable[[Slot, Any, float], Outcome]

TABLE: dict[tuple[State, type], Handler] = {
    (State.DOWN, Start): _start,
    (State.DOWN, Stop): _stop_nothing,
    (State.DOWN, Kill): _stop_nothing,
    (State.DOWN, Retire): _retire_nothing,
    (State.SPAWNING, Spawned): _spawned,
    (State.SPAWNING, SpawnFailed): _spawn_failed,
    (State.SPAWNING, Stop): _stop_unborn,
    (State.SPAWNING, Kill): _stop_unborn,
    (State.SPAWNING, Retire): _retire_nothing,
    (State.BOOTING, Progress): _progress,
    (State.BOOTING, Ready): _ready,
    (State.BOOTING, Stop): _drain,
    (State.BOOTING, Kill): _kill,
    (State.BOOTING, Retire): _retire,
    (State.BOOTING, Exited): exited,
    (State.BOOTING, Broken): _broken,
    (State.BOOTING, Due): _boot_overdue,
    (State.BOOTING, Rearm): _rearm,
    (State.READY, Beat): _beat,
    (State.READY, Stop): _drain,
    (State.READY, Recycle): _recycle,
    (State.READY, Kill): _kill,
    (State.READY, Retire): _retire,
    (State.READY, Settle): _settled,
    (State.READY, Exited): exited,
    (State.READY, Broken): _broken,
    (State.READY, Due): _stalled,
    (State.READY, Rearm): _rearm,
    (State.STALLED, Beat): _recovered,
    (State.STALLED, Suspected): _suspected,
    (State.STALLED, Stop): _drain,
    (State.STALLED, Kill): _kill,
    (State.STALLED, Retire): _retire,
    (State.STALLED, Exited): exited,
    (State.STALLED, Broken): _broken,
    (State.STALLED, Due): _hung,
    (State.STALLED, Rearm): _rearm,
    (State.DRAINING, Stop): _hurry,
    (State.DRAINING, Kill): _kill,
    (State.DRAINING, Retire): _retire_sooner,
    (State.DRAINING, Start): _keep_after_all,
    (State.DRAINING, Exited): exited,
    (State.DRAINING, Due): _drain_overdue,
    (State.KILLING, Stop): _stop_nothing,
    (State.KILLING, Kill): _kill_harder,
    (State.KILLING, Retire): _retire_dying,
    (State.KILLING, Start): _keep_after_all,
    (State.KILLING, Exited): exited,
    (State.KILLING, Due): _kill_overdue,
    (State.BACKOFF, Stop): _stop_unborn,
    (State.BACKOFF, Kill): _stop_unborn,
    (State.BACKOFF, Retire): _retire_nothing,
    (State.BACKOFF, Due): _due_to_start,
    (State.FATAL, Start): _start,
    (State.FATAL, Stop): _stop_nothing,
    (State.FATAL, Kill): _stop_nothing,
    (State.FATAL, Retire): _retire_nothing,
    (State.RETIRED, Start): _start,
    (State.RETIRED, Stop): _stop_retired,
    (State.RETIRED, Kill): _stop_retired,
    (State.LOST, Stop): _stop_nothing,
    (State.LOST, Kill): _stop_nothing,
    (State.LOST, Retire): _retire_dying,
    (State.LOST, Exited): exited,
}
"""What each event does in each state."""

_NO_PROCESS = (State.DOWN, State.SPAWNING, State.BACKOFF, State.FATAL, State.RETIRED)
_STARTABLE = (State.DOWN, State.FATAL, State.RETIRED, State.DRAINING, State.KILLING)
IGNORED: frozenset[tuple[State, type]] = frozenset(
    {
        *((state, event) for state in _NO_PROCESS for event in (Progress, Ready, Beat, Exited)),
        *((state, event) for state in State if state is not State.SPAWNING for event in (Spawned, SpawnFailed)),
        *((state, Start) for state in State if state not in _STARTABLE),
        *((state, Settle) for state in State if state is not State.READY),
        (State.RETIRED, Retire),
        *((state, Progress) for state in ALIVE - {State.BOOTING}),
        *((state, Ready) for state in ALIVE - {State.BOOTING}),
        *((state, Beat) for state in ALIVE - {State.READY, State.STALLED}),
        *((state, Due) for state in (State.DOWN, State.SPAWNING, State.FATAL, State.RETIRED, State.LOST)),
        *((state, event) for state in State if state not in RUNNING for event in (Rearm, Broken)),
        *((state, Recycle) for state in State if state is not State.READY),
        *((state, Suspected) for state in State if state is not State.STALLED),
    }
)
"""What deliberately does nothing: late messages, and what has no meaning there."""
