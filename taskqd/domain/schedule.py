"""What a schedule is declared as, in code or in a manifest, and how two declarations differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from taskqd.domain.arguments import holds_nul, is_text
from taskqd.domain.errors import ScheduleDefinitionError
from taskqd.domain.names import QUEUE_RULE, is_queue_name, nearest
from taskqd.domain.recurrence import DstStrategy, Kind, recurrence
from taskqd.domain.status import JobStatus

CATCH_UP_WINDOW = 3600.0
"""Seconds that a slot may be late where a declaration says nothing of it; none is too late where all are to fire."""
MAX_CATCH_UP = 1000
MAX_NAME = 200
MAX_KEY = 1024
MAX_WINDOW, MAX_SMEAR = 365 * 86400.0, 3600.0
MAX_PAYLOAD = 64 * 1024
_LONGEST = 365 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When which actor is to run, and with what. Durations are seconds. Raises ``ScheduleDefinitionError``.

    ``name``
        Unique in the schema, and for good: a retired name is not given again.
    ``kind``, ``expression``, ``timezone``, ``dst_strategy``
        Its recurrence; see :func:`taskqd.domain.recurrence.recurrence`.
    ``catch_up``, ``catch_up_max``, ``catch_up_window``
        What becomes of slots that nobody fired in time: the latest of them fires (``fire_once``), all do, oldest first
        and so many in a transaction (``fire_all``), or none that is more than a minute late (``skip``). A slot later
        than the window is passed over; None: none is too late.
    ``overlap``
        ``forbid`` passes a slot over while the job of the one before has not ended.
    ``smear``
        Shifts it by a part of so many seconds that is its own, so that schedules of one moment spread.
    ``payload``, ``payload_factory``
        JSON text, or the name of the function that makes it in the worker. Neither is ``{}``.
    ``options``
        Of its jobs: ``queue``, ``priority``, ``tags``, ``metadata``, ``start_to_close``, ``schedule_to_close``,
        ``max_attempts``, ``singleton``, ``unique_for``, ``unique_states``. What is not there is the actor's.
    ``enabled``
        Whether it begins enabled; later that is the operator's.
    """

    name: str
    actor: str
    kind: Kind
    expression: str
    timezone: str = "UTC"
    dst_strategy: DstStrategy = "skip"
    catch_up: Literal["fire_once", "fire_all", "skip"] = "fire_once"
    catch_up_max: int = 100
    catch_up_window: float | None = None
    overlap: Literal["allow", "forbid"] = "allow"
    smear: float | None = None
    payload: str | None = None
    payload_factory: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    identity_key: str | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        for name, value in (("name", self.name), ("actor", self.actor)):
            if not is_text(value) or not value.strip() or len(value.encode()) > MAX_NAME:
                raise ScheduleDefinitionError(
                    f"schedule {self.name!r}: {name} = {value!r} must be text of 1 to {MAX_NAME} bytes, without NUL"
                )
        try:
            recurrence(self.kind, self.expression, self.timezone, self.dst_strategy, self.name)
            problem = self._problem()
        except ScheduleDefinitionError as error:
            problem = str(error)
        if problem:
            raise ScheduleDefinitionError(f"schedule {self.name!r}: {problem}")

    @property
    def when(self) -> str:
        """Its recurrence for a person: the cron expression, or ``every 90 s``."""
        return f"every {self.expression} s" if self.kind == "every" else self.expression

    def _problem(self) -> str:
        """Say what is wrong with it, ``""`` when nothing is."""
        for name, value, known in (
            ("catch_up", self.catch_up, ("fire_once", "fire_all", "skip")),
            ("overlap", self.overlap, ("allow", "forbid")),
        ):
            if not isinstance(value, str) or value not in known:
                return f"{name} = {value!r} must be {' or '.join(known)}{nearest(str(value), known)}"
        if not _whole(self.catch_up_max) or not 1 <= self.catch_up_max <= MAX_CATCH_UP:
            return f"catch_up_max = {self.catch_up_max!r} must be a whole number from 1 to {MAX_CATCH_UP}"
        for name, seconds, low, high in (
            ("catch_up_window", self.catch_up_window, 0, MAX_WINDOW),
            ("smear", self.smear, 1, MAX_SMEAR),
        ):
            if seconds is not None and (not _number(seconds) or not low <= seconds <= high):
                return f"{name} = {seconds!r} must be {low} to {high:g} seconds"
        if self.payload is not None and self.payload_factory is not None:
            return "payload and payload_factory exclude each other"
        if self.payload is not None and holds_nul(self.payload):
            return "its payload holds a NUL character (\\u0000), which Postgres cannot store"
        if self.payload is not None and len(self.payload.encode()) > MAX_PAYLOAD:
            return (
                f"its payload is {len(self.payload.encode())} bytes, the limit is {MAX_PAYLOAD}; use a payload factory"
            )
        key = self.identity_key
        if key is not None and not (is_text(key) and key.strip() and len(key.encode()) <= MAX_KEY):
            return f"identity_key = {key!r} must be text of 1 to {MAX_KEY} bytes, neither blank nor with a NUL"
        if self.enabled not in (True, False):
            return f"enabled = {self.enabled!r} must be True or False"
        for option, given in self.options.items():
            if option not in _OPTIONS:
                return f"option {option!r} is unknown{nearest(option, _OPTIONS)}; there are {', '.join(_OPTIONS)}"
            right, rule = _OPTIONS[option]
            if not right(given):
                return f"{option} = {given!r} must be {rule}"
        return ""


RECURRENCE = ("kind", "expression", "timezone", "dst_strategy", "smear")
"""What decides when it is due: where one of these changes, the next slot is found anew, from then on."""
_OF_CREATION = ("name", "enabled")


def usual_window(catch_up: object) -> float | None:
    """Return the window of a declaration that names none."""
    return None if catch_up == "fire_all" else CATCH_UP_WINDOW


def differences(stored: Schedule, wanted: Schedule) -> dict[str, tuple[Any, Any]]:
    """Return what differs, by name, as stored and wanted; but whether it is enabled: that is the operator's."""
    found = {}
    for item in fields(Schedule):
        if item.name in _OF_CREATION:
            continue
        old, new = getattr(stored, item.name), getattr(wanted, item.name)
        if item.name == "payload":
            old, new = (json.loads(text) if text is not None else None for text in (old, new))
        elif item.name == "options":
            old, new = dict(old), dict(new)
        if old != new:
            found[item.name] = (old, new)
    return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _limit(value: Any) -> bool:
    return _number(value) and 0 < value <= _LONGEST


def _metadata(value: Any) -> bool:
    if not isinstance(value, dict) or "taskq_schedule" in value:
        return False
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return is_text(text) and not holds_nul(text) and len(text.encode()) <= MAX_PAYLOAD


def _tags(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and 1 <= len(value) <= 50
        and all(isinstance(tag, str) and 1 <= len(tag) <= 100 and tag.replace("-", "_").isidentifier() for tag in value)
    )


_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "queue": (lambda value: isinstance(value, str) and is_queue_name(value), QUEUE_RULE),
    "priority": (lambda value: _whole(value) and -32768 <= value <= 32767, "a whole number from -32768 to 32767"),
    "tags": (_tags, "1 to 50 words of letters, digits, _ and -, at most 100 characters each"),
    "metadata": (
        _metadata,
        "an object of at most 64 KiB, without NUL, without the key 'taskq_schedule'",
    ),
    "start_to_close": (_limit, "seconds above zero, up to 365 days"),
    "schedule_to_close": (_limit, "seconds above zero, up to 365 days"),
    "max_attempts": (lambda value: _whole(value) and 1 <= value <= 1000, "a whole number from 1 to 1000"),
    "singleton": (lambda value: isinstance(value, bool), "true or false"),
    "unique_states": (
        lambda value: isinstance(value, list) and value != [] and all(state in set(JobStatus) for state in value),
        f"a list of statuses: {', '.join(JobStatus)}",
    ),
    "unique_for": (_limit, "seconds above zero, up to 365 days"),
}
