"""The workgroup file: TOML in, frozen dataclasses and every problem at once out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from taskqd.domain.errors import ConfigError
from taskqd.domain.names import nearest
from taskqd.supervisor.lines import LineIndex, Path
from taskqd.supervisor.recycle import NO_LIMITS, RecycleLimits
from taskqd.supervisor.table import Problems, Table, is_name, name_rule

SCHEDULER = "scheduler"
"""The name of the scheduler child, which no worker may take."""

MAX_REPLICAS = 1024

PRELOAD = ("auto", "require", "off")
"""How the workers are made: forked from a process that has imported the actors, if that can be, only so, or never."""

CREDENTIAL_KEYS = ("provider", "path", "command", "timeout", "refresh_interval")
"""What ``[credentials]`` may hold: the settings ``pg_credential_*``, for the whole group."""

_GROUP_WIDE = ("pg_dsn", "pg_dsn_direct", "pg_dsn_pooled", "pg_is_pooled", "schema_name", "environment")
_RESERVED = {
    "termination_grace_period": "set it in [supervisor]; it bounds the stop of the whole group",
    "workgroup_instance": "the supervisor sets it",
    "health_socket_path": "the supervisor gives each process its own socket",
    "metrics_host": "the group serves metrics on its own socket",
    "metrics_port": "the group serves metrics on its own socket; its processes cannot share a port",
}


class WorkgroupError(ConfigError):
    """The workgroup is refused. ``problems`` holds one line each: file, line, key, and what is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            super().__init__("\n  ".join([f"{len(self.problems)} problems:", *self.problems]))


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """``[supervisor]``: how the group is watched and stopped. Every time is in seconds."""

    name: str
    """The group's name: of its socket, its lock and its database sessions. Default: the file's stem."""
    runtime_dir: str | None = None
    """Where the group's socket and lock live. Default: the first usable standard directory."""
    health_address: tuple[str, int] | None = None
    """``"host:port"`` that serves /startup, /live, /ready and /metrics over TCP, without a password: for httpGet
    probes and scrapers. Default: the group's unix socket alone."""
    termination_grace_period: float | None = None
    """What the platform grants between SIGTERM and SIGKILL. Default: that setting, 85."""
    backoff_initial: float = 0.5
    """The delay after the first unstable exit; it doubles from there."""
    backoff_max: float = 30.0
    """The longest delay before a restart."""
    stable_after: float = 10.0
    """How long a process must have been ready for its next exit to be restarted at once."""
    burst_limit: int = 10
    """Restarts within ``burst_window`` after which a process is given up, however stable; 0 is no limit."""
    burst_window: float = 60.0
    """The window of ``burst_limit``."""
    boot_timeout: float | None = None
    """How long a process may take to become ready. Default: ``database_boot_timeout`` and 30 more."""
    stall_after: float = 3.0
    """How long a process may send no beat (it sends one each second) before it counts as stalled."""
    hang_kill_after: float = 30.0
    """How long a process may be stalled before it is killed."""
    settle_after: float = 2.0
    """How long a new process must have been ready before a reload or restart drains the one it replaces."""
    preload: str = "auto"
    """Whether workers are forked from a process that has imported their actors once: ``"auto"`` where it is safe,
    ``"require"`` or not at all, ``"off"`` never. A worker may have its own."""
    logs: str = "auto"
    """Who reads what the processes print: they ``inherit`` the supervisor's standard error, or it ``capture``s them.
    ``auto``: it does on a terminal. Read at the start."""
    max_booting: int | None = None
    """How many workers may boot at the same time. Default: the number of usable CPUs."""


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    """``[budget]``: what else uses the database, and what to do when it does not all fit."""

    enforce: bool = True
    """Refuse to run over budget (``enforce = "enforce"``), or only warn (``"warn"``)."""
    web_pods: int = 0
    """``TaskQ`` clients elsewhere; each may hold five connections."""
    app_connections: int = 0
    """Connections of the application's own pools."""


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One ``[[workers]]`` table: ``replicas`` equal processes."""

    name: str
    """What its processes are called, followed by their numbers: ``io.0``, ``io.1``. Must be set."""
    actors: str
    """Their actors, as ``module:attribute``. Default: those above the tables."""
    replicas: int = 1
    """How many processes."""
    preload: str = "auto"
    """Like ``preload`` in ``[supervisor]``, which is its default."""
    recycle: RecycleLimits = NO_LIMITS
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workgroup:
    """A whole workgroup file. ``settings`` of each part hold setting names and values as written."""

    file: str
    supervisor: SupervisorOptions
    budget: BudgetOptions
    workers: tuple[WorkerEntry, ...]
    defaults: dict[str, Any]
    credentials: dict[str, Any]
    """What ``[credentials]`` holds, under the settings' names; these are among the defaults too."""
    scheduler: bool
    scheduler_settings: dict[str, Any]
    app_dir: str | None
    """Where actor modules are imported from, besides installed packages and the working directory."""
    index: LineIndex | None = field(default=None, compare=False, repr=False)
    """Where in the file each key stands, if it came from one."""

    def place(self, key: str) -> str:
        """Return ``file:line:key`` of ``key``, such as ``workers.io.queues``."""
        return f"{self.file}:{key}" if self.index is None else f"{self.file}:{self.index.line(self._path(key))}:{key}"

    def written(self, key: str) -> str:
        """Return ``file:line`` of ``key``, or an empty string when the file does not hold it."""
        line = None if self.index is None else self.index.lines.get(self._path(key))
        return "" if line is None else f"{self.file}:{line}"

    def _path(self, key: str) -> Path:
        part, _, rest = key.partition(".")
        if part == "workers":
            longest_first = sorted(enumerate(self.workers), key=lambda entry: -len(entry[1].name))
            for position, worker in longest_first:  # "a.b" may be a worker, or the key b of worker "a"
                if rest == worker.name or rest.startswith(f"{worker.name}."):
                    own = rest[len(worker.name) + 1 :]
                    return (part, position, *(own.split(".") if own else []))
        return (part, *(rest.split(".") if rest else []))


def load_workgroup(path: str, known_settings: Collection[str] | None = None) -> tuple[Workgroup, list[str]]:
    """Return the workgroup in ``path`` and everything that is wrong with it, one line each.

    With ``known_settings`` a key that is neither ours nor a setting is a problem; without, every unknown key
    of a part that takes settings is taken for one. Raises ``WorkgroupError`` when the file is missing or no
    TOML.
    """
    document, index = _read(path)
    workgroup, problems = parse_workgroup(document, path, known_settings, index)
    if workgroup.app_dir is not None and not FilePath(workgroup.app_dir).is_dir():
        found = Problems(path, index)
        found.add("app_dir", f"{document['app_dir']!r}: {workgroup.app_dir!r} is not a directory", ("app_dir",))
        problems += found.lines
    return workgroup, problems


def parse_workgroup(
    document: Mapping[str, Any],
    file: str,
    known_settings: Collection[str] | None = None,
    index: LineIndex | None = None,
) -> tuple[Workgroup, list[str]]:
    """Like :func:`load_workgroup`, for a document that is read already; with its ``index`` problems name lines."""
    problems = Problems(file, index)
    top = Table(document, "", problems)
    actors = top.text("actors")
    app_dir = top.text("app_dir")
    supervisor = _supervisor(top.table("supervisor"), FilePath(file).stem, known_settings or ())
    budget = _budget(top.table("budget"))
    defaults = _settings(top.table("defaults"), known_settings)
    credentials = _credentials(top.table("credentials"), defaults)
    scheduler_table = top.table("scheduler")
    scheduler = scheduler_table.flag("enabled", True)
    scheduler_settings = _settings(scheduler_table, known_settings, group_wide=False)
    workers = _workers(top, actors, supervisor.preload, known_settings)
    top.refuse_rest(known_settings or ())
    workgroup = Workgroup(
        file=file,
        supervisor=supervisor,
        budget=budget,
        workers=workers,
        defaults=defaults | credentials,
        credentials=credentials,
        scheduler=scheduler,
        scheduler_settings=scheduler_settings,
        app_dir=str(FilePath(file).resolve().parent / app_dir) if app_dir else None,
        index=index,
    )
    return workgroup, problems.lines


def _read(path: str) -> tuple[dict[str, Any], LineIndex]:
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8-sig")  # some editors begin a file with a byte order mark
        return tomllib.loads(text), LineIndex(text)
    except FileNotFoundError:
        raise WorkgroupError([f"{path}: no such file"]) from None
    except OSError as error:
        raise WorkgroupError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    except UnicodeDecodeError as error:
        raise WorkgroupError([f"{path}: is not UTF-8 text: byte {error.start} is {error.reason}"]) from None
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = int(at[1]) if at else text.count("\n") + 1
        raise WorkgroupError([f"{path}:{line}: invalid TOML: {error}"]) from None


def _supervisor(table: Table, stem: str, settings: Collection[str]) -> SupervisorOptions:
    name = table.text("name")
    if name is None and not is_name(stem, 32):
        table.problem("name", f"missing, and the file's name {stem!r} cannot stand in: it must be {name_rule(32)}")
    elif name is not None and not is_name(name, 32):
        table.problem("name", f"{name!r} must be {name_rule(32)}")
    options = SupervisorOptions(
        name=name or stem,
        runtime_dir=table.text("runtime_dir"),
        health_address=table.address("health_address"),
        termination_grace_period=table.seconds("termination_grace_period", None, 10, 86400),
        backoff_initial=table.seconds("backoff_initial", 0.5, 0.01, 60),
        backoff_max=table.seconds("backoff_max", 30.0, 0.01, 3600),
        stable_after=table.seconds("stable_after", 10.0, 0, 3600),
        burst_limit=table.count("burst_limit", 10, 0, 10_000),
        burst_window=table.seconds("burst_window", 60.0, 1, 86400),
        boot_timeout=table.seconds("boot_timeout", None, 1, 3600),
        stall_after=table.seconds("stall_after", 3.0, 1.5, 600),
        hang_kill_after=table.seconds("hang_kill_after", 30.0, 0.5, 3600),
        settle_after=table.seconds("settle_after", 2.0, 0, 600),
        preload=table.choice("preload", "auto", PRELOAD),
        logs=table.choice("logs", "auto", ("auto", "inherit", "capture")),
        max_booting=table.count("max_booting", None, 1, MAX_REPLICAS),
    )
    if options.backoff_max < options.backoff_initial:
        table.problem(
            "backoff_max",
            f"{options.backoff_max:g} must be at least backoff_initial = {options.backoff_initial:g}",
        )
    table.refuse_rest(settings)
    return options


def _budget(table: Table) -> BudgetOptions:
    enforce = table.choice("enforce", "enforce", ("enforce", "warn"))
    options = BudgetOptions(
        enforce=enforce == "enforce",
        web_pods=table.count("web_pods", 0, 0, 100_000),
        app_connections=table.count("app_connections", 0, 0, 1_000_000),
    )
    table.refuse_rest()
    return options


def _credentials(table: Table, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Take the keys as the settings they are short for; those check their values."""
    found: dict[str, Any] = {}
    for key, value in table.rest():
        name = f"pg_credential_{key}"
        if key not in CREDENTIAL_KEYS:
            table.problem(key, f"unknown key{nearest(key, CREDENTIAL_KEYS)}")
        elif name in defaults:
            table.problem(key, f"is set as {name} in [defaults] too; set it in one of them")
        else:
            found[name] = value
    return found


def _workers(top: Table, actors: str | None, preload: str, known: Collection[str] | None) -> tuple[WorkerEntry, ...]:
    entries: list[WorkerEntry] = []
    for position, table in enumerate(top.tables("workers")):
        entry = _worker(table, position, actors, preload, known)
        twins = [index for index, other in enumerate(entries) if other.name == entry.name]
        if twins:
            table.problem("name", f"{entry.name!r} is taken by workers[{twins[0]}]; names must differ")
        entries.append(entry)
    if not entries and "workers" not in top.faulty:
        top.problem("workers", "missing: a workgroup needs at least one [[workers]] table")
    return tuple(entries)


def _worker(
    table: Table, position: int, actors: str | None, preload: str, known: Collection[str] | None
) -> WorkerEntry:
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
    entry = WorkerEntry(
        name=name or f"[{position}]",
        actors=own or "",
        replicas=table.count("replicas", 1, 1, MAX_REPLICAS),
        preload=table.choice("preload", preload, PRELOAD),
        recycle=_recycle(table.table("recycle")),
    )
    return replace(entry, settings=_settings(table, known, group_wide=False))


def _recycle(table: Table) -> RecycleLimits:
    limits = RecycleLimits(
        max_jobs=table.count("max_jobs", None, 1, 1_000_000_000),
        max_age=table.seconds("max_age", None, 1, 30 * 86400),
        max_private_mb=table.count("max_private_mb", None, 1, 1024 * 1024),
    )
    table.refuse_rest()
    return limits


def _settings(table: Table, known: Collection[str] | None, *, group_wide: bool = True) -> dict[str, Any]:
    """Take what is left of a table as settings; their values are checked by the settings themselves."""
    found: dict[str, Any] = {}
    for key, value in table.rest():
        if key in _RESERVED:
            table.problem(key, f"must not stand here: {_RESERVED[key]}")
        elif key in _GROUP_WIDE and not group_wide:
            table.problem(key, "must not stand here: one group uses one database; set it in [defaults]")
        elif known is not None and key not in known:
            table.problem(key, f"unknown key{nearest(key, [*table.known, *known])}")
        elif isinstance(value, Mapping):
            table.problem(key, "must be a value, not a table")
        else:
            found[key] = value
    return found
