"""What the actors and the workers of a group come to together: queues that nobody serves, attempts cut at a stop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from taskqd.actors.actor import ActorRef


@dataclass(frozen=True, slots=True)
class ActorFacts:
    """What matters here of one actor. ``start_to_close`` is in seconds; None: it has none of its own."""

    queue: str
    start_to_close: float | None

    @classmethod
    def of(cls, ref: ActorRef[Any, Any]) -> ActorFacts:
        """Return those of an actor that is imported."""
        return cls(ref.queue, None if ref.start_to_close is None else ref.start_to_close.total_seconds())


Actors = Mapping[str, ActorFacts]


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one name, as far as their actors are concerned. Times are in seconds."""

    name: str
    actors: Actors
    queues: tuple[str, ...]
    drain: float
    """How long a job may go on after the stop began."""
    default_start_to_close: float | None


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An actor whose attempts may run longer than a stop waits for them: a deploy interrupts and requeues them."""

    actor: str
    worker: str
    start_to_close: float | None
    """None: an attempt may take as long as it likes."""
    drain: float


def find_interrupted(crews: Iterable[Crew]) -> list[dict[str, Any]]:
    """Return, as JSON values, every actor with a worker that could run it, and whose drain its attempts exceed.

    Actors without any limit come last.
    """
    found = []
    for crew in crews:
        for name, ref in sorted(crew.actors.items()):
            if ref.queue not in crew.queues:
                continue
            limit = crew.default_start_to_close if ref.start_to_close is None else ref.start_to_close
            if limit is None or limit > crew.drain:
                found.append(Interrupted(name, crew.name, limit, crew.drain))
    return [asdict(each) for each in sorted(found, key=lambda each: each.start_to_close is None)]


def find_unserved(crews: Iterable[Crew]) -> list[dict[str, Any]]:
    """Return, as JSON values, every queue that actors enqueue to by default and no worker that knows them serves."""
    queues: dict[str, str] = {}
    served: defaultdict[str, set[str]] = defaultdict(set)
    for crew in crews:
        for name, ref in crew.actors.items():
            queues[name] = ref.queue
            served[name].update(crew.queues)
    unserved: defaultdict[str, list[str]] = defaultdict(list)
    for name, queue in sorted(queues.items()):
        if queue not in served[name]:
            unserved[queue].append(name)
    return [{"queue": queue, "actors": actors} for queue, actors in sorted(unserved.items())]
