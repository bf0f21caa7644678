"""Every effective value of a workgroup with its source and its unit: what ``taskqd check --show`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from taskqd.settings import SETTING_NAMES, describe
from taskqd.settings.model import ALIASES, variable
from taskqd.settings.resolve import DEFAULT, DEFAULTS, OWN_ENV, OWN_SOURCES, WORKER, Resolved
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.policy import Policy
from taskqd.supervisor.worker_entry import WorkerEntry
from taskqd.supervisor.workgroup import BudgetOptions, SupervisorOptions, Workgroup

SUPERVISOR = "the supervisor"
MASKED = "***"

_GIVEN = {
    "workgroup_instance": "a new id for each run",
    "health_socket_path": "a socket of its own in the runtime directory",
    "metrics_host": None,
    "metrics_port": None,
}


@dataclass(frozen=True, slots=True)
class Value:
    """One effective value: ``part`` is ``supervisor``, ``budget``, or the name of a kind of process."""

    part: str
    name: str
    value: Any
    unit: str | None
    source: str


def show_values(workgroup: Workgroup, plan: Plan, resolved: Mapping[str, Resolved]) -> list[dict[str, Any]]:
    """Return every value as JSON values; a secret is masked, and only told whether it is set."""
    decided = {
        "termination_grace_period": plan.grace,
        "boot_timeout": plan.timing.boot_timeout,
        "max_booting": plan.max_booting,
    }
    found = [
        *_options("supervisor", workgroup.supervisor, workgroup, decided),
        *_options("budget", workgroup.budget, workgroup, {}),
    ]
    children = {child.name: child for child in plan.children}
    for worker in workgroup.workers:
        found.extend(_worker(worker, children[worker.name], workgroup))
    for child in plan.children:
        found.extend(_settings(child, workgroup, plan, resolved))
    return [asdict(value) for value in found]


def _options(
    part: str, options: SupervisorOptions | BudgetOptions, workgroup: Workgroup, decided: Mapping[str, Any]
) -> Iterator[Value]:
    for option in fields(options):
        value = decided.get(option.name, getattr(options, option.name))
        source = workgroup.written(f"{part}.{option.name}")
        yield Value(part, option.name, _plain(value), _unit(value), source or DEFAULT)


def _worker(worker: WorkerEntry, child: ChildSpec, workgroup: Workgroup) -> Iterator[Value]:
    """Yield the keys of a ``[[workers]]`` table that are no settings."""
    part = f"workers.{worker.name}"
    shared = {"actors": workgroup.written("actors"), "preload": workgroup.written("supervisor.preload")}
    for key in ("actors", "replicas", "preload", "env_file"):
        source = workgroup.written(f"{part}.{key}") or shared.get(key) or DEFAULT
        if key == "replicas" and worker.replicas_from:
            source = f"{source}, auto: {worker.replicas_from}"
        yield Value(worker.name, key, getattr(worker, key), None, source)
    for option in fields(Policy):
        own, of_all = workgroup.written(f"{part}.{option.name}"), workgroup.written(f"supervisor.{option.name}")
        value = child.timing.boot_timeout if option.name == "boot_timeout" else getattr(worker.policy, option.name)
        yield Value(worker.name, option.name, value, _unit(value), own or of_all or DEFAULT)
    for limit in fields(worker.recycle):
        name = f"recycle.{limit.name}"
        unit = {"max_age": "seconds", "max_private_mb": "MiB"}.get(limit.name)
        source = workgroup.written(f"{part}.{name}") or DEFAULT
        yield Value(worker.name, name, getattr(worker.recycle, limit.name), unit, source)
    for name in sorted(worker.environment):
        value = worker.env.get(name, MASKED)  # who writes into a file has something to hide
        yield Value(worker.name, f"env.{name}", value, None, _place_of_variable(worker, name, workgroup))


def _settings(child: ChildSpec, workgroup: Workgroup, plan: Plan, resolved: Mapping[str, Resolved]) -> Iterator[Value]:
    decided = {
        "termination_grace_period": plan.grace,
        "cancellation_grace_period": child.graces.cancellation,
        "cleanup_grace_period": child.graces.cleanup,
    }
    given = {**_GIVEN, "worker_label": f"{child.name}.<index>", "worker_group": plan.group}
    for name in SETTING_NAMES:
        about = describe(name)
        value = getattr(resolved[child.name].settings, name)
        source = _source(name, child, workgroup, resolved[child.name])
        if name in given:
            value, source = given[name], SUPERVISOR
        elif name == "termination_grace_period":
            value, source = plan.grace, workgroup.written(f"supervisor.{name}") or resolved[""].sources[name]
        elif name in decided and decided[name] != value:
            value, source = decided[name], f"{SUPERVISOR}: scaled to termination_grace_period"
        if about.secret:
            value = None if value is None else MASKED
        yield Value(child.name, name, _plain(value), about.unit, source)


def _source(name: str, child: ChildSpec, workgroup: Workgroup, resolved: Resolved) -> str:
    source = resolved.sources[name]
    part = {WORKER: child.name if child.role == "scheduler" else f"workers.{child.name}", DEFAULTS: "defaults"}
    names = [name, *(alias for alias, real in ALIASES.items() if real == name)]
    if source in OWN_SOURCES:
        worker = next(worker for worker in workgroup.workers if worker.name == child.name)
        written = (each for each in map(variable, names) if each in worker.environment)
        return _place_of_variable(worker, next(written), workgroup)
    if source not in part:
        return source
    keys = [f"{part[source]}.{each}" for each in names]
    own = f"{part[source]}.credentials" if source == WORKER else "credentials"
    keys.append(f"{own}.{name.removeprefix('pg_credential_')}")
    return next(filter(None, map(workgroup.written, keys)), source)


def _place_of_variable(worker: WorkerEntry, name: str, workgroup: Workgroup) -> str:
    if name in worker.env:
        return workgroup.written(f"workers.{worker.name}.env.{name}") or OWN_ENV
    return f"{worker.env_file}:{worker.file.lines[name]}"


def _unit(value: Any) -> str | None:
    return "seconds" if isinstance(value, float) else None


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)
