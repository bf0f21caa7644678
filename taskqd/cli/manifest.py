"""Comparing Kubernetes manifests with the workgroup that they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from taskqd.cli.findings import PROBE_TIMEOUT, Finding, start_time
from taskqd.domain.errors import ConfigError
from taskqd.supervisor.plan import Plan

_DEFAULT_GRACE = 30
_POD = {
    "Pod": ("spec",),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"), ("spec", "template", "spec")),
}
"""Where in each kind of object the pod is described."""

_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a manifest. ``lines`` holds the line of each path in it."""

    file: str
    content: Any
    lines: Mapping[_Path, int]

    def finding(self, path: _Path, message: str, fatal: bool = False) -> Finding:
        """Return a finding at ``path``; when that is not written, at the line of what is around it."""
        place = path
        while place not in self.lines:
            place = place[:-1]
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        return Finding(self.file, self.lines[place], key, message, fatal)


@dataclass(frozen=True, slots=True)
class Workload:
    """A container that runs a workgroup, and its pod."""

    document: Document
    pod_path: _Path
    pod: Mapping[str, Any]
    path: _Path
    container: Mapping[str, Any]


def compare_manifest(plan: Plan, file: str) -> list[Finding]:
    """Return everything in the manifests that does not fit the workgroup, or could fit it better."""
    name = "<stdin>" if file == "-" else file
    workloads = [each for document in _read(file, name) for each in _workloads(document)]
    if not workloads:
        return [Finding(name, 1, "containers", "none runs `taskqd run FILE`", True)]
    return [finding for each in workloads for finding in (*_compare_pod(each, plan), *_compare_probes(each, plan))]


# -- reading --------------------------------------------------------------------------------------


def _read(file: str, name: str) -> list[Document]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        nodes = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node is not None]
        contents = [content for content in yaml.safe_load_all(text) if content is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: invalid YAML: {problem or error}") from None
    return [Document(name, content, dict(_lines(node, ()))) for node, content in zip(nodes, contents, strict=False)]


def _lines(node: yaml.Node, path: _Path) -> Iterator[tuple[_Path, int]]:
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value))
            yield from _lines(value, inner)
            yield inner, key.start_mark.line + 1  # the key's line, not that of a value below it
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            yield from _lines(value, (*path, position))


def _workloads(document: Document) -> Iterator[Workload]:
    items = _at(document.content, ("items",))
    places: list[_Path] = [("items", at) for at in range(len(items))] if isinstance(items, list) else [()]
    for place in places:
        kind = _at(document.content, (*place, "kind"))
        if kind not in _POD:
            continue
        pod_path = (*place, *_POD[kind])
        pod = _at(document.content, pod_path)
        containers = _at(pod, ("containers",))
        for position, container in enumerate(containers if isinstance(containers, list) else []):
            if isinstance(container, Mapping) and _runs_group(container):
                yield Workload(document, pod_path, pod, (*pod_path, "containers", position), container)


def _at(value: Any, path: _Path) -> Any:
    for part in path:
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        else:
            return None
    return value


def _runs_group(container: Mapping[str, Any]) -> bool:
    words = _words(container.get("command")) + _words(container.get("args"))
    if not container.get("command"):
        return words[:1] == ["run"]  # the image's own entry point is taskqd
    return ("taskqd", "run") in pairwise(Path(word).name for word in words)


def _words(parts: Any) -> list[str]:
    return " ".join(map(str, parts)).split() if isinstance(parts, Sequence) and not isinstance(parts, str) else []


# -- comparing ------------------------------------------------------------------------------------


def _compare_pod(work: Workload, plan: Plan) -> Iterator[Finding]:
    document, pod = work.document, work.pod
    key = (*work.pod_path, "terminationGracePeriodSeconds")
    granted = _number(pod.get("terminationGracePeriodSeconds"), _DEFAULT_GRACE)
    sleep = _number(_at(work.container, ("lifecycle", "preStop", "sleep", "seconds")), 0)
    if granted - sleep < plan.grace:
        spent = f" less the {sleep:g} s of the preStop hook" if sleep else ""
        yield document.finding(
            key,
            f"{granted:g} s{spent} must be at least the group's termination_grace_period of {plan.grace:g} s: the "
            f"kubelet would kill it while it stops; write {plan.grace + sleep:g}",
            True,
        )
    if _at(work.container, ("lifecycle", "preStop")) and not sleep:
        text = "takes its time out of the grace; a group needs none, as nothing connects to it"
        yield document.finding((*work.path, "lifecycle", "preStop"), text)
    shell = _words(work.container.get("command"))[:2]
    if (
        shell
        and Path(shell[0]).name in ("sh", "bash", "ash", "dash")
        and "exec" not in _words(work.container["command"])
    ):
        text = 'a shell does not pass SIGTERM on; write ["taskqd", "run", "FILE"]'
        yield document.finding((*work.path, "command"), text, True)
    if pod.get("enableServiceLinks") is not False:
        text = "a service named taskq would put TASKQ_* variables into the pod; write false"
        yield document.finding((*work.pod_path, "enableServiceLinks"), text)


def _compare_probes(work: Workload, plan: Plan) -> Iterator[Finding]:
    document = work.document
    for name in _PROBES:
        probe = work.container.get(name)
        if not isinstance(probe, Mapping):
            continue
        path = (*work.path, name)
        timeout = _number(probe.get("timeoutSeconds"), 1)
        command, http = _words(_at(probe, ("exec", "command"))), probe.get("httpGet")
        if command and timeout < PROBE_TIMEOUT:
            text = f"{timeout:g} s is short: the probe itself takes up to 2 s and must start; write {PROBE_TIMEOUT}"
            yield document.finding((*path, "timeoutSeconds"), f"{text} or more")
        if isinstance(http, Mapping):
            yield from _compare_http(work, plan, (*path, "httpGet"), http)
        asked = command[-1:] if not isinstance(http, Mapping) else [str(http.get("path", "")).lstrip("/")]
        if name == "livenessProbe" and asked in (["ready"], ["startup"]):
            text = f"asks for {asked[0]!r}, so that a database that is away restarts the pod; ask for 'live'"
            yield document.finding(path, text, True)
    startup = work.container.get("startupProbe")
    if isinstance(startup, Mapping):
        period, failures = _number(startup.get("periodSeconds"), 10), _number(startup.get("failureThreshold"), 3)
        allowed = period * failures + _number(startup.get("initialDelaySeconds"), 0)
        if allowed < start_time(plan):
            text = f"{period:g} s × {failures:g} end a start after {allowed:g} s, which may take {start_time(plan):g} s"
            yield document.finding((*work.path, "startupProbe", "failureThreshold"), text)


def _compare_http(work: Workload, plan: Plan, path: _Path, http: Mapping[str, Any]) -> Iterator[Finding]:
    if plan.health_address is None:
        text = "nothing answers over TCP: set [supervisor] health_address, or probe with exec `taskqd health`"
        yield work.document.finding(path, text, True)
        return
    named = {port.get("name"): port.get("containerPort") for port in _at(work.container, ("ports",)) or []}
    port = named.get(http.get("port"), http.get("port"))
    if str(port) != plan.health_address.rpartition(":")[2]:
        text = f"{port!r} is not the port of [supervisor] health_address = {plan.health_address!r}"
        yield work.document.finding((*path, "port"), text, True)
    if http.get("path") not in ("/startup", "/live", "/ready"):
        text = f"{http.get('path')!r} must be /startup, /live or /ready"
        yield work.document.finding((*path, "path"), text, True)


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default
