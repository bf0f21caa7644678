"""From a workgroup file to a plan: every setting of every process resolved, every problem in one message.

Runs in the preflight child only: it loads the settings model.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from taskqd.settings import SETTING_NAMES, Settings, SettingsError, resolve_settings
from taskqd.settings.model import ALIASES, PREFIX
from taskqd.settings.resolve import DEFAULT, DEFAULTS, ENV_FILE, OWN_ENV, OWN_SOURCES, WORKER, Resolved
from taskqd.storage.credentials import Source
from taskqd.storage.dsn import parse_dsn
from taskqd.supervisor.cpus import usable_cpus
from taskqd.supervisor.fleet import Crew, Fleet
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.policy import Policy
from taskqd.supervisor.stopping import LEAST_GRACE, Graces, scale
from taskqd.supervisor.worker_entry import WorkerEntry
from taskqd.supervisor.worker_env import digest
from taskqd.supervisor.workgroup import SCHEDULER, Workgroup, WorkgroupError, load_workgroup

_GRACES = ("cancellation_grace_period", "cleanup_grace_period")
_NO_GRACES: dict[str, Any] = dict.fromkeys(_GRACES, 0)
_SOURCE = frozenset(f"pg_credential_{key}" for key in Source.__dataclass_fields__)
_UNATTENDED = (
    '[scheduler] enabled = false, and maintenance = "off" for every worker: no process of this group fires schedules, '
    "takes back jobs of dead workers or ends those past their deadline; have a `taskqd scheduler run` elsewhere"
)
_ENDLESS = {"termination_grace_period": 86400}


@dataclass(frozen=True, slots=True)
class Resolution:
    """A workgroup with everything decided. ``settings`` are those of the group: database, schema, boot timeout."""

    workgroup: Workgroup
    settings: Settings
    plan: Plan
    fleet: Fleet
    actors: tuple[str, ...]
    """Every registry that some worker loads."""
    warnings: tuple[str, ...]
    resolved: Mapping[str, Resolved]
    """The settings of each kind of process with their sources; those of the group under ``""``."""


def resolve(path: str) -> Resolution:
    """Return the resolved workgroup of ``path``. Raises ``WorkgroupError`` with everything that is wrong."""
    workgroup, lines = load_workgroup(path, [*SETTING_NAMES, *ALIASES])
    resolver = _Resolver(workgroup, lines)
    group = resolver.settings("workers", _NO_GRACES)
    grace = workgroup.supervisor.termination_grace_period
    if grace is None and group is not None:
        grace = group.settings.termination_grace_period
        if grace < LEAST_GRACE:
            resolver.problem(
                f"TASKQ_TERMINATION_GRACE_PERIOD = {grace:g}: must be at least {LEAST_GRACE:g} for a workgroup, "
                "which needs some of it to stop its processes"
            )
            grace = LEAST_GRACE
    parts = resolver.children(85.0 if grace is None else grace)
    if group is not None:
        resolver.check_databases(group.settings)
    if resolver.problems or group is None:
        raise WorkgroupError(resolver.problems)
    address = workgroup.supervisor.health_address
    plan = Plan(
        group=workgroup.supervisor.name,
        children=tuple(spec for spec, _ in parts),
        grace=85.0 if grace is None else grace,
        timing=workgroup.supervisor.timing(group.settings.database_boot_timeout),
        max_booting=workgroup.supervisor.max_booting or usable_cpus().count,
        app_dir=workgroup.app_dir,
        runtime_dir=workgroup.supervisor.runtime_dir,
        health_address=address and f"{address[0]}:{address[1]}",
        logs=workgroup.supervisor.logs,
    )
    fleet = _fleet(workgroup, parts, group.settings)
    return Resolution(
        workgroup=workgroup,
        settings=group.settings,
        plan=plan,
        fleet=fleet,
        actors=tuple(dict.fromkeys(worker.actors for worker in workgroup.workers)),
        warnings=group.warnings if fleet.is_attended else (*group.warnings, _UNATTENDED),
        resolved={"": group, **resolver.resolved},
    )


class _Resolver:
    """Resolves the settings of one process after the other and keeps every problem once."""

    def __init__(self, workgroup: Workgroup, problems: list[str]) -> None:
        self.problems = problems
        self.resolved: dict[str, Resolved] = {}
        """Those of each kind of process, by its name."""
        self._workgroup = workgroup

    def problem(self, line: str) -> None:
        if line not in self.problems:
            self.problems.append(line)

    def settings(self, label: str, keys: Mapping[str, Any], worker: WorkerEntry | None = None) -> Resolved | None:
        """Return the settings of the process whose own keys are ``keys``; ``label`` is its part of the file."""
        try:
            return resolve_settings(
                worker_keys=keys,
                default_keys=self._defaults(worker),
                environ=None if worker is None else {**os.environ, **worker.environment},
                own_variables={} if worker is None else _own_variables(worker),
            )
        except SettingsError as error:
            for line in error.problems:
                self.problem(self._located(line, label, worker))
            return None

    def _defaults(self, worker: WorkerEntry | None) -> dict[str, Any]:
        """Return what holds for all processes; a worker that names its provider has nothing of the group's."""
        defaults = self._workgroup.defaults
        if worker is None or "pg_credential_provider" not in worker.credentials:
            return defaults
        return {key: value for key, value in defaults.items() if key not in self._workgroup.credentials}

    def children(self, grace: float) -> list[tuple[ChildSpec, Settings]]:
        """Return every kind of process, the scheduler first, with its settings."""
        group = self._workgroup
        found = []
        if group.scheduler:
            spec = ChildSpec(SCHEDULER, SCHEDULER, ("scheduler", "run"), settle_after=group.supervisor.settle_after)
            found.append(self._child(spec, SCHEDULER, group.scheduler_settings, group.supervisor, grace))
        for worker in group.workers:
            spec = ChildSpec(
                worker.name,
                "worker",
                ("worker", "--actors", worker.actors),
                worker.replicas,
                preload=worker.preload,
                recycle=worker.recycle,
                settle_after=worker.policy.settle_after,
                env=worker.env,
                env_file=worker.env_file,
                env_digest=digest(worker.environment),
                env_settings=tuple(sorted(_own_variables(worker))),
            )
            label = f"workers.{worker.name}"
            found.append(self._child(spec, label, worker.settings, worker.policy, grace, worker))
        return [each for each in found if each is not None]

    def check_databases(self, group: Settings) -> None:
        """Make a problem of every worker whose own environment names another database than the group's."""
        wanted = [_place(dsn) for dsn in (group.direct_dsn(), group.pooled_dsn())]
        for worker in self._workgroup.workers:
            resolved = self.resolved.get(worker.name)
            if resolved is None:
                continue
            found = [_place(dsn) for dsn in (resolved.settings.direct_dsn(), resolved.settings.pooled_dsn())]
            if found != wanted:
                names = " and ".join(name for name in _own_variables(worker) if name.startswith("TASKQ_PG_DSN"))
                where = self._workgroup.place(f"workers.{worker.name}")
                self.problem(f"{where}: {names} must name the database of the group: it uses one, in one place")

    def _check_boot_timeout(self, label: str, policy: Policy, database_boot_timeout: float) -> None:
        limit = policy.boot_timeout
        if limit is not None and limit <= database_boot_timeout:
            key = f"{label}.boot_timeout"
            place = self._workgroup.place(key if self._workgroup.written(key) else "supervisor.boot_timeout")
            self.problem(
                f"{place}: {limit:g} must be above database_boot_timeout = "
                f"{database_boot_timeout:g}, for which a process waits for its database"
            )

    def _child(
        self,
        spec: ChildSpec,
        label: str,
        keys: Mapping[str, Any],
        policy: Policy,
        grace: float,
        worker: WorkerEntry | None = None,
    ) -> tuple[ChildSpec, Settings] | None:
        """Return ``spec`` with all that follows from the settings, and those."""
        resolved = self.settings(label, {**keys, **_ENDLESS}, worker)
        if resolved is None:
            return None
        settings = resolved.settings
        self.resolved[spec.name] = resolved
        self._check_boot_timeout(label, policy, settings.database_boot_timeout)
        graces = Graces(settings.cancellation_grace_period, settings.cleanup_grace_period)
        fixed = [resolved.sources[grace_name] != DEFAULT for grace_name in _GRACES]
        try:
            graces = scale(grace, graces, fixed_cancellation=fixed[0], fixed_cleanup=fixed[1])
        except ValueError as error:
            self.problem(f"{self._workgroup.place(label)}: {error}")
        nearer = {name for name, source in resolved.sources.items() if source in OWN_SOURCES}
        shared = _by_name(self._defaults(worker))
        own = {name: value for name, value in shared.items() if name not in nearer} | _by_name(keys)
        if resolved.sources["log_format"] == DEFAULT and os.isatty(2):
            own["log_format"] = "console"  # a person looks on
        own |= dict(zip(_GRACES, (graces.cancellation, graces.cleanup), strict=True))
        source = Source.of(settings)
        if source is not None:
            own = {name: value for name, value in own.items() if name not in _SOURCE}
        spec = replace(
            spec,
            settings={**own, "termination_grace_period": grace},
            fingerprint=_fingerprint(settings, shows_source=source is None),
            source=None if source is None else asdict(source),
            graces=graces,
            database_stale_after=_stale_after(settings),
            queues=() if spec.role == SCHEDULER else tuple(settings.queues),
            timing=policy.timing(settings.database_boot_timeout),
        )
        return spec, settings

    def _located(self, line: str, label: str, worker: WorkerEntry | None) -> str:
        """Turn the settings' name of a part of the file, or of a variable, into the place where that is written."""
        for prefix, part in ((f"{WORKER} ", label), (f"{DEFAULTS} ", "defaults")):
            if line.startswith(prefix):
                key, *rest = re.split(r"(?=[ :])", line.removeprefix(prefix), maxsplit=1)
                if key in self._credentials(part, worker):
                    part, key = _credentials_of(part), key.removeprefix("pg_credential_")
                aliases = (alias for alias, name in ALIASES.items() if name == key)
                key = next((each for each in aliases if self._workgroup.written(f"{part}.{each}")), key)
                return "".join([self._workgroup.place(f"{part}.{key}"), *rest])
        if worker is not None and line.startswith(OWN_SOURCES):
            source, _, told = line.partition(" ")
            name, *more = re.split(r"(?=[ :])", told, maxsplit=1)
            name = next((own for own in _own_variables(worker) if _setting(own) == _setting(name)), name)
            if source == ENV_FILE:
                return "".join([f"{worker.env_file}:{worker.file.lines.get(name, 1)}:{name}", *more])
            return "".join([self._workgroup.place(f"workers.{worker.name}.env.{name}"), *more])
        return line

    def _credentials(self, part: str, worker: WorkerEntry | None) -> Mapping[str, Any]:
        if part == "defaults":
            return self._workgroup.credentials
        return {} if worker is None else worker.credentials


def _credentials_of(part: str) -> str:
    return "credentials" if part == "defaults" else f"{part}.credentials"


def _own_variables(worker: WorkerEntry) -> dict[str, str]:
    """Return the settings' variables of a worker's own environment, each with the name of its source."""
    own = {**dict.fromkeys(worker.file.values, ENV_FILE), **dict.fromkeys(worker.env, OWN_ENV)}
    return {name: source for name, source in own.items() if name.upper().startswith(PREFIX)}


def _setting(variable: str) -> str:
    key = variable.removeprefix(PREFIX).lower()
    return ALIASES.get(key, key)


def _place(dsn: str) -> tuple[Any, str]:
    """Return what database a DSN means, whoever connects to it."""
    address = parse_dsn(dsn)
    return address.hosts, address.database


def _by_name(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys under the settings' own names: a worker's alias overrides a default's name."""
    return {ALIASES.get(key, key): value for key, value in keys.items()}


def _fingerprint(settings: Settings, *, shows_source: bool) -> str:
    # Secrets are asterisks in it. The default of the socket names this very process.
    values = settings.model_dump_json(exclude={"health_socket_path", *(() if shows_source else _SOURCE)})
    return hashlib.blake2b(values.encode(), digest_size=8).hexdigest()


def _stale_after(settings: Settings) -> float:
    beat = settings.heartbeat_interval + settings.heartbeat_command_timeout
    return max(15.0, 3 * beat, 2 * settings.sweep_interval)


def _fleet(workgroup: Workgroup, parts: list[tuple[ChildSpec, Settings]], group: Settings) -> Fleet:
    crews = [
        Crew(
            name=spec.name,
            replicas=spec.replicas,
            max_concurrency=settings.max_concurrency,
            dispatcher_pool_size=settings.dispatcher_pool_size,
            heartbeat_pool_size=settings.heartbeat_pool_size,
            listens=settings.notify_enabled,
            maintenance=settings.maintenance,
        )
        for spec, settings in parts
        if spec.role == "worker"
    ]
    return Fleet(
        crews=tuple(crews),
        scheduler=workgroup.scheduler,
        web_pods=workgroup.budget.web_pods,
        app_connections=workgroup.budget.app_connections,
        pooler=group.direct_dsn() != group.pooled_dsn(),
        renews_itself=any(_renews_itself(settings) for _, settings in parts),
    )


def _renews_itself(settings: Settings) -> bool:
    return settings.pg_credential_provider != "env" and settings.pg_credential_refresh_interval > 0
