"""Prints docs/states.md: the life of a process slot, drawn from the state table itself. Run it by scripts/docs.

Nothing is written down twice: every slot that can come about is given every event, and what the table makes of it is
drawn.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import get_args

from taskqd.cli.explain import meanings
from taskqd.supervisor.events import (
    Broken,
    Event,
    Exited,
    Kill,
    Rearm,
    Recycle,
    Retire,
    Spawned,
    SpawnFailed,
    Start,
    Stop,
    Suspected,
)
from taskqd.supervisor.slot import Slot, State
from taskqd.supervisor.state import TABLE, step

HEAD = """\
# The life of a process

<!-- Written by scripts/docs from taskqd/supervisor/state.py; change it there. -->

A group has one *slot* for each place (`io.0`, `scheduler.0`). What happens to a slot is one table, state × event, in
[`supervisor/state.py`](../taskqd/supervisor/state.py): it is pure, a test gives it 100,000 events in any order, and
this page is drawn from it. `taskqd status` shows the state of each slot.

"""

Edges = dict[tuple[State, type], set[State]]


def render() -> str:
    """Return the whole page."""
    edges = explore()
    parts = [HEAD, _diagram(edges), "\n## States\n\n", *_states(), "\n## Events\n\n", *_events(), *_matrix(edges)]
    return "".join(parts)


def explore() -> Edges:
    """Return the states that each event leads to from each state, over all slots that can come about."""
    edges: Edges = defaultdict(set)
    new = [Slot("io.0")]
    seen = {_kind(new[0])}
    while new:
        slot = new.pop()
        for event in _every_event():
            after, _ = step(slot, event, 1.0)
            if (slot.state, type(event)) in TABLE:
                edges[slot.state, type(event)].add(after.state)
            if _kind(after) not in seen:
                seen.add(_kind(after))
                new.append(after)
    return edges


def _kind(slot: Slot) -> tuple[object, ...]:
    """Tell slots apart by what the table asks of them."""
    flags = (slot.stopping, slot.retiring, slot.trial, slot.hard, slot.degraded)
    reasons = (slot.replaced is None, slot.kill_reason is None, slot.ready_at is None)
    return (slot.state, *flags, *reasons, min(slot.unstable, 5), min(len(slot.recent), slot.timing.restart.burst_limit))


def _every_event() -> Iterator[Event]:
    given: dict[type, list[Event]] = {
        Start: [Start(), Start(trial=True)],
        Spawned: [Spawned(1)],
        SpawnFailed: [SpawnFailed("no memory")],
        Stop: [Stop(2.0)],
        Retire: [Retire(2.0), Retire(2.0, "old")],
        Recycle: [Recycle(2.0, "old")],
        Suspected: [Suspected("blocked")],
        Kill: [Kill("now")],
        Broken: [Broken("garbage")],
        Exited: [Exited(code, came_up) for code in (0, 1, 75, 78, -9) for came_up in (False, True)],
        Rearm: [Rearm(1.0)],
    }
    for kind in get_args(Event):
        yield from given.get(kind) or [kind()]


def _diagram(edges: Edges) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {State.DOWN}"]
    labels: dict[tuple[State, State], list[str]] = defaultdict(list)
    for (source, event), targets in edges.items():
        for target in targets - {source}:
            labels[source, target].append(_word(event))
    order = list(State)
    for source, target in sorted(labels, key=lambda pair: (order.index(pair[0]), order.index(pair[1]))):
        lines.append(f"    {source} --> {target}: {', '.join(labels[source, target])}")
    return "\n".join([*lines, "```", ""])


def _states() -> Iterator[str]:
    texts = meanings(State)
    yield "| State | Meaning |\n|---|---|\n"
    for state in State:
        yield f"| `{state}` | {_line(texts[state.name])} |\n"


def _events() -> Iterator[str]:
    yield "| Event | Meaning |\n|---|---|\n"
    for event in get_args(Event):
        yield f"| {_word(event)} | {_line(event.__doc__)} |\n"


def _matrix(edges: Edges) -> Iterator[str]:
    yield "\n## What each event does in each state\n\n"
    yield "The states that may follow; `·` where the slot takes note and stays. Where nothing stands, nothing\n"
    yield "happens: a message that comes late, or what has no meaning there.\n\n"
    yield f"| | {' | '.join(f'`{state}`' for state in State)} |\n|---|{'---|' * len(State)}\n"
    for event in get_args(Event):
        cells = []
        for state in State:
            targets = edges.get((state, event), set())
            moves = [f"{target}" for target in State if target in targets and target is not state]
            cells.append(", ".join([*moves, "·"] if state in targets else moves))
        yield f"| {_word(event)} | {' | '.join(cells)} |\n"


def _word(event: type) -> str:
    """Return ``spawn failed`` for ``SpawnFailed``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", event.__name__).lower()


def _line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`")


if __name__ == "__main__":
    print(render(), end="")
