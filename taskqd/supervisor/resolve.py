"""From a workgroup file to a plan: every setting of every process resolved, every problem in one message.

Runs in the preflight child only: it loads the settings model.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taskqd.settings import SETTING_NAMES, Settings, SettingsError, resolve_settings
from taskqd.settings.model import ALIASES
from taskqd.settings.resolve import DEFAULT, Resolved
from taskqd.supervisor.fleet import Crew, Fleet
from taskqd.supervisor.plan import ChildSpec, Plan
from taskqd.supervisor.recycle import NO_LIMITS, RecycleLimits
from taskqd.supervisor.restart import RestartRule
from taskqd.supervisor.slot import Timing
from taskqd.supervisor.stopping import LEAST_GRACE, Graces, scale
from taskqd.supervisor.workgroup import SCHEDULER, SupervisorOptions, Workgroup, WorkgroupError, load_workgroup

_GRACES = ("cancellation_grace_period", "cleanup_grace_period")
_NO_GRACES: dict[str, Any] = dict.fromkeys(_GRACES, 0)
_ENDLESS = {"termination_grace_period": 86400}
_BOOT_MARGIN = 30.0


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
        resolver.check_boot_timeout(group.settings.database_boot_timeout)
    if resolver.problems or group is None:
        raise WorkgroupError(resolver.problems)
    address = workgroup.supervisor.health_address
    plan = Plan(
        group=workgroup.supervisor.name,
        children=tuple(spec for spec, _ in parts),
        grace=85.0 if grace is None else grace,
        timing=_timing(workgroup.supervisor, group.settings.database_boot_timeout),
        max_booting=workgroup.supervisor.max_booting or len(os.sched_getaffinity(0)),
        app_dir=workgroup.app_dir,
        runtime_dir=workgroup.supervisor.runtime_dir,
        health_address=address and f"{address[0]}:{address[1]}",
        logs=workgroup.supervisor.logs,
        settle_after=workgroup.supervisor.settle_after,
    )
    return Resolution(
        workgroup=workgroup,
        settings=group.settings,
        plan=plan,
        fleet=_fleet(workgroup, parts, group.settings),
        actors=tuple(dict.fromkeys(worker.actors for worker in workgroup.workers)),
        warnings=group.warnings,
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

    def settings(self, label: str, keys: Mapping[str, Any]) -> Resolved | None:
        """Return the settings of the process whose own keys are ``keys``; ``label`` is its part of the file."""
        try:
            return resolve_settings(worker_keys=keys, default_keys=self._workgroup.defaults)
        except SettingsError as error:
            for line in error.problems:
                self.problem(self._located(line, label))
            return None

    def children(self, grace: float) -> list[tuple[ChildSpec, Settings]]:
        """Return every kind of process, the scheduler first, with its settings."""
        found: list[tuple[ChildSpec, Settings]] = []
        if self._workgroup.scheduler:
            keys = self._workgroup.scheduler_settings
            self._add(found, SCHEDULER, SCHEDULER, ("scheduler", "run"), 1, "off", keys, grace)
        for worker in self._workgroup.workers:
            arguments = ("worker", "--actors", worker.actors)
            label = f"workers.{worker.name}"
            self._add(
                found,
                label,
                worker.name,
                arguments,
                worker.replicas,
                worker.preload,
                worker.settings,
                grace,
                worker.recycle,
            )
        return found

    def check_boot_timeout(self, database_boot_timeout: float) -> None:
        limit = self._workgroup.supervisor.boot_timeout
        if limit is not None and limit <= database_boot_timeout:
            self.problem(
                f"{self._workgroup.place('supervisor.boot_timeout')}: {limit:g} must be above database_boot_timeout = "
                f"{database_boot_timeout:g}, for which a process waits for its database"
            )

    def _add(
        self,
        found: list[tuple[ChildSpec, Settings]],
        label: str,
        name: str,
        arguments: tuple[str, ...],
        replicas: int,
        preload: str,
        keys: Mapping[str, Any],
        grace: float,
        recycle: RecycleLimits = NO_LIMITS,
    ) -> None:
        resolved = self.settings(label, {**keys, **_ENDLESS})
        if resolved is None:
            return
        settings = resolved.settings
        self.resolved[name] = resolved
        graces = Graces(settings.cancellation_grace_period, settings.cleanup_grace_period)
        fixed = [resolved.sources[grace_name] != DEFAULT for grace_name in _GRACES]
        try:
            graces = scale(grace, graces, fixed_cancellation=fixed[0], fixed_cleanup=fixed[1])
        except ValueError as error:
            self.problem(f"{self._workgroup.place(label)}: {error}")
        own = _by_name(self._workgroup.defaults) | _by_name(keys)
        if resolved.sources["log_format"] == DEFAULT and os.isatty(2):
            own["log_format"] = "console"  # a person looks on
        own |= dict(zip(_GRACES, (graces.cancellation, graces.cleanup), strict=True))
        spec = ChildSpec(
            name=name,
            role=SCHEDULER if name == SCHEDULER else "worker",
            arguments=arguments,
            replicas=replicas,
            preload=preload,
            settings={**own, "termination_grace_period": grace},
            fingerprint=_fingerprint(settings),
            graces=graces,
            database_stale_after=_stale_after(settings),
            queues=() if name == SCHEDULER else tuple(settings.queues),
            recycle=recycle,
        )
        found.append((spec, settings))

    def _located(self, line: str, label: str) -> str:
        """Turn the settings' name of a part of the file into the file's own."""
        for prefix, part in (("[[workers]] ", label), ("[defaults] ", "defaults")):
            if line.startswith(prefix):
                key, *rest = re.split(r"(?=[ :])", line.removeprefix(prefix), maxsplit=1)
                if part == "defaults" and key in self._workgroup.credentials:
                    part, key = "credentials", key.removeprefix("pg_credential_")
                aliases = (alias for alias, name in ALIASES.items() if name == key)
                key = next((each for each in aliases if self._workgroup.written(f"{part}.{each}")), key)
                return "".join([self._workgroup.place(f"{part}.{key}"), *rest])
        return line


def _by_name(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys under the settings' own names: a worker's alias overrides a default's name."""
    return {ALIASES.get(key, key): value for key, value in keys.items()}


def _fingerprint(settings: Settings) -> str:
    # Secrets are asterisks in it. The default of the socket names this very process.
    values = settings.model_dump_json(exclude={"health_socket_path"})
    return hashlib.blake2b(values.encode(), digest_size=8).hexdigest()


def _stale_after(settings: Settings) -> float:
    beat = settings.heartbeat_interval + settings.heartbeat_command_timeout
    return max(15.0, 3 * beat, 2 * settings.sweep_interval)


def _timing(options: SupervisorOptions, database_boot_timeout: float) -> Timing:
    boot = options.boot_timeout or database_boot_timeout + _BOOT_MARGIN
    return Timing(
        boot_timeout=boot,
        boot_limit=5 * boot,
        stall_after=options.stall_after,
        hang_kill_after=options.hang_kill_after,
        restart=RestartRule(
            backoff_initial=options.backoff_initial,
            backoff_max=options.backoff_max,
            stable_after=options.stable_after,
            burst_limit=options.burst_limit,
            burst_window=options.burst_window,
        ),
    )


def _fleet(workgroup: Workgroup, parts: list[tuple[ChildSpec, Settings]], group: Settings) -> Fleet:
    crews = [
        Crew(
            name=spec.name,
            replicas=spec.replicas,
            max_concurrency=settings.max_concurrency,
            dispatcher_pool_size=settings.dispatcher_pool_size,
            heartbeat_pool_size=settings.heartbeat_pool_size,
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
    )
