"""What follows when a process has ended: it stays away, is started again, or is given up. Pure."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from taskqd.supervisor.events import Effect, EndGroup, Exited, Tell
from taskqd.supervisor.exits import WELL_RECYCLED, Exit, ExitClass, classify
from taskqd.supervisor.restart import GiveUp, Restart, judge
from taskqd.supervisor.slot import Slot, State

Outcome = tuple[Slot, list[Effect]]
"""The slot as it is then, and what the shell must do."""


def exited(slot: Slot, event: Exited, now: float) -> Outcome:
    """Say what follows when the process of ``slot`` is gone."""
    end = classify(event.code, killed_because=slot.kill_reason, oom=event.oom)
    gone = replace(slot, pid=None, last_exit=end)
    if slot.stopping or slot.retiring:
        return _stopped(gone, end, event.goodbye, now)
    fields = {"pid": slot.pid, "code": end.code, "class": str(end.kind), "why": end.why, **_drained(slot, end, now)}
    if slot.replaced is not None and slot.kill_reason is None and event.code in WELL_RECYCLED:
        return _recycled(gone, end.code, fields, now)
    told = Tell("child-exit", "error", fields)
    if slot.trial:
        return gone.enter(State.RETIRED, now), [told]
    if slot.state is State.DRAINING and slot.replaced is None:  # it was retired, and is wanted again
        return gone.wanted(now), [Tell("child-exit", fields={"code": end.code, "why": "stopped"})]
    recent = tuple(at for at in slot.recent if at > now - slot.timing.restart.burst_window)
    verdict = judge(
        slot.timing.restart,
        end,
        ready_for=None if slot.ready_at is None else now - slot.ready_at,
        unstable=slot.unstable,
        came_up=event.came_up,
        recent=len(recent),
        jitter=event.jitter,
    )
    if isinstance(verdict, GiveUp):
        return _give_up(gone, verdict, told, now)
    return _restart(gone, verdict, told, recent, now)


def _stopped(slot: Slot, end: Exit, goodbye: bool, now: float) -> Outcome:
    # One that had not come up yet did no work: how it ends is no loss, unless it had to be killed. And one
    # that had finished no longer handles a SIGTERM that others may send.
    late = goodbye and end.code == -signal.SIGTERM
    well = end.code in WELL_RECYCLED if slot.replaced is not None else end.code == 0
    unclean = slot.kill_reason is not None or not (well or late or slot.ready_at is None)
    fields = {"code": end.code, "why": end.why if unclean else "stopped", **_drained(slot, end, now)}
    told = Tell("child-exit", "error" if unclean else "info", fields)
    if not unclean:
        slot = replace(slot, last_exit=replace(end, why=f"exit code {end.code}: drained, as asked"))
    away = State.DOWN if slot.stopping else State.RETIRED
    return slot.enter(away, now, unclean=slot.unclean or unclean), [told]


def _drained(slot: Slot, end: Exit, now: float) -> dict[str, Any]:
    """Say for how long a process drained that was asked to end, and what came of it."""
    if slot.drain_since is None:
        return {}
    well = slot.ready_at is None or end.code in WELL_RECYCLED
    outcome = "killed" if slot.kill_reason is not None else "well" if well else "failed"
    return {"drain_s": round(now - slot.drain_since, 3), "drained": outcome}


def _recycled(slot: Slot, code: int, fields: dict[str, Any], now: float) -> Outcome:
    """Start the next one at once: this end was asked for and says nothing against the process."""
    end = Exit(code, ExitClass.RECYCLE, f"recycled: {slot.replaced}")
    fresh = slot.enter(State.BACKOFF, now, now, last_exit=end, recycled=slot.recycled + 1)
    return fresh, [Tell("child-exit", fields={**fields, "class": str(end.kind), "why": end.why})]


def _restart(slot: Slot, verdict: Restart, told: Tell, recent: tuple[float, ...], now: float) -> Outcome:
    keep = max(slot.timing.restart.burst_limit, 1)
    waiting = slot.enter(
        State.BACKOFF,
        now,
        now + verdict.delay,
        unstable=verdict.unstable,
        degraded=verdict.degraded,
        restarts=slot.restarts + 1,
        crashed_at=now if slot.crashed_at is None else slot.crashed_at,
        recent=(*recent, now)[-keep:],
    )
    fields = {
        "delay_s": round(verdict.delay, 2),
        "unstable_runs": verdict.unstable,
        "reason": told.fields["class"],
    }
    effects: list[Effect] = [told, Tell("restart-scheduled", "warning", fields)]
    if verdict.degraded and not slot.degraded:
        effects.append(Tell("degraded", "error", {"unstable_runs": verdict.unstable, "why": told.fields["why"]}))
    return waiting, effects


def _give_up(slot: Slot, verdict: GiveUp, told: Tell, now: float) -> Outcome:
    dead = slot.enter(State.FATAL, now, unstable=verdict.unstable)
    effects: list[Effect] = [told, Tell("given-up", "error", {"why": verdict.why})]
    if verdict.group is not None:
        effects.append(EndGroup(verdict.group, verdict.why))
    return dead, effects
