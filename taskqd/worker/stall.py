"""Who blocks an event loop, and how: found from another thread while it is blocked."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from taskqd.worker.attempt import Attempt
from taskqd.worker.consumer import Consumers

SAMPLES = 25
SAMPLE_PAUSE = 0.01
"""Seconds between two samples: a look at a blocked loop takes a quarter of a second."""
IDLE_SHARE = 0.05
"""A thread that uses less of a processor than this share waits for something."""

Kind = Literal["blocking_call", "gil_held"]
ADVICE: dict[Kind, str] = {
    "blocking_call": "it waits without the interpreter lock: move the call to a thread, or make it a plain 'def'",
    "gil_held": "it computes in Python: cut the work into pieces, or give the actor isolation='process'",
}

_RUN = Consumers._run.__code__


@dataclass(frozen=True, slots=True)
class Stall:
    """A handler that does not let the event loop run. ``line`` is where it is: file, line and function."""

    attempt: Attempt
    kind: Kind
    line: str


class Stalls:
    """How often which actor blocked the loop, by kind."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, Kind]] = Counter()

    def add(self, stall: Stall) -> None:
        """Count one."""
        self._counts[stall.attempt.ref.name, stall.kind] += 1

    def metrics(self) -> str:
        """The counts in the Prometheus text format."""
        if not self._counts:
            return ""
        name = "taskq_worker_loop_stall_attributions_total"
        lines = [f"# TYPE {name} counter"]
        for (actor, kind), count in sorted(self._counts.items()):
            lines.append(f'{name}{{actor="{_escape(actor)}",kind="{kind}"}} {count}')
        return "\n".join(lines) + "\n"


def find_stall(thread: int) -> Stall | None:
    """Return whose handler blocks the event loop of the thread with this number, None when it is none of an actor's.

    Takes a quarter of a second, in which the loop must be blocked by the same handler.
    """
    before = _attempt_on(thread)
    if before is None:
        return None
    kind = _kind(thread)
    frame = sys._current_frames().get(thread)
    if frame is None or _attempt_on(thread) is not before:
        return None  # it goes on
    code = frame.f_code
    return Stall(before, kind, f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")


def _attempt_on(thread: int) -> Attempt | None:
    """The attempt whose handler is on the stack of a thread."""
    for frame in _stack(thread):
        if frame.f_code is _RUN:
            attempt: Attempt = frame.f_locals["attempt"]
            return attempt
    return None


def _stack(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _kind(thread: int) -> Kind:
    """Whether a thread keeps the interpreter lock from this one, which then gets it a switch interval late."""
    clock = time.pthread_getcpuclockid(thread)
    began, used = time.monotonic(), time.clock_gettime(clock)
    late = []
    for _ in range(SAMPLES):
        due = time.monotonic() + SAMPLE_PAUSE
        time.sleep(SAMPLE_PAUSE)
        late.append(time.monotonic() - due)
    share = (time.clock_gettime(clock) - used) / (time.monotonic() - began)
    # Late alone is no sign on a busy machine.
    held = share > IDLE_SHARE and statistics.median(late) > sys.getswitchinterval() / 2
    return "gil_held" if held else "blocking_call"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
