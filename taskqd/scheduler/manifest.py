"""Schedules in a file, TOML or YAML, and what it takes to make the stored ones the same."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from taskqd.domain.errors import ConfigError, ScheduleDefinitionError
from taskqd.domain.names import nearest
from taskqd.domain.schedule import Schedule, differences, usual_window
from taskqd.settings.durations import parse_duration
from taskqd.storage.schedules import StoredSchedule

MAX_BYTES = 1024 * 1024
MAX_SCHEDULES = 500
Source = Literal["decorator", "manifest"]

_PLAIN = ("name", "actor", "timezone", "dst_strategy", "catch_up", "catch_up_max", "overlap", "identity_key", "enabled")
_DURATIONS = ("catch_up_window", "smear")
_OPTIONS = ("queue", "priority", "tags", "metadata", "max_attempts", "singleton", "unique_states")
_DURATION_OPTIONS = ("start_to_close", "schedule_to_close", "unique_for")
_KEYS = (*_PLAIN, "cron", "every", "payload", *_DURATIONS, *_OPTIONS, *_DURATION_OPTIONS)


def read_manifest(path: Path) -> list[Schedule]:
    """Return the schedules of a file; ``.yaml`` and ``.yml`` are YAML, everything else TOML.

    ``overlap`` is ``forbid`` unless the file says otherwise. Raises ``ConfigError`` for a file that cannot be read, and
    ``ScheduleDefinitionError`` for a schedule that cannot be.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} is {len(data)} bytes, the limit is {MAX_BYTES}")
    content = _parse(path, data)
    if not isinstance(content, dict) or not isinstance(content.get("schedules"), list):
        raise ConfigError(f"{path} must hold a list 'schedules': in TOML one [[schedules]] for each")
    for key in content:
        if key not in ("version", "schedules"):
            raise ConfigError(f"{path}: unknown key {key!r}{nearest(str(key), ('version', 'schedules'))}")
    if content.get("version", 1) != 1:
        raise ConfigError(f"{path}: version = {content['version']!r} must be 1")
    if not 1 <= len(content["schedules"]) <= MAX_SCHEDULES:
        raise ConfigError(f"{path} holds {len(content['schedules'])} schedules; it must be 1 to {MAX_SCHEDULES}")
    found: dict[str, Schedule] = {}
    for number, entry in enumerate(content["schedules"], 1):
        try:
            wanted = _schedule(entry, number)
        except ScheduleDefinitionError as error:
            raise ScheduleDefinitionError(f"{path}: {error}") from None
        if wanted.name in found:
            raise ScheduleDefinitionError(f"{path}: two schedules are named {wanted.name!r}")
        found[wanted.name] = wanted
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one schedule. ``why`` is what differs, or why it is refused."""

    wanted: Schedule
    stored: StoredSchedule | None
    action: Literal["create", "change", "unchanged", "refused"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """What it takes to make stored schedules the same as wanted ones. ``left`` are stored and no longer declared."""

    source: Source
    changes: Sequence[Change]
    left: Sequence[str] = field(default=())

    @property
    def digest(self) -> str:
        """Names this plan: whatever else would be stored, and whatever else is stored now, has another."""
        parts = [
            (
                self.source,
                change.action,
                change.why,
                change.stored.version if change.stored is not None else 0,
                asdict(change.wanted),
            )
            for change in self.changes
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def refused(self) -> list[Change]:
        """The changes that cannot be made."""
        return [change for change in self.changes if change.action == "refused"]


def plan_schedules(stored: Sequence[StoredSchedule], wanted: Sequence[Schedule], source: Source) -> SchedulePlan:
    """Compare. Never removes a schedule, and never changes one that comes from elsewhere."""
    by_name = {one.name: one for one in stored}
    names = {one.name for one in wanted}
    left = [
        one.name
        for one in stored
        if source == "decorator" and one.source == source and one.retired_at is None and one.name not in names
    ]
    return SchedulePlan(source, [_change(by_name.get(one.name), one, source) for one in wanted], left)


def _change(stored: StoredSchedule | None, wanted: Schedule, source: Source) -> Change:
    if stored is None:
        return Change(wanted, None, "create", _creation(wanted))
    if stored.retired_at is not None:
        return Change(wanted, stored, "refused", "its name is retired; give it another")
    if stored.source != source:
        return Change(wanted, stored, "refused", f"it comes from {_ORIGINS[stored.source]}; change it there")
    if stored.definition is None:
        return Change(wanted, stored, "change", stored.problem)
    found = differences(stored.definition, wanted)
    if not found:
        return Change(wanted, stored, "unchanged")
    return Change(
        wanted, stored, "change", ", ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in found.items())
    )


def _creation(wanted: Schedule) -> str:
    zone = f" {wanted.timezone}" if wanted.kind == "cron" else ""
    if wanted.payload_factory is not None:
        payload = f", payload made by {wanted.payload_factory}"
    else:
        payload = ", with a payload" if wanted.payload not in (None, "{}") else ""
    return f"actor {wanted.actor}, {wanted.when}{zone}{payload}"


_ORIGINS = {"decorator": "code", "manifest": "a manifest", "api": "the API", "system": "taskqd itself"}


def _parse(path: Path, data: bytes) -> Any:
    if path.suffix in (".yaml", ".yml"):
        import yaml  # only where a file is YAML

        class Loader(yaml.SafeLoader):
            """YAML without keys that stand twice, of which one would be lost."""

        def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"{path}:{node.start_mark.line + 1}: key {key!r} stands twice")
            return loader.construct_mapping(node, deep=True)

        Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
        try:
            return yaml.load(data, Loader)  # noqa: S506 - a safe loader
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _schedule(entry: Any, number: int) -> Schedule:
    if not isinstance(entry, Mapping):
        raise ScheduleDefinitionError(f"schedule {number} must be a table of keys, not {entry!r}")
    label = f"schedule {entry['name']!r}" if "name" in entry else f"schedule {number}"
    for key in entry:
        if key not in _KEYS:
            raise ScheduleDefinitionError(f"{label}: unknown key {key!r}{nearest(str(key), _KEYS)}")
    for key in ("name", "actor"):
        if key not in entry:
            raise ScheduleDefinitionError(f"{label} has no {key!r}")
    if ("cron" in entry) == ("every" in entry):
        raise ScheduleDefinitionError(f"{label} must have exactly one of 'cron' and 'every'")
    values: dict[str, Any] = {key: entry[key] for key in _PLAIN if key in entry}
    values.setdefault("overlap", "forbid")
    values["catch_up_window"] = usual_window(entry.get("catch_up"))
    for key in _DURATIONS:
        if key in entry:
            values[key] = None if entry[key] == "none" else _duration(label, key, entry[key])
    options = {key: entry[key] for key in _OPTIONS if key in entry}
    options |= {key: _duration(label, key, entry[key]) for key in _DURATION_OPTIONS if key in entry}
    if "every" in entry:
        kind, expression = "every", f"{_duration(label, 'every', entry['every']):.6f}".rstrip("0").rstrip(".")
    else:
        kind, expression = "cron", entry["cron"]
    return Schedule(
        kind=kind,  # type: ignore[arg-type]
        expression=expression,
        payload=_payload(label, entry.get("payload", {})),
        options=options,
        **values,
    )


def _payload(label: str, payload: Any) -> str:
    if not isinstance(payload, Mapping):
        raise ScheduleDefinitionError(f"{label}: payload = {payload!r} must be a table")
    try:
        return json.dumps(payload, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ScheduleDefinitionError(f"{label}: payload is no JSON: {error}; write dates as text") from None


def _duration(label: str, key: str, value: Any) -> float:
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ScheduleDefinitionError(f"{label}: {key} = {value!r} {error}") from None
