"""The workgroup file: TOML in, frozen dataclasses and every problem at once out."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from taskqd.domain.errors import ConfigError
from taskqd.supervisor.lines import LineIndex, Path
from taskqd.supervisor.policy import Policy, take_policy
from taskqd.supervisor.table import Problems, Table, is_name, name_rule
from taskqd.supervisor.worker_entry import MAX_REPLICAS as MAX_REPLICAS
from taskqd.supervisor.worker_entry import PRELOAD, WorkerEntry, take_credentials, take_settings, take_worker
from taskqd.supervisor.worker_entry import SCHEDULER as SCHEDULER
from taskqd.supervisor.worker_env import EnvFileError, read_env_file


class WorkgroupError(ConfigError):
    """The workgroup is refused. ``problems`` holds one line each: file, line, key, and what is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0])
        else:
            super().__init__("\n  ".join([f"{len(self.problems)} problems:", *self.problems]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions(Policy):
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
    if workgroup.app_dir is not None and not os.path.isdir(workgroup.app_dir):
        found = Problems(path, index)
        found.add("app_dir", f"{document['app_dir']!r}: {workgroup.app_dir!r} is not a directory", ("app_dir",))
        problems += found.lines
    return _with_env_files(workgroup, problems), problems


def _with_env_files(workgroup: Workgroup, problems: list[str]) -> Workgroup:
    """Return the workgroup with what its ``env_file``s hold; what is wrong with one is said once."""
    workers = []
    for worker in workgroup.workers:
        if worker.env_file is not None:
            try:
                worker = replace(worker, file=read_env_file(worker.env_file))
            except EnvFileError as error:
                place = f"{workgroup.place(f'workers.{worker.name}.env_file')}: {worker.env_file!r}"
                lines = [
                    f"{worker.env_file}:{line}: {why}" if line else f"{place} {why}" for line, why in error.problems
                ]
                problems += [line for line in lines if line not in problems]
        workers.append(worker)
    return replace(workgroup, workers=tuple(workers))


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
    supervisor = _supervisor(top.table("supervisor"), os.path.splitext(os.path.basename(file))[0], known_settings or ())
    budget = _budget(top.table("budget"))
    defaults = take_settings(top.table("defaults"), known_settings)
    credentials = take_credentials(top.table("credentials"), defaults, "[defaults]")
    scheduler_table = top.table("scheduler")
    scheduler = scheduler_table.flag("enabled", True)
    scheduler_settings = take_settings(scheduler_table, known_settings, group_wide=False)
    directory = os.path.dirname(os.path.realpath(file))
    workers = _workers(top, directory, actors, supervisor, known_settings)
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
        app_dir=os.path.join(directory, app_dir) if app_dir else None,
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
        **asdict(take_policy(table)),
        preload=table.choice("preload", "auto", PRELOAD),
        logs=table.choice("logs", "auto", ("auto", "inherit", "capture")),
        max_booting=table.count("max_booting", None, 1, MAX_REPLICAS),
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


def _workers(
    top: Table, directory: str, actors: str | None, supervisor: SupervisorOptions, known: Collection[str] | None
) -> tuple[WorkerEntry, ...]:
    entries: list[WorkerEntry] = []
    for position, table in enumerate(top.tables("workers")):
        entry = take_worker(
            table,
            position,
            directory=directory,
            actors=actors,
            preload=supervisor.preload,
            policy=supervisor,
            known=known,
        )
        twins = [index for index, other in enumerate(entries) if other.name == entry.name]
        if twins:
            table.problem("name", f"{entry.name!r} is taken by workers[{twins[0]}]; names must differ")
        entries.append(entry)
    if not entries and "workers" not in top.faulty:
        top.problem("workers", "missing: a workgroup needs at least one [[workers]] table")
    return tuple(entries)
