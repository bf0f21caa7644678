"""``taskqd init``: writes a workgroup file, systemd units or Kubernetes manifests to begin with."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import click
import tomli_w

from taskqd.cli.findings import start_time
from taskqd.domain.errors import ConfigError
from taskqd.domain.names import QUEUE_RULE, SCHEMA_RULE, is_queue_name, is_schema_name
from taskqd.supervisor.consult import consult_alone
from taskqd.supervisor.plan import Plan
from taskqd.supervisor.stopping import Graces, scale
from taskqd.supervisor.workgroup import WorkgroupError, load_workgroup, parse_workgroup

DRAIN_WITHIN = 60
"""Seconds within which the pods that KEDA adds should get the waiting jobs done."""

STARTUP_PERIOD = 2
"""Seconds between two startup probes."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a workgroup file is written from; these are the defaults."""

    file: str = "workgroup.toml"
    actors: str = "myapp.jobs:actors"
    name: str = "myapp"
    worker: str = "main"
    replicas: int = 2
    queues: tuple[str, ...] = ("default",)
    max_concurrency: int = 8
    grace: float = 85.0
    health_address: str | None = None
    schema: str = "taskq"


@dataclass(frozen=True, slots=True)
class Model:
    """What a unit or a manifest must know of its workgroup."""

    text: str
    group: str
    actors: str
    queues: tuple[str, ...]
    schema: str
    slots: int
    """Jobs that the group runs at once."""
    port: int | None
    """Of its ``health_address``."""
    plan: Plan
    graces: Graces
    """Of its first worker."""


@click.group()
def command() -> None:
    """Write a file to begin with: a workgroup, systemd units for it, or Kubernetes manifests for it.

    Asks what the flags leave open when a person is there to answer, else takes the defaults. Overwrites nothing
    without --force.
    """


_force = click.option("--force", is_flag=True, help="Overwrite files that exist.")


@command.command()
@click.option("--actors", metavar="MODULE:ATTR", help="The actors of all workers.")
@click.option("--name", metavar="NAME", help="The name of the group.")
@click.option("--worker", metavar="NAME", help="The name of its workers.")
@click.option("--replicas", type=click.IntRange(1, 1024), metavar="N", help="How many worker processes.")
@click.option("--queue", "queues", multiple=True, metavar="NAME", help="A queue to serve; repeat it.")
@click.option("--max-concurrency", type=click.IntRange(1, 10_000), metavar="N", help="Jobs that one runs at once.")
@click.option(
    "--grace",
    type=click.FloatRange(10, 86400),
    callback=lambda _context, option, value: _number(option, value),
    metavar="SECONDS",
    help="What the platform grants to stop.",
)
@click.option("--health-address", metavar="HOST:PORT", help="Serve probes and metrics over TCP too.")
@click.option("--schema", metavar="NAME", help="The database schema.")
@click.option(
    "--output", "file", default="workgroup.toml", show_default=True, metavar="FILE", help="The file to write."
)
@_force
def workgroup(file: str, force: bool, **flags: Any) -> None:
    """Write a workgroup file."""
    if not file.isprintable():
        raise click.BadParameter(f"{file!r} must be a path without control characters", param_hint="--output")
    asked = {"actors": "Actors, as module:attribute", "name": "Name of the group", "replicas": "Worker processes"}
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    defaults = replace(Answers(), file=Path(file).name)
    for key, question in asked.items():
        if key not in given:
            given[key] = _ask(question, getattr(defaults, key))
    _write(Path(file).parent, {Path(file).name: render_workgroup(replace(defaults, **given))}, force)
    click.echo(f"next: taskqd check {file}")


@command.command()
@click.argument("file", metavar="[WORKGROUP]", required=False)
@click.option("--user", help="The user that runs it.  [default: taskqd]")
@click.option("--bin", "binary", metavar="PATH", help="The taskqd command.  [default: /opt/app/bin/taskqd]")
@click.option("--path", metavar="PATH", help="Where the workgroup is installed.  [default: /etc/taskqd/workgroup.toml]")
@click.option("--output", default="systemd", show_default=True, metavar="DIR", help="Where to write the units.")
@_force
def systemd(file: str | None, user: str | None, binary: str | None, path: str | None, output: str, force: bool) -> None:
    """Write systemd units whose times are those of WORKGROUP, or of the defaults.

    taskqd.service with a drop-in for systemd 254 and later, and taskqd-worker@.service and taskqd-scheduler.service
    for hosts where systemd is to watch each process.
    """
    user = user or _ask("User that runs it", "taskqd")
    binary = binary or _ask("The taskqd command", "/opt/app/bin/taskqd")
    path = path or _ask("Where the workgroup is installed", "/etc/taskqd/workgroup.toml")
    _require(r"[a-z_][a-z0-9_-]*", user, "--user", "a user's name")
    for option, value in (("--bin", binary), ("--path", path)):
        _require(r"/[^\s%\"'\\]+", value, option, "an absolute path without blanks, quotes, % or backslashes")
    _write(Path(output), render_systemd(_model(file), user=user, binary=binary, path=path), force)


@command.command()
@click.argument("file", metavar="[WORKGROUP]", required=False)
@click.option("--name", help="The name of the objects.  [default: taskqd]")
@click.option("--image", metavar="IMAGE:TAG", help="The image to run.  [default: registry.example.com/myapp:1.0.0]")
@click.option("--replicas", type=click.IntRange(1, 1000), metavar="N", help="Pods, each a whole group.  [default: 2]")
@click.option("--output", default="k8s", show_default=True, metavar="DIR", help="Where to write base and overlays.")
@_force
def k8s(file: str | None, name: str | None, image: str | None, replicas: int | None, output: str, force: bool) -> None:
    """Write Kubernetes manifests (kustomize) whose times are those of WORKGROUP, or of the defaults.

    The file becomes a ConfigMap; it must set [supervisor] health_address, which probes and scrapers ask.
    """
    name = name or _ask("Name of the objects", "taskqd")
    image = image or _ask("Image to run", "registry.example.com/myapp:1.0.0")
    replicas = replicas or _ask("Pods", 2)
    _require(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name, "--name", "a DNS label of at most 40 characters")
    _require(r"[a-z0-9][\w./:-]*:[\w.-]+", image, "--image", "an image with its tag")
    _write(Path(output), render_k8s(_model(file), name=name, image=image, replicas=replicas), force)


# -- what the files say ---------------------------------------------------------------------------


def render_workgroup(answers: Answers) -> str:
    """Return a workgroup file. Raises ``WorkgroupError`` when the answers do not make a valid one."""
    health = "# health_address = " + _toml("0.0.0.0:8081")
    if answers.health_address is not None:
        health = f"health_address = {_toml(answers.health_address)}"
    text = _fill(
        _template("workgroup.toml").read_text(encoding="utf-8"),
        {
            "file": answers.file,
            "actors": _toml(answers.actors),
            "name": _toml(answers.name),
            "health": health,
            "grace": _toml(_plain(answers.grace)),
            "schema": _toml(answers.schema),
            "worker": _toml(answers.worker),
            "replicas": _toml(answers.replicas),
            "queues": f"[{', '.join(map(_toml, answers.queues))}]",
            "max_concurrency": _toml(answers.max_concurrency),
        },
    )
    _, problems = parse_workgroup(tomllib.loads(text), answers.file)
    problems += [f"queue {name!r} must be {QUEUE_RULE}" for name in answers.queues if not is_queue_name(name)]
    if not is_schema_name(answers.schema):
        problems.append(f"schema {answers.schema!r} must be {SCHEMA_RULE}")
    if problems:
        raise WorkgroupError(problems)
    return text


def render_systemd(model: Model, *, user: str, binary: str, path: str) -> dict[str, str]:
    """Return the units by their path below the directory."""
    values = {
        "group": model.group,
        "user": user,
        "bin": binary,
        "workgroup": path,
        "actors": model.actors,
        "start": f"{start_time(model.plan):g}",
        "grace": f"{model.plan.grace:g}",
        "cancellation": f"{model.graces.cancellation:g}",
        "cleanup": f"{model.graces.cleanup:g}",
        "hardening": _template("systemd/hardening").read_text(encoding="utf-8").rstrip(),
    }
    return {name: _fill(text, values) for name, text in _tree("systemd").items() if name != "hardening"}


def render_k8s(model: Model, *, name: str, image: str, replicas: int) -> dict[str, str]:
    """Return the manifests by their path below the directory."""
    if model.port is None:
        raise ConfigError(
            "the workgroup has no [supervisor] health_address, which the probes ask; add "
            'health_address = "0.0.0.0:8081"'
        )
    repository, _, tag = image.rpartition(":")
    values = {
        "name": name,
        "group": model.group,
        "image": repository,
        "tag": tag,
        "replicas": str(replicas),
        "max_pods": str(max(5 * replicas, 2)),
        "grace": str(math.ceil(model.plan.grace)),
        "port": str(model.port),
        "start_failures": str(math.ceil(start_time(model.plan) / STARTUP_PERIOD)),
        "schema": model.schema,
        "slots": str(model.slots),
        "drain_within": str(DRAIN_WITHIN),
        "target": str(model.slots * DRAIN_WITHIN),
        "queues": ", ".join(f"'{queue}'" for queue in model.queues),
    }
    written = {path: _fill(text, values) for path, text in _tree("k8s").items()}
    return {**written, "base/workgroup.toml": model.text}


def default_model() -> Model:
    """Return the model of the workgroup that ``init workgroup`` writes by default, with its health on port 8081."""
    answers = replace(Answers(), health_address="0.0.0.0:8081")
    graces = scale(answers.grace, Graces(30.0, 10.0), fixed_cancellation=False, fixed_cleanup=False)
    return Model(
        text=render_workgroup(answers),
        group=answers.name,
        actors=answers.actors,
        queues=answers.queues,
        schema=answers.schema,
        slots=answers.replicas * answers.max_concurrency,
        port=8081,
        plan=Plan(group=answers.name, children=(), grace=answers.grace, health_address=answers.health_address),
        graces=graces,
    )


def _model(file: str | None) -> Model:
    if file is None:
        return default_model()
    plan, _ = asyncio.run(consult_alone([file, "--for", "budget", "--offline"]))
    group, _ = load_workgroup(file)
    workers = {worker.name: worker for worker in group.workers}
    shared = group.defaults.get("queues", "default")
    queues = [queue for worker in group.workers for queue in _names(worker.settings.get("queues", shared))]
    first = next(child for child in plan.children if child.name in workers)
    return Model(
        text=Path(file).read_text(encoding="utf-8"),
        group=plan.group,
        actors=group.workers[0].actors,
        queues=tuple(dict.fromkeys(queues)),
        schema=plan.budget["schema"],
        slots=sum(crew["replicas"] * crew["max_concurrency"] for crew in plan.budget["workers"]),
        port=group.supervisor.health_address[1] if group.supervisor.health_address else None,
        plan=plan,
        graces=first.graces,
    )


def _names(queues: Any) -> Sequence[str]:
    return [name.strip() for name in queues.split(",")] if isinstance(queues, str) else queues


# -- small things ---------------------------------------------------------------------------------


def _ask(question: str, default: _T) -> _T:
    if not sys.stdin.isatty():
        return default
    answer: _T = click.prompt(question, default=default)
    return answer


def _require(pattern: str, value: str, option: str, what: str) -> None:
    if not re.fullmatch(pattern, value, re.ASCII):
        raise click.BadParameter(f"{value!r} must be {what}", param_hint=option)


def _number(option: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("'nan' is no number", param=option)
    return value


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _toml(value: Any) -> str:
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _template(name: str) -> Traversable:
    return files("taskqd.cli").joinpath("templates", *name.split("/"))


def _tree(name: str) -> dict[str, str]:
    found: dict[str, str] = {}

    def walk(place: Traversable, prefix: str) -> None:
        for entry in sorted(place.iterdir(), key=lambda each: each.name):
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            else:
                found[prefix + entry.name] = entry.read_text(encoding="utf-8")

    walk(_template(name), "")
    return found


def _fill(text: str, values: Mapping[str, str]) -> str:
    """Put ``values`` in the places of their ``@{name}``."""
    return re.sub(r"@\{(\w+)\}", lambda match: values[match[1]], text)


def _write(directory: Path, texts: Mapping[str, str], force: bool) -> None:
    """Write all files, or none when one is in the way."""
    paths = {directory / name: text for name, text in texts.items()}
    try:
        taken = [str(path) for path in paths if path.exists()]
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be written: {error.strerror or error}") from None
    if taken and not force:
        raise ConfigError(f"{', '.join(taken)}: exists; --force overwrites, --output writes elsewhere")
    for path, text in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
        click.echo(f"wrote {path}")
