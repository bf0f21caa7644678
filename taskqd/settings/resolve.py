"""One resolver for every command: gathers settings from their sources, and says where each came from.

The more specific source wins: command-line flag, ``[[workers]]`` key, a worker's own environment (``[workers.env]``,
then ``env_file``), ``[defaults]`` key, process environment, ``.env`` cascade (above the environment only with
``DOTENV_OVERRIDE=true``), built-in default.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from taskqd.domain.names import nearest
from taskqd.settings import environment as env
from taskqd.settings.errors import SettingsError
from taskqd.settings.model import ALIASES, PREFIX, SETTING_NAMES, Settings, describe, is_secret, variable
from taskqd.settings.rules import Violation, show
from taskqd.settings.values import dsn_password

DEFAULT = "default"
FLAG = "flag"
WORKER = "[[workers]]"
OWN_ENV = "[workers.env]"
ENV_FILE = "env_file"
OWN_SOURCES = (OWN_ENV, ENV_FILE)
"""What a kind of worker has in its environment for itself; before the group's defaults."""
DEFAULTS = "[defaults]"
WORKGROUP = "workgroup file"
SUPERVISOR = "supervisor"
_FILE_SOURCES = (WORKER, DEFAULTS, WORKGROUP)
_LISTENERS = ("health_socket_path", "metrics_host", "metrics_port")
_SHOWN = 80

_log = logging.getLogger("taskqd.settings")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings, where each value came from, and what a person should be told.

    ``sources`` maps every setting name to ``flag``, ``[[workers]]``, ``[workers.env]``, ``env_file``, ``[defaults]``,
    ``workgroup file``, ``supervisor``, ``environment``, the name of a ``.env`` file, or ``default``.
    """

    settings: Settings
    sources: dict[str, str]
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Layer:
    """The values of one source under their setting names."""

    source: str
    values: dict[str, object] = field(default_factory=dict)


def load_settings(
    flags: Mapping[str, object] | None = None,
    *,
    worker_keys: Mapping[str, object] | None = None,
    default_keys: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Settings:
    """Return the settings, or raise ``SettingsError`` with everything that is wrong.

    ``flags``, ``worker_keys`` and ``default_keys`` map setting names to values; a flag that is None or ``()``
    was not given. ``environ`` is the process environment by default, ``directory`` (by default the current
    one) holds the ``.env`` files. A child of a supervisor finds the workgroup file's values in
    ``TASKQD_SETTINGS``.
    """
    resolved = resolve_settings(
        flags, worker_keys=worker_keys, default_keys=default_keys, environ=environ, directory=directory
    )
    if not env.is_supervised(os.environ if environ is None else environ):
        for warning in resolved.warnings:
            _log.warning("%s", warning)
    return resolved.settings


def resolve_settings(
    flags: Mapping[str, object] | None = None,
    *,
    worker_keys: Mapping[str, object] | None = None,
    default_keys: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
    own_variables: Mapping[str, str] | None = None,
) -> Resolved:
    """Like :func:`load_settings`, and say where each value came from.

    ``own_variables`` names those of ``environ`` that a kind of worker has for itself, each with its source; its
    processes find them in ``TASKQD_ENV_SETTINGS``.
    """
    environ = os.environ if environ is None else environ
    if own_variables is None:
        own_variables = dict.fromkeys(environ.get("TASKQD_ENV_SETTINGS", "").split(), OWN_ENV)
    problems: list[str] = []
    layers = [_given(FLAG, {k: v for k, v in (flags or {}).items() if v is not None and v != ()}, problems)]
    if worker_keys:
        layers.append(_given(WORKER, worker_keys, problems))
    elif "TASKQD_SETTINGS" in environ:
        layers.append(_given(WORKGROUP, _handed_down(environ["TASKQD_SETTINGS"], problems), problems))
    shared = {name: value for name, value in environ.items() if name not in own_variables}
    for source in OWN_SOURCES:
        own = {name: environ[name] for name, of in own_variables.items() if of == source and name in environ}
        layers.append(_from_names(env.Names(source, own), problems))
    layers.append(_given(DEFAULTS, default_keys or {}, problems))

    process = env.read_process(shared)
    override = _override(environ, problems)
    chosen = next((str(each.values["environment"]) for each in layers if "environment" in each.values), None)
    files = env.read_cascade(directory or Path.cwd(), chosen, process, override, problems)
    for names in [*files, process] if override else [process, *files]:
        layers.append(_from_names(names, problems))

    if env.is_supervised(environ):
        layers = _supervised(layers, environ)
    warnings = tuple(env.link_warning(names) for names in [process, *files] if names.links)
    return _build(layers, problems, warnings)


def _given(source: str, keys: Mapping[str, object], problems: list[str]) -> _Layer:
    """Make a layer of setting names, as flags and the workgroup file give them."""
    layer = _Layer(source)
    for key, value in keys.items():
        name = ALIASES.get(key, key)
        if name not in SETTING_NAMES:
            hint = nearest(key, [*SETTING_NAMES, *ALIASES])
            problems.append(f"{_label(key, source)}: unknown setting{hint}")
        elif not _second_name(layer, key, value, problems):
            layer.values[name] = value
            if source in _FILE_SOURCES and is_secret(name) and _has_password(value):
                problems.append(
                    f"{_label(name, source)}: holds a password, which a workgroup file must not; "
                    f"set {variable(name)} in the environment or a .env file"
                )
    return layer


def _has_password(value: object) -> bool:
    """True when ``value`` is a DSN with a password."""
    try:
        return isinstance(value, str) and dsn_password(value) is not None
    except ValueError:
        return False


def _from_names(names: env.Names, problems: list[str]) -> _Layer:
    """Make a layer of environment variables."""
    layer = _Layer(names.source)
    for key, value in names.values.items():
        stem = key.removeprefix(PREFIX).lower() if key.startswith(PREFIX) and key.isupper() else ""
        name = ALIASES.get(stem, stem)
        if name not in SETTING_NAMES:
            hint = nearest(key.upper().removeprefix(PREFIX), [each.upper() for each in (*SETTING_NAMES, *ALIASES)])
            hint = hint.replace("'", "'" + PREFIX, 1)
            where = f"{names.source} {key}" if names.source in OWN_SOURCES else f"{key} ({names.source})"
            problems.append(f"{where}: unknown setting{hint}")
        elif not _second_name(layer, stem, value, problems):
            layer.values[name] = value
    return layer


def _second_name(layer: _Layer, key: str, value: object, problems: list[str]) -> bool:
    """True when the setting already has a value under its other name; a problem unless the two agree."""
    name = ALIASES.get(key, key)
    if name not in layer.values:
        return False
    if layer.values[name] != value:
        both = " and ".join(_label(each, layer.source) for each in (name, describe(name).alias or name))
        values = f"{_shorten(layer.values[name])} and {_shorten(value)}"
        problems.append(f"{both} are one setting and disagree: {values}; set one of them")
    return True


def _handed_down(text: str, problems: list[str]) -> Mapping[str, object]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        problems.append("TASKQD_SETTINGS (supervisor): must be a JSON object of setting names and values")
        return {}
    return values


def _override(environ: Mapping[str, str], problems: list[str]) -> bool:
    text = environ.get("DOTENV_OVERRIDE", "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text not in ("1", "true", "yes", "on"):
        problems.append(f"DOTENV_OVERRIDE = {text!r} (environment): must be true or false")
    return True


def _supervised(layers: list[_Layer], environ: Mapping[str, str]) -> list[_Layer]:
    """Leave listeners to the group: N children cannot share one port, and each has its own health socket."""
    for layer in layers:
        for name in _LISTENERS:
            layer.values.pop(name, None)
    own = _Layer(SUPERVISOR)
    if path := environ.get("TASKQD_HEALTH_SOCKET"):
        own.values["health_socket_path"] = path
    return [own, *layers]


def _build(layers: list[_Layer], problems: list[str], warnings: tuple[str, ...]) -> Resolved:
    raw: dict[str, object] = {}
    sources = dict.fromkeys(SETTING_NAMES, DEFAULT)
    for layer in layers:
        for name, value in layer.values.items():
            if name not in raw:
                raw[name], sources[name] = value, layer.source

    settings, errors, broken = _validate(raw)
    bad = {str(error["loc"][0]) for error in errors}
    if bad:  # the rules between the others still hold or not
        _, _, broken = _validate({name: value for name, value in raw.items() if name not in bad})
    problems.extend(_explain_value(error, raw, sources) for error in errors)
    problems.extend(_explain_rule(rule, sources) for rule in broken if not bad & rule.values.keys())
    if problems or settings is None:
        raise SettingsError(problems)
    return Resolved(settings, sources, warnings)


def _validate(raw: Mapping[str, object]) -> tuple[Settings | None, list[ErrorDetails], list[Violation]]:
    try:
        return Settings(**raw), [], []  # type: ignore[arg-type]
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
    broken = [rule for error in errors if error["type"] == "rules" for rule in error["ctx"]["violations"]]
    return None, [error for error in errors if error["type"] != "rules"], broken


def _explain_value(error: ErrorDetails, raw: Mapping[str, object], sources: Mapping[str, str]) -> str:
    name = str(error["loc"][0])
    about = describe(name)
    if error["type"] == "value_error" and not about.bounded:
        reason = str(error["ctx"]["error"])
    else:
        reason = f"must be {about.allowed}"
        if error["type"] == "value_error" and about.unit == "seconds":
            reason += ", written in seconds or like '250ms', '1.5s', '5m', '2h', '1d'"
    return f"{_show(name, raw[name], sources)}: {reason}"


def _explain_rule(rule: Violation, sources: Mapping[str, str]) -> str:
    subject, *others = [_show(name, value, sources) for name, value in rule.values.items()]
    return f"{subject}: must be {rule.bound}, with {', '.join(others)}"


def _show(name: str, value: object, sources: Mapping[str, str]) -> str:
    """Return where a setting was set and to what; a secret is masked."""
    source = sources[name]
    shown = "***" if is_secret(name) and value is not None else _shorten(value)
    where = "" if source in (FLAG, WORKER, *OWN_SOURCES, DEFAULTS) else f" ({source})"
    return f"{_label(name, source)} = {shown}{where}"


def _label(name: str, source: str) -> str:
    """Return the name of a setting as its source writes it."""
    if source == FLAG:
        return "--" + name.replace("_", "-")
    if source in (WORKER, DEFAULTS):
        return f"{source} {name}"
    if source in OWN_SOURCES:
        return f"{source} {variable(name)}"
    return name if source in (WORKGROUP, SUPERVISOR) else variable(name)


def _shorten(value: object) -> str:
    text = show(value) if isinstance(value, float) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
