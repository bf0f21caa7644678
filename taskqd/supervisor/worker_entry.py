"""One ``[[workers]]`` table: a kind of worker, and how many processes of it there are."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from taskqd.domain.names import nearest
from taskqd.supervisor.policy import GROUP, Policy, take_policy
from taskqd.supervisor.recycle import NO_LIMITS, RecycleLimits
from taskqd.supervisor.table import Table, is_name, name_rule
from taskqd.supervisor.worker_env import GROUP_WIDE, NO_FILE, RESERVED, EnvFile, digest, take_env

SCHEDULER = "scheduler"
"""The name of the scheduler child, which no worker may take."""

MAX_REPLICAS = 1024

PRELOAD = ("auto", "require", "off")
"""How the workers are made: forked from a process that has imported the actors, if that can be, only so, or never."""

CREDENTIAL_KEYS = ("provider", "path", "command", "timeout", "refresh_interval")
"""What a ``credentials`` table may hold: the settings ``pg_credential_*``."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One ``[[workers]]`` table: ``replicas`` equal processes."""

    name: str
    """What its processes are called, followed by their numbers: ``io.0``, ``io.1``. Must be set."""
    actors: str
    """Their actors, as ``module:attribute``. Default: those above the tables."""
    replicas: int = 1
    """How many processes; ``"auto"``: one for each CPU that the group may use, by its affinity and its quota."""
    replicas_from: str = ""
    """What ``"auto"`` was decided by; empty for a number that was written."""
    preload: str = "auto"
    """Like ``preload`` in ``[supervisor]``, which is its default."""
    env_file: str | None = None
    """A file of ``NAME=value`` lines, relative to this one, for the environment of these processes: for secrets."""
    env: dict[str, str] = field(default_factory=dict)
    """What ``[workers.env]`` holds; it wins over ``env_file``."""
    file: EnvFile = field(default=NO_FILE, repr=False)
    """What ``env_file`` holds."""
    credentials: dict[str, Any] = field(default_factory=dict)
    """What ``[workers.credentials]`` holds, under the settings' names; these are among the settings too."""
    policy: Policy = GROUP
    recycle: RecycleLimits = NO_LIMITS
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What its processes have in their environment beside the group's. Holds secrets."""
        return {**self.file.values, **self.env}

    @property
    def zygote(self) -> tuple[str, str]:
        """What decides from which process it is forked: its actors, and the mark of its environment."""
        return self.actors, digest(self.environment)


def take_worker(
    table: Table,
    position: int,
    *,
    directory: str,
    actors: str | None,
    preload: str,
    policy: Policy,
    known: Collection[str] | None,
) -> WorkerEntry:
    """Take a whole table of a file in ``directory``; ``actors``, ``preload`` and ``policy`` hold for all workers."""
    name = table.text("name")
    if name is None:
        if "name" not in table.faulty:
            table.problem("name", "missing")
    elif name == SCHEDULER:
        table.problem("name", f"{name!r} is the name of the group's scheduler; choose another")
    elif not is_name(name, 64):
        table.problem("name", f"{name!r} must be {name_rule(64)}")
    else:
        table.rename(f"workers.{name}")
    own = table.text("actors") or actors
    if own is None and not {"actors"} & table.faulty:
        table.problem("actors", "missing, and there is no top-level actors: write 'module:attribute'")
    elif own is not None and not all(own.partition(":")):
        table.problem("actors", f"{own!r} must be written 'module:attribute'")
    replicas, replicas_from = _replicas(table)
    preload = table.choice("preload", preload, PRELOAD)
    env_file = table.text("env_file")
    own_policy = take_policy(table, policy)
    recycle = _recycle(table.table("recycle"))
    env = take_env(table.table("env"))
    own_credentials = table.table("credentials")
    settings = take_settings(table, known, group_wide=False)
    credentials = take_credentials(own_credentials, settings, "this worker's table")
    return WorkerEntry(
        name=name or f"[{position}]",
        actors=own or "",
        replicas=replicas,
        replicas_from=replicas_from,
        preload=preload,
        env_file=env_file and os.path.join(directory, env_file),
        env=env,
        credentials=credentials,
        policy=own_policy,
        recycle=recycle,
        settings={**settings, **credentials},
    )


def _replicas(table: Table) -> tuple[int, str]:
    wanted = table.count_or_auto("replicas", 1, 1, MAX_REPLICAS)
    if isinstance(wanted, int):
        return wanted, ""
    from taskqd.supervisor.cpus import usable_cpus  # here, as it reads many files and the supervisor stays

    cpus = usable_cpus()
    return min(cpus.count, MAX_REPLICAS), cpus.source


def _recycle(table: Table) -> RecycleLimits:
    limits = RecycleLimits(
        max_jobs=table.count("max_jobs", None, 1, 1_000_000_000),
        max_age=table.seconds("max_age", None, 1, 30 * 86400),
        max_private_mb=table.count("max_private_mb", None, 1, 1024 * 1024),
    )
    table.refuse_rest()
    return limits


def take_credentials(table: Table, beside: Mapping[str, Any], called: str) -> dict[str, Any]:
    """Take the keys as the settings they are short for; those check their values. ``beside`` is set in ``called``."""
    found: dict[str, Any] = {}
    for key, value in table.rest():
        name = f"pg_credential_{key}"
        if key not in CREDENTIAL_KEYS:
            table.problem(key, f"unknown key{nearest(key, CREDENTIAL_KEYS)}")
        elif name in beside:
            table.problem(key, f"is set as {name} in {called} too; set it in one of them")
        else:
            found[name] = value
    return found


def take_settings(table: Table, known: Collection[str] | None, *, group_wide: bool = True) -> dict[str, Any]:
    """Take what is left of a table as settings; their values are checked by the settings themselves."""
    found: dict[str, Any] = {}
    for key, value in table.rest():
        if key in RESERVED:
            table.problem(key, f"must not stand here: {RESERVED[key]}")
        elif key in GROUP_WIDE and not group_wide:
            table.problem(key, "must not stand here: one group uses one database; set it in [defaults]")
        elif known is not None and key not in known:
            table.problem(key, f"unknown key{nearest(key, [*table.known, *known])}")
        elif isinstance(value, Mapping):
            table.problem(key, "must be a value, not a table")
        else:
            found[key] = value
    return found
