"""``cron`` and ``every``: declare beside an actor when it is to run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack, overload

from pydantic import BaseModel

from taskqd.actors.actor import ActorRef
from taskqd.domain.arguments import is_number
from taskqd.domain.errors import RegistryError, ScheduleDefinitionError, TaskQError
from taskqd.domain.names import nearest
from taskqd.domain.recurrence import MAX_INTERVAL, MIN_INTERVAL, DstStrategy, Kind
from taskqd.domain.schedule import Schedule, usual_window

A = TypeVar("A", bound=ActorRef[Any, Any])

PayloadFactory: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class DeclaredSchedule:
    """A schedule as code declares it, and the function that makes its payload, if one does."""

    definition: Schedule
    factory: PayloadFactory | None


class ScheduleOptions(TypedDict, total=False):
    """What ``cron`` and ``every`` take beside when."""

    name: str | None
    payload: BaseModel | Mapping[str, Any] | None
    payload_factory: PayloadFactory | None
    catch_up: Literal["fire_once", "fire_all", "skip"]
    catch_up_max: int
    catch_up_window: timedelta | None
    overlap: Literal["allow", "forbid"]
    smear: timedelta | None
    queue: str | None
    priority: int | None
    tags: Sequence[str]
    metadata: Mapping[str, Any] | None
    start_to_close: timedelta | None
    schedule_to_close: timedelta | None
    max_attempts: int | None
    identity_key: str | None
    enabled: bool


@overload
def cron(
    expression: str,
    actor: A,
    /,
    *,
    timezone: str = ...,
    dst_strategy: DstStrategy = ...,
    **options: Unpack[ScheduleOptions],
) -> A: ...


@overload
def cron(
    expression: str,
    /,
    *,
    timezone: str = ...,
    dst_strategy: DstStrategy = ...,
    **options: Unpack[ScheduleOptions],
) -> Callable[[A], A]: ...


def cron(
    expression: str,
    actor: Any = None,
    /,
    *,
    timezone: str = "UTC",
    dst_strategy: DstStrategy = "skip",
    **options: Unpack[ScheduleOptions],
) -> Any:
    """Run an actor when a cron expression says so: ``cron("0 3 * * *", report)``, or above ``@actor``::

        @cron("0 3 * * MON-FRI", timezone="Europe/Berlin", payload={"kind": "daily"})
        @actor
        async def report(payload: Report) -> None: ...

    The first worker that starts with it creates the schedule; after that what is stored holds, and a worker whose code
    says otherwise tells so: ``taskqd schedule apply`` changes it.

    ``expression``
        Five fields, or six with the second last; names, ranges, lists, steps, ``H``, ``@hourly`` and its like.
    ``timezone``, ``dst_strategy``
        An IANA zone, default ``UTC``. A time that clocks leave out is due when they jump; one that they repeat is due
        the first time, with ``allof`` each time. What matches every hour follows elapsed time.
    ``name``
        Unique in the schema; default the actor's.
    ``payload``, ``payload_factory``
        What its jobs carry: the model or a mapping that fits it, the same each time; or a function, ``async def`` or
        plain, of nothing or of the slot (a ``datetime``) that returns one. The worker calls it when the job first runs,
        for at most five seconds; where it fails the job has failed, and after three in a row the schedule is paused.
        Default ``{}``.
    ``catch_up``, ``catch_up_max``, ``catch_up_window``
        What becomes of slots that were missed: ``fire_once`` (default) fires the latest, ``fire_all`` every one, oldest
        first and ``catch_up_max`` (100) in a transaction, ``skip`` none that is over a minute late. What is later than
        the window is passed over and counted; default an hour, with ``fire_all`` None: none is too late.
    ``overlap``
        ``forbid`` passes a slot over while its last job has not ended; default ``allow``.
    ``smear``
        Shifts the schedule by a part of this time, up to an hour, that is its own. Default none.
    ``queue``, ``priority``, ``tags``, ``metadata``, ``start_to_close``, ``schedule_to_close``, ``max_attempts``
        Of its jobs, in place of the actor's.
    ``identity_key``
        Theirs too: with the actor's ``unique_for`` it keeps out a job of the same identity.
    ``enabled``
        Whether it begins enabled; default True.

    Raises ``ScheduleDefinitionError``, at import time, with a message that names the fix.
    """
    return _declare(actor, "cron", expression, {"timezone": timezone, "dst_strategy": dst_strategy}, options)


@overload
def every(interval: timedelta | float, actor: A, /, **options: Unpack[ScheduleOptions]) -> A: ...


@overload
def every(interval: timedelta | float, /, **options: Unpack[ScheduleOptions]) -> Callable[[A], A]: ...


def every(interval: timedelta | float, actor: Any = None, /, **options: Unpack[ScheduleOptions]) -> Any:
    """Run an actor each ``interval``, a second to a year, of elapsed time; see :func:`cron` for the options.

    A number is seconds. The first slot is one interval after its creation; a late fire moves none of the others.
    """
    return _declare(actor, "every", interval_text(interval), {}, options)


def declared_schedules(actors: Iterable[ActorRef[Any, Any]]) -> dict[str, DeclaredSchedule]:
    """Return what the actors declare, by name. Raises ``RegistryError`` where two share one."""
    found: dict[str, DeclaredSchedule] = {}
    for ref in actors:
        for declared in ref.schedules:
            name = declared.definition.name
            if name in found:
                raise RegistryError(f"two schedules are named {name!r}; give one a name=...")
            found[name] = declared
    return found


def declare_schedule(
    actor: ActorRef[Any, Any], when: str | timedelta, zone: Mapping[str, Any], options: Mapping[str, Any]
) -> DeclaredSchedule:
    """Return what ``cron``, or for a ``timedelta`` ``every``, would declare of an actor."""
    if not isinstance(when, (str, timedelta)):
        raise ScheduleDefinitionError(f"when = {when!r} must be a cron expression, or a timedelta")
    if not isinstance(actor, ActorRef):
        raise ScheduleDefinitionError(f"actor = {actor!r} must be an actor; decorate the function with @actor")
    kind: Kind = "every" if isinstance(when, timedelta) else "cron"
    _check_options(kind, zone, options)
    return _declared(actor, kind, interval_text(when) if isinstance(when, timedelta) else when, zone, **options)


def interval_text(interval: timedelta | float) -> str:
    """Return an interval as it is stored: seconds."""
    seconds = interval.total_seconds() if isinstance(interval, timedelta) else interval
    if not is_number(seconds) or not MIN_INTERVAL <= seconds <= MAX_INTERVAL:
        raise ScheduleDefinitionError(
            f"interval = {interval!r} must be a timedelta or seconds, "
            f"{MIN_INTERVAL:g} s to {MAX_INTERVAL / 86400:g} days"
        )
    return f"{seconds:.6f}".rstrip("0").rstrip(".")


def _check_options(kind: Kind, zone: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    unknown = next((option for option in options if option not in ScheduleOptions.__annotations__), None)
    if unknown is not None:
        known = [*ScheduleOptions.__annotations__, *zone]
        raise ScheduleDefinitionError(f"{kind}() has no option {unknown!r}{nearest(unknown, known)}")


def _declare(actor: Any, kind: Kind, expression: str, zone: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    _check_options(kind, zone, options)

    def attach(ref: Any) -> Any:
        if not isinstance(ref, ActorRef):
            raise ScheduleDefinitionError(f"{kind}() takes an actor, not {ref!r}; write it above @actor")
        declared = _declared(ref, kind, expression, zone, **options)
        if any(other.definition.name == declared.definition.name for other in ref.schedules):
            raise ScheduleDefinitionError(f"two schedules are named {declared.definition.name!r}; give one a name=...")
        ref.schedules.append(declared)
        return ref

    return attach if actor is None else attach(actor)


def _declared(
    ref: ActorRef[Any, Any],
    kind: Kind,
    expression: str,
    zone: Mapping[str, Any],
    *,
    name: str | None = None,
    payload: Any = None,
    payload_factory: PayloadFactory | None = None,
    smear: timedelta | None = None,
    tags: Sequence[str] = (),
    start_to_close: timedelta | None = None,
    schedule_to_close: timedelta | None = None,
    queue: str | None = None,
    priority: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    max_attempts: int | None = None,
    **plain: Any,
) -> DeclaredSchedule:
    name = ref.name if name is None else name
    given = {
        "queue": queue,
        "priority": priority,
        "tags": (list(tags) if isinstance(tags, (list, tuple)) else tags) or None,
        "metadata": dict(metadata) if isinstance(metadata, Mapping) else metadata,
        "start_to_close": _seconds(name, "start_to_close", start_to_close),
        "schedule_to_close": _seconds(name, "schedule_to_close", schedule_to_close),
        "max_attempts": max_attempts,
        "singleton": ref.singleton or None,
        "unique_for": _seconds(name, "unique_for", ref.unique_for),
        "unique_states": [str(state) for state in ref.unique_states] if ref.unique_for is not None else None,
    }
    if payload is not None and payload_factory is not None:
        raise ScheduleDefinitionError(f"schedule {name!r}: payload and payload_factory exclude each other")
    text = None
    if payload_factory is None:
        try:
            text = ref.encode_payload({} if payload is None else payload)
        except TaskQError as error:
            raise ScheduleDefinitionError(f"schedule {name!r}: {error}") from None
    definition = Schedule(
        name=name,
        actor=ref.name,
        kind=kind,
        expression=expression,
        payload=text,
        payload_factory=None if payload_factory is None else _factory_name(name, payload_factory),
        catch_up_window=(
            _seconds(name, "catch_up_window", plain.pop("catch_up_window"))
            if "catch_up_window" in plain
            else usual_window(plain.get("catch_up"))
        ),
        smear=_seconds(name, "smear", smear),
        options={option: value for option, value in given.items() if value is not None},
        **zone,
        **plain,
    )
    return DeclaredSchedule(definition, payload_factory)


def _seconds(name: str, option: str, value: timedelta | None) -> float | None:
    if value is None:
        return None
    if not isinstance(value, timedelta):
        raise ScheduleDefinitionError(f"schedule {name!r}: {option} = {value!r} must be a timedelta")
    return value.total_seconds()


def _factory_name(name: str, factory: Any) -> str:
    qualname = getattr(factory, "__qualname__", "<")
    if not callable(factory) or "<" in qualname:
        raise ScheduleDefinitionError(
            f"schedule {name!r}: payload_factory = {factory!r} must be a named function of a module: its jobs name it"
        )
    parameters = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    if len(parameters) > 1 or any(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters):
        raise ScheduleDefinitionError(
            f"schedule {name!r}: payload_factory {qualname} must take nothing, or the slot it is for"
        )
    return f"{factory.__module__}:{qualname}"
